"""A run that Megatron-Core itself trained and saved goes on in FSDP2 and DeepSpeed as it would have in Megatron.

The model, its names and its stacked shapes are those of ``fixtures.megatron_run``. Two judges: the losses of
Megatron's own next steps, and those of plain torch from what Megatron's own loader gives.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import ckpt_tools
from fixtures import launch, megatron_run
from tests.support.ranks import for_ranks
from tests.support.truth import MASTER, WEIGHT, Truth, assert_same_bits

pytestmark = [pytest.mark.extended, pytest.mark.judges]

RANKS = 2

CLOSE = {"fp32": 1e-6, "bf16": 2.0**-7}
"""How far losses may differ, relative to them. The state that is resumed is equal bit by bit. The kernel of a product
in bfloat16 depends on the processor and on the batch of a rank, and each rounds at another place: two roundings."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A run's folder, what Megatron loads from it with plain torch's next losses, and those of Megatron itself."""

    folder: Path
    truth: Truth
    losses: list[float]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    @cache
    def get(dtype: str) -> Trained:
        folder, truth = tmp_path_factory.mktemp(dtype), tmp_path_factory.mktemp(f"{dtype}-truth")
        losses = launch.pool(RANKS).run(megatron_run.produce, str(folder), dtype)[0]
        saved = folder / f"iter_{megatron_run.STEPS_BEFORE:07d}"
        launch.pool(1).run(megatron_run.write_truth, str(saved), dtype, str(truth))
        return Trained(folder, Truth.load(truth), losses)

    return get


CELLS = ("fp32 fsdp2 1", "bf16 zero3-bf16 1", "bf16 universal-zero2-bf16 1")
"""All on one rank, whose process the truth needs too: each further rank imports torch, DeepSpeed and Megatron anew."""


def test_plain_torch_goes_on_as_megatron(trained):
    """The truth is one: the model that is resumed elsewhere is Megatron's, and so are its groups."""
    run = trained("fp32")
    np.testing.assert_allclose(run.truth.facts["losses"], run.losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_the_run_goes_on(cell, trained, tmp_path):
    dtype, kind, ranks = cell.split()
    run, out, to = trained(dtype), tmp_path / "out", {"fsdp2": "dcp"}.get(kind, kind.partition("-")[0])
    report = ckpt_tools.convert(run.folder, out, to=to, **for_ranks(to, int(ranks)))
    assert not [note for note in report.plan.notes if "not read" in note.why]
    launch.pool(int(ranks)).run(megatron_run.resume, kind, str(out), str(tmp_path / "resumed"))
    resumed = Truth.load(tmp_path / "resumed")
    assert_same_bits(run.truth.best_weights(), resumed.best_weights())
    assert_same_bits(_moments(run.truth), _moments(resumed))
    computes_in = "bf16" if kind.endswith("bf16") else "fp32"
    judge = run.losses if computes_in == dtype else run.truth.facts["losses"]
    np.testing.assert_allclose(resumed.facts["losses"], judge, rtol=CLOSE[computes_in], atol=0)


def _moments(truth: Truth) -> dict[tuple[str, str], np.ndarray]:
    return {key: tensor for key, tensor in truth.tensors.items() if key[1] not in (WEIGHT, MASTER)}
