"""Judging the judge: every checkpoint resumes in the framework that wrote it, bit for bit and loss for loss."""

import time

import numpy as np
import pytest
import torch
import torch.distributed

import fixtures
from fixtures import launch
from fixtures.truth import raw_bytes
from tests.support.sweep import name_of, tiered
from tests.support.truth import MASTER, WEIGHT, Truth, assert_same_bits

pytestmark = pytest.mark.extended

# By world size, so that each pool of ranks is started once.
RESUMABLE = sorted(
    (f for f in fixtures.CORE if f.kind.startswith(("fsdp2", "zero", "universal"))), key=lambda f: f.world_size
)
BY_NAME = {name_of(f): f for f in RESUMABLE}
SOME = ["fsdp2-bf16-awkward-2", "fsdp2-pair-awkward-2", "fsdp2-model-awkward-2",
        "fsdp2-lightning-awkward-2", "fsdp2-titan-awkward-2", "fsdp2-accelerate-awkward-2",
        "fsdp2-hf-awkward-2", "fsdp2-files-plain-2", "fsdp2-hsdp-awkward-4", "zero1-fp32-sgd-2",
        "zero1-bf16acc-awkward-2", "zero2-bf16-awkward-2",
        "zero3-fp32-sub-awkward-2", "zero3-fp16-awkward-2", "zero3-fp32-lone-2",
        "universal-zero3-fp32-awkward-2"]  # fmt: skip
"""One of each kind that the matrix does not resume too."""
MODEL_ONLY = ("fsdp2-model", "fsdp2-hf")
TORCH_FILES = tuple(f for f in fixtures.CORE if f.kind in ("torch", "torch-legacy"))


@pytest.mark.parametrize("name", tiered(BY_NAME, test=(), extended=SOME))
def test_resumes_in_its_own_framework(name, checkpoint, resume):
    wanted = BY_NAME[name]
    made = checkpoint(wanted.kind, wanted.case, wanted.world_size)
    truth = Truth.load(made.root)
    resumed = resume(wanted.kind, wanted.case, made.checkpoint, wanted.world_size)
    if wanted.kind in MODEL_ONLY:
        assert_same_bits(truth.tensors, resumed.tensors)
    elif wanted.kind.startswith("universal") and wanted.case == "awkward":
        assert_all_but_what_deepspeed_leaves_out(truth, resumed)
    else:
        assert_same_run(truth, resumed)


def assert_same_run(truth: Truth, resumed: Truth) -> None:
    assert_same_bits(truth.tensors, resumed.tensors)
    assert resumed.facts["losses"] == truth.facts["losses"]
    assert resumed.facts["groups"] == truth.facts["groups"]


def assert_all_but_what_deepspeed_leaves_out(truth: Truth, resumed: Truth) -> None:
    """A universal load restores what trains; not frozen weights, nor in stage 3 the options of groups but the first."""
    assert_same_bits(_trained(truth), _trained(resumed))
    assert resumed.facts["losses"] != truth.facts["losses"]


def _trained(truth: Truth) -> dict[tuple[str, str], np.ndarray]:
    trained = truth.slot(MASTER)
    return {key: tensor for key, tensor in truth.tensors.items() if key[0] in trained}


@pytest.mark.parametrize("some", [SOME, pytest.param(list(BY_NAME), marks=pytest.mark.soak)], ids=len)
def test_losses_depend_on_neither_framework_nor_stage_nor_world_size(some, checkpoint):
    """The premise of comparing a converted run's losses with those of the run it came from."""
    left_out = ("fsdp2-bf16", *MODEL_ONLY)
    wanted = [f for f in map(BY_NAME.get, some) if f.case == "awkward" and f.kind not in left_out]
    for dtype in ("bf16", "fp16", "fp32"):
        made = [checkpoint(f.kind, f.case, f.world_size) for f in wanted if _dtype(f.kind) == dtype]
        losses = np.array([Truth.load(f.root).facts["losses"] for f in made])
        assert np.allclose(losses, losses[0], rtol=1e-6, atol=0), dtype


def _dtype(kind: str) -> str:
    return next((dtype for dtype in ("bf16", "fp16") if dtype in kind), "fp32")


@pytest.mark.parametrize("wanted", TORCH_FILES, ids=name_of)
def test_torch_loads_what_the_truth_says(wanted, checkpoint):
    made = checkpoint(wanted.kind, wanted.case, wanted.world_size)
    loaded = torch.load(made.checkpoint / "model.pt", weights_only=True)
    truth = Truth.load(made.root).slot(WEIGHT)
    found = {n: raw_bytes(t.detach().resolve_conj().resolve_neg().contiguous()) for n, t in loaded.items()}
    assert found == {name: array.tobytes() for name, array in truth.items()}


def test_the_awkward_case_is_awkward(checkpoint):
    """Ties, frozen weights, special bit patterns and uneven rows are there; a change that loses one fails."""
    truth = Truth.load(checkpoint("zero2-bf16", "awkward", 2).root)
    weights = truth.slot(WEIGHT)
    assert truth.facts["ties"] == {"head.weight": "embed.weight"}
    assert weights["frozen.unread"].dtype.name == "bfloat16"
    assert b"\xc5\x7f\x00\x80" in weights["frozen.unread"].tobytes()
    assert weights["oddities.five"].shape[0] == 5
    assert weights["keepsakes.count"] == 2**53 + 1
    assert truth.slot(MASTER)["embed.weight"].dtype == np.float32


def test_comparison_tells_negative_zero_and_names_missing_and_surplus_tensors():
    want, one = np.array([0.0, np.nan], np.float32), np.zeros(1)
    with pytest.raises(AssertionError, match=r"1 of 2 elements, first at \(0,\).*0x00000000.*0x80000000"):
        assert_same_bits({"w": want}, {"w": np.array([-0.0, np.nan], np.float32)})
    with pytest.raises(AssertionError, match=r"missing: a\n  surplus: b"):
        assert_same_bits({"a": one}, {"b": one})


def test_a_failing_rank_is_named_with_its_traceback_and_the_pool_starts_again(tmp_path):
    with launch.Pool(2, log_dir=tmp_path) as pool:
        with pytest.raises(launch.JobFailedError, match=r"rank 1 of 2 failed(.|\n)*ValueError: broken"):
            pool.run(_fail_on_last_rank)
        assert pool.run(_rank_and_world) == [(0, 2), (1, 2)]


def test_a_job_that_outlives_its_time_ends(tmp_path):
    with launch.Pool(1, log_dir=tmp_path) as pool:
        with pytest.raises(launch.JobFailedError, match=r"no answer from ranks \[0\] of 1 in 0.5 s"):
            pool.run(time.sleep, 60, seconds=0.5)


def _fail_on_last_rank() -> None:
    """The first rank waits for the last one, as it would in a collective."""
    if torch.distributed.get_rank() == 1:
        raise ValueError("broken")
    time.sleep(60)


def _rank_and_world() -> tuple[int, int]:
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
