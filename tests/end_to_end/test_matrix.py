"""Any format to any format at any world size, judged by the target's own framework.

A cell is a source made by N real processes, converted, and resumed by M: what the framework then holds has the bits
that the source's framework gathered, and the next losses are those of the run that was never interrupted.
``make test`` has every pair of formats with one of zero1 and zero2, ``make test-all`` the other pairs, and two pairs at
several changes of world size; the soak has all cells.
"""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.tensor  # for torch.load of files of ranks

import ckpt_tools
from tests.support.ranks import for_ranks
from tests.support.sweep import tiered
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
"""Those that wrote each source of the cells with every pair of formats."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One conversion of the matrix."""

    source: str
    target: str
    from_ranks: int
    to_ranks: int

    def __str__(self) -> str:
        return f"{self.source}x{self.from_ranks}-{self.target}x{self.to_ranks}"

    name = property(__str__)

    @property
    def case(self) -> str:
        """DeepSpeed's universal load leaves out frozen weights and buffers, so that its cells have neither."""
        return "plain" if self.target == "universal" else "awkward"


FULL = [Cell(s, t, n, m) for m, n, s, t in itertools.product(WORLD_SIZES, WORLD_SIZES, SOURCES, TARGETS)]
PAIRS = {
    (source, target): Cell(source, target, RANKS[source], WORLD_SIZES[(row + column) % len(WORLD_SIZES)])
    for row, source in enumerate(SOURCES)
    for column, target in enumerate(TARGETS)
}
LEFT_OUT = [*itertools.product(("zero1", "zero2"), ("zero1", "zero2")), ("zero2", "zero3"), ("zero3", "zero1"),
            ("zero2", "fsdp2"), ("fsdp2", "zero2"), ("zero1", "universal"), ("universal", "zero2")]  # fmt: skip
"""Pairs of ``make test-all``: to another of two stages that are written alike, or from it."""
RESIZED = ["fsdp2x1-zero3x4", "fsdp2x4-zero3x1", "zero2x3-fsdp2x1"]


@pytest.mark.parametrize(
    "cell",
    tiered(
        FULL,
        test=[cell.name for pair, cell in PAIRS.items() if pair not in LEFT_OUT or pair == ("zero1", "zero2")],
        extended=[*(PAIRS[pair].name for pair in LEFT_OUT if pair != ("zero1", "zero2")), *RESIZED],
    ),
)
def test_cell(cell, checkpoint, resume, tmp_path):
    to, kind = TARGETS[cell.target]
    truth, resumed = _resumed(
        (SOURCES[cell.source], cell.case, cell.from_ranks), to, kind, cell.to_ranks, checkpoint, resume, tmp_path
    )
    assert_same_state(truth, resumed)
    # torch and DeepSpeed add in different orders: on some processors a loss differs in its last bit.
    same_sums = (cell.source == "fsdp2") == (cell.target == "fsdp2")
    assert_same_course(truth, resumed, exactly=same_sums and cell.from_ranks == cell.to_ranks)


def _resumed(
    made: tuple[str, str, int], to: str, kind: str, world_size: int, checkpoint: Any, resume: Any, folder: Any
) -> tuple[Truth, Truth]:
    """What the source's framework gathered, and what that of the target has loaded after a conversion."""
    source = checkpoint(*made)
    ckpt_tools.convert(source.checkpoint, folder / "out", to=to, **for_ranks(to, world_size))
    return Truth.load(source.root), resume(kind, made[1], folder / "out", world_size)


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


def _other(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.extended)


FLAVOURS = [
    ("zero3-bf16", "zero1", "zero1-bf16"),
    _other("zero1-bf16", "zero3", "zero3-bf16"),
    _other("zero1-bf16acc", "zero2", "zero2-bf16"),
    _other("zero2-fp16", "zero3", "zero3-fp16"),
    _other("zero3-fp32-sub", "zero1", "zero1-fp32"),
]


@pytest.mark.parametrize(("source", "to", "kind"), FLAVOURS)
def test_flavours(source, to, kind, checkpoint, resume, tmp_path):
    """16-bit models with fp32 masters, from one stage and world size to another."""
    truth, resumed = _resumed((source, "awkward", 3), to, kind, 2, checkpoint, resume, tmp_path)
    assert_same_bits(truth.tensors, resumed.tensors)
    assert_same_groups(truth, resumed)
    assert_same_course(truth, resumed, exactly=False)


OTHERS = [
    ("fsdp2", "sgd", 3, "zero3", "zero3-fp32", 2),
    _other("zero1-fp32", "sgd", 3, "dcp", "fsdp2", 2),
    ("fsdp2-verl", "plain", 2, "zero3", "zero3-fp32", 3),
    *(_other("fsdp2-verl", "plain", 2, *TARGETS[to], 3) for to in ("fsdp2", "universal")),
]


@pytest.mark.parametrize(("source", "case", "from_ranks", "to", "kind", "to_ranks"), OTHERS)
def test_momentum_of_sgd_and_files_of_ranks(source, case, from_ranks, to, kind, to_ranks, checkpoint, resume, tmp_path):
    truth, resumed = _resumed((source, case, from_ranks), to, kind, to_ranks, checkpoint, resume, tmp_path)
    assert_same_state(truth, resumed)
    assert_same_course(truth, resumed, exactly=False)


def test_verl_resumes_at_another_world_size(checkpoint, resume, tmp_path):
    root = checkpoint("fsdp2-verl", "plain", 2).root
    out = tmp_path / "out"
    ckpt_tools.reshard(root / "checkpoint", out, world_size=3)
    wanted = {f"{item}_world_size_3_rank_{n}.pt" for item in ("model", "optim", "extra_state") for n in range(3)}
    assert {path.name for path in out.iterdir()} == wanted | {"fsdp_config.json", "huggingface"}
    assert json.loads((out / "fsdp_config.json").read_text())["world_size"] == 3
    configs = [(folder / "huggingface" / "config.json").read_bytes() for folder in (out, root / "checkpoint")]
    assert configs[0] == configs[1] != b""
    truth, found = Truth.load(root), resume("fsdp2-verl", "plain", out, 3)
    assert_same_state(truth, found)
    assert_same_course(truth, found, exactly=False)


def test_another_format_becomes_verls(checkpoint, tmp_path):
    """A mesh of GPUs cannot be used on a CPU: torch loads the files, and the whole state is in them."""
    source = checkpoint("fsdp2", "awkward", 2).checkpoint
    report = ckpt_tools.convert(source, tmp_path / "out", to="sharded", world_size=3)
    assert "the device mesh" in {note.what for note in report.plan.notes}
    assert ckpt_tools.verify(source, tmp_path / "out").equal
    model = torch.load(tmp_path / "out" / "model_world_size_3_rank_2.pt", weights_only=True)
    weight = model["embed.weight"]
    assert weight.device_mesh.device_type == "cuda" and weight.device_mesh.mesh_dim_names == ("fsdp",)
    assert weight.shape == (13, 7) and weight.to_local().shape == (3, 7)
    assert not hasattr(model["keepsakes.table32"], "to_local")


FULL_FILES = [("fsdp2", "whole.pt", "zero2", "zero2-fp32"), _other("zero3-fp32", "whole.safetensors", "dcp", "fsdp2")]


@pytest.mark.parametrize(("source", "file", "to", "kind"), FULL_FILES)
def test_one_file_carries_the_whole_state(source, file, to, kind, checkpoint, resume, tmp_path):
    made = checkpoint(source, "awkward", 3)
    ckpt_tools.convert(made.checkpoint, tmp_path / file, state="all")
    assert ckpt_tools.verify(made.checkpoint, tmp_path / file).equal
    ckpt_tools.convert(tmp_path / file, tmp_path / "out", to=to, world_size=2)
    truth, resumed = Truth.load(made.root), resume(kind, "awkward", tmp_path / "out", 2)
    assert_same_state(truth, resumed)
    assert_same_course(truth, resumed, exactly=False)


@pytest.mark.parametrize("source", ["fsdp2", "zero3-bf16"])
def test_reshard_keeps_the_format(source, checkpoint, tmp_path):
    made = checkpoint(source, "awkward", 3)
    ckpt_tools.reshard(made.checkpoint, tmp_path / "out", world_size=4)
    before, after = ckpt_tools.inspect(made.checkpoint), ckpt_tools.inspect(tmp_path / "out")
    assert (after.format, after.world_size) == (before.format, 4)
    assert ckpt_tools.verify(made.checkpoint, tmp_path / "out").equal
