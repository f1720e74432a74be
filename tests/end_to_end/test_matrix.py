"""Any format to any format at any world size, judged by the target's own framework.

A cell is a source made by N real processes, converted, and resumed by M: what the framework then holds has the bits
that the source's framework gathered, and the next losses are those of the run that was never interrupted.
``make test`` has every pair of formats, each target at every world size; ``make test-all`` two pairs at every change of
world size; the soak has all cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ckpt_tools
from fixtures.store import Fixture
from tests.support.ranks import for_ranks
from tests.support.truth import MASTER, WEIGHT, Truth, assert_same_bits

SOURCES = {
    "fsdp2": "fsdp2",
    "zero1": "zero1-fp32",
    "zero2": "zero2-fp32",
    "zero3": "zero3-fp32",
    "universal": "universal-zero3-fp32",
}
TARGETS = {
    "fsdp2": ("dcp", "fsdp2"),
    "zero1": ("zero1", "zero1-fp32"),
    "zero2": ("zero2", "zero2-fp32"),
    "zero3": ("zero3", "zero3-fp32"),
    "universal": ("universal", "universal-zero2-fp32"),
}
WORLD_SIZES = (1, 2, 3, 4)
RANKS = {"fsdp2": 2, "zero1": 3, "zero2": 2, "zero3": 4, "universal": 2}
"""Those that wrote each source of ``make test``."""
EVERY_WORLD_SIZE = (("fsdp2", "zero3"), ("zero2", "fsdp2"))

Checkpoint = Callable[[str, str, int], Fixture]


@dataclass(frozen=True, slots=True)
class Cell:
    """One conversion of the matrix."""

    source: str
    target: str
    from_ranks: int
    to_ranks: int

    def __str__(self) -> str:
        return f"{self.source}x{self.from_ranks}-{self.target}x{self.to_ranks}"

    @property
    def case(self) -> str:
        """DeepSpeed's universal load leaves out frozen weights and buffers, so that its cells have neither."""
        return "plain" if self.target == "universal" else "awkward"


FULL = [Cell(s, t, n, m) for m, n, s, t in itertools.product(WORLD_SIZES, WORLD_SIZES, SOURCES, TARGETS)]
PAIRWISE = {
    Cell(source, target, RANKS[source], WORLD_SIZES[(row + column) % len(WORLD_SIZES)])
    for row, source in enumerate(SOURCES)
    for column, target in enumerate(TARGETS)
}


def marks_of(cell: Cell) -> Any:
    if cell in PAIRWISE:
        return ()
    return pytest.mark.extended if (cell.source, cell.target) in EVERY_WORLD_SIZE else pytest.mark.soak


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=marks_of(cell)) for cell in FULL])
def test_cell(cell, checkpoint, resume, tmp_path):
    made = checkpoint(SOURCES[cell.source], cell.case, cell.from_ranks)
    to, kind = TARGETS[cell.target]
    ckpt_tools.convert(made.checkpoint, tmp_path / "out", to=to, **for_ranks(to, cell.to_ranks))
    truth = Truth.load(made.root)
    resumed = resume(kind, cell.case, tmp_path / "out", cell.to_ranks)
    assert_same_state(truth, resumed)
    # torch and DeepSpeed add in different orders: on some processors a loss differs in its last bit.
    same_sums = (cell.source == "fsdp2") == (cell.target == "fsdp2")
    assert_same_course(truth, resumed, exactly=same_sums and cell.from_ranks == cell.to_ranks)


def assert_same_state(truth: Truth, resumed: Truth) -> None:
    """Weights, masters, moments and steps, bit for bit, and the groups with their hyperparameters."""
    assert_same_bits(truth.best_weights(), resumed.best_weights())
    assert_same_bits(_without_weights(truth), _without_weights(resumed))
    assert_same_groups(truth, resumed)


def assert_same_groups(truth: Truth, resumed: Truth) -> None:
    """Every group with every hyperparameter of the source.

    ``bias_correction`` may come on top: DeepSpeed's own FusedAdam and DeepSpeedCPUAdam, which a job may use where the
    source used torch's, raise KeyError at the first step without it. torch's optimizers leave it alone.
    """
    wanted, found = ([_shared_options(group) for group in each.facts["groups"]] for each in (truth, resumed))
    assert found == wanted


def _shared_options(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "options": {name: v for name, v in group["options"].items() if name != "bias_correction"}}


def _without_weights(truth: Truth) -> dict[tuple[str, str], np.ndarray]:
    return {key: tensor for key, tensor in truth.tensors.items() if key[1] not in (WEIGHT, MASTER)}


def assert_same_course(truth: Truth, resumed: Truth, *, exactly: bool) -> None:
    """The scheduler, the counts, and the next losses."""
    for fact in ("scheduler", "global_step", "epoch"):
        assert resumed.facts[fact] == truth.facts[fact], fact
    tolerance = 0 if exactly else 1e-6
    np.testing.assert_allclose(resumed.facts["losses"], truth.facts["losses"], rtol=tolerance, atol=0)


FLAVOURS = [
    ("zero3-bf16", "zero1", "zero1-bf16", {}),
    ("zero1-bf16", "zero3", "zero3-bf16", {}),
    ("zero1-bf16acc", "zero2", "zero2-bf16", {}),
    ("zero2-fp16", "zero3", "zero3-fp16", {}),
    ("zero3-fp16", "zero2", "zero2-fp16", {}),
    ("zero3-fp32-sub", "zero1", "zero1-fp32", {}),
]


@pytest.mark.parametrize(("source", "to", "kind", "options"), FLAVOURS, ids=lambda value: str(value) or "-")
def test_flavours(source, to, kind, options, checkpoint, resume, tmp_path):
    """16-bit models with fp32 masters, from one stage and world size to another."""
    made = checkpoint(source, "awkward", 3)
    ckpt_tools.convert(made.checkpoint, tmp_path / "out", to=to, world_size=2, **options)
    truth, resumed = Truth.load(made.root), resume(kind, "awkward", tmp_path / "out", 2)
    assert_same_bits(truth.tensors, resumed.tensors)
    assert_same_groups(truth, resumed)
    assert_same_course(truth, resumed, exactly=False)


@pytest.mark.parametrize(("source", "to", "kind"), [("fsdp2", "zero3", "zero3-fp32"), ("zero1-fp32", "dcp", "fsdp2")])
def test_sgd_with_momentum(source, to, kind, checkpoint, resume, tmp_path):
    made = checkpoint(source, "sgd", 3)
    ckpt_tools.convert(made.checkpoint, tmp_path / "out", to=to, world_size=2)
    truth, resumed = Truth.load(made.root), resume(kind, "sgd", tmp_path / "out", 2)
    assert_same_state(truth, resumed)
    assert_same_course(truth, resumed, exactly=False)


ROUND_TRIPS = [(a, b) for a, b in itertools.product(TARGETS, TARGETS) if a != b]


@pytest.mark.parametrize(("first", "second"), ROUND_TRIPS)
def test_there_and_back_is_the_same_state(first, second, checkpoint, tmp_path):
    made = checkpoint(SOURCES[first], "plain" if "universal" in (first, second) else "awkward", 2)
    to_first, to_second = TARGETS[first][0], TARGETS[second][0]
    ckpt_tools.convert(made.checkpoint, tmp_path / "there", to=to_second, **for_ranks(to_second, 3))
    ckpt_tools.convert(tmp_path / "there", tmp_path / "back", to=to_first, **for_ranks(to_first, 2))
    report = ckpt_tools.verify(made.checkpoint, tmp_path / "back")
    assert report.equal, report.differences


FULL_FILES = [
    ("fsdp2", "whole.pt", "zero2", "zero2-fp32"),
    ("fsdp2", "whole.safetensors", "dcp", "fsdp2"),
    ("zero3-fp32", "whole.safetensors", "zero3", "zero3-fp32"),
    ("zero1-fp32", "whole.pt", "dcp", "fsdp2"),
]


@pytest.mark.parametrize(("source", "file", "to", "kind"), FULL_FILES)
def test_one_file_carries_the_whole_state(source, file, to, kind, checkpoint, resume, tmp_path):
    made = checkpoint(source, "awkward", 3)
    ckpt_tools.convert(made.checkpoint, tmp_path / file, state="all")
    assert ckpt_tools.verify(made.checkpoint, tmp_path / file).equal
    ckpt_tools.convert(tmp_path / file, tmp_path / "out", to=to, world_size=2)
    truth, resumed = Truth.load(made.root), resume(kind, "awkward", tmp_path / "out", 2)
    assert_same_state(truth, resumed)
    assert_same_course(truth, resumed, exactly=False)


@pytest.mark.parametrize("source", ["fsdp2", "zero1-fp32", "zero3-bf16"])
def test_reshard_keeps_the_format(source, checkpoint, tmp_path):
    made = checkpoint(source, "awkward", 3)
    ckpt_tools.reshard(made.checkpoint, tmp_path / "out", world_size=4)
    assert ckpt_tools.inspect(tmp_path / "out").format == ckpt_tools.inspect(made.checkpoint).format
    assert ckpt_tools.inspect(tmp_path / "out").world_size == 4
    assert ckpt_tools.verify(made.checkpoint, tmp_path / "out").equal
