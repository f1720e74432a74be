"""Training on GPUs: nccl, bf16, FusedAdam, offload and parallel layers, each on all GPUs of the machine.

Where torch finds no GPU, the summary of the tests names each of these as not run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from tests.training.conftest import in_process
from tests.training.jobs import losses, result_of
from training.config.train_config import TrainConfig
from training.loop.result import RunResult

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

STEPS_PER_EPOCH = 4


def run(out: Path, **values: object) -> RunResult:
    """Two epochs of four steps, on every GPU."""
    workers = torch.cuda.device_count()
    size = {"num_workers": workers, "batch_size": 32 * workers, "num_samples": 32 * workers * STEPS_PER_EPOCH}
    usual = {"launcher": "torchrun", "epochs": 2, "log_every": 1}
    config = TrainConfig(out=out, **(usual | size | values))  # type: ignore[arg-type]
    done = in_process("-m", "training", *config.to_args())
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return result_of(out)


def check_learns(result: RunResult) -> None:
    found = losses(result)
    assert len(found) == 2 * STEPS_PER_EPOCH
    assert found[-1] < found[0]


@pytest.mark.parametrize("strategy", ["ddp", "full_shard", "shard_grad_op", "zero1", "zero2", "zero3"])
def test_a_strategy_trains_with_nccl_in_bf16(strategy, tmp_path):
    result = run(tmp_path / "run", strategy=strategy, precision="bf16")
    check_learns(result)
    assert ckpt_tools.ls(tmp_path / "run").checkpoints[-1].is_complete
    measured = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    peaks = [line["cuda_peak"] for line in measured if "cuda_peak" in line]
    assert peaks and min(peaks[-1]) > 0


@pytest.mark.parametrize(("strategy", "other"), [("full_shard", "zero3"), ("zero2", "full_shard")])
def test_a_checkpoint_of_a_gpu_goes_on_in_the_other_framework(strategy, other, tmp_path):
    """In fp32, with the losses of the whole run up to what another order of sums on a GPU makes of them."""
    whole = run(tmp_path / "whole", strategy=strategy)
    first = Path(whole.checkpoint).with_name("epoch_0001")
    rest = run(tmp_path / "rest", strategy=other, resume=str(first))
    assert losses(rest) == pytest.approx(losses(whole)[STEPS_PER_EPOCH:], rel=1e-3)


FULL: dict[str, Any] = {"strategy": "full_shard"}
OFFLOADED: dict[str, Any] = {**FULL, "cpu_offload": True}
CLIPPED: dict[str, Any] = {"clip_grad_norm": 0.5}
TEXT: dict[str, Any] = {"model": "lm", "dataset": "text"}
FP16: dict[str, Any] = {"precision": "fp16"}
NARROW: dict[str, Any] = {"reduce_dtype": "fp16", "matmul_precision": "high"}
WIDE: dict[str, Any] = {"reduce_dtype": "fp32", "matmul_precision": "highest"}
DIVIDED = {
    f"{layers}-{name}": (
        {layers: 2, **FULL, **TEXT, "model": "lm-moe" if layers == "ep" else "lm", "gradient_accumulation": 2, **more},
        {layers: 1},
        1e-3,
    )
    for layers in ("tp", "pp", "ep")
    for name, more in {"plain": {}, "clipped": {**CLIPPED, "cpu_offload": True}}.items()
}
"""For an even number of GPUs."""

SAME: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "offload-clipped": ({**OFFLOADED, **CLIPPED}, {"cpu_offload": False}, 1e-2),
    "async": ({**FULL, "async_save": True, "save_every_steps": 2}, {"async_save": False}, 1e-3),
    "compile": ({**FULL, **TEXT, "precision": "bf16", "compile": True}, {"compile": False}, 1e-2),
    "fused": ({"strategy": "zero2", "deepspeed_config": "FUSED"}, {"deepspeed_config": None}, 1e-2),
    "ray": ({**OFFLOADED, **CLIPPED, "launcher": "ray"}, {"launcher": "torchrun"}, 1e-3),
    "narrow": ({**FULL, **FP16, **NARROW}, WIDE, 1e-2),
    **DIVIDED,
}
"""Runs that learn what the same ones learn with other values, up to so much."""

ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
FUSED = {"train_batch_size": "auto", "optimizer": ADAMW, "zero_optimization": {"stage": 2}}
"""DeepSpeed's Adam, which it compiles for the GPU when it is first used; ours is torch's."""


@pytest.mark.parametrize("name", SAME)
def test_a_run_learns_the_same(name, tmp_path):
    values, changed, within = SAME[name]
    if name in DIVIDED and torch.cuda.device_count() % 2:
        pytest.skip(f"not run: {name} needs an even number of GPUs")
    (tmp_path / "fused.json").write_text(json.dumps(FUSED))
    values = values | ({"deepspeed_config": tmp_path / "fused.json"} if name == "fused" else {})
    found, expected = run(tmp_path / "run", **values), run(tmp_path / "other", **(values | changed))
    check_learns(found)
    assert losses(found) == pytest.approx(losses(expected), rel=within)
    assert ckpt_tools.ls(tmp_path / "run").checkpoints[-1].is_complete
    if name == "async":
        assert list(ckpt_tools.open(found.checkpoint)) == list(ckpt_tools.open(expected.checkpoint))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert any("cuda_peak" in line for line in lines)


@pytest.mark.parametrize("strategy", ["zero1_offload", "zero2_offload", "zero3_offload"])
def test_deepspeed_offloads_to_the_host(strategy, tmp_path):
    check_learns(run(tmp_path / "run", strategy=strategy, precision="bf16"))


def test_a_profile_has_a_snapshot_of_the_gpus_memory(tmp_path):
    run(tmp_path / "run", strategy="full_shard", profile=True)
    assert (tmp_path / "run/profile/memory_rank_0.pickle").stat().st_size > 0


@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_a_deterministic_run_resumes_bit_for_bit(strategy, tmp_path):
    same: dict[str, Any] = {"strategy": strategy, "deterministic": True, **CLIPPED}
    whole = run(tmp_path / "whole", **same)
    rest = run(tmp_path / "rest", resume=str(Path(whole.checkpoint).with_name("epoch_0001")), **same)
    assert losses(rest) == losses(whole)[STEPS_PER_EPOCH:]
    assert ckpt_tools.diff(rest.checkpoint, whole.checkpoint).equal
