"""Training on GPUs: nccl, bf16, FusedAdam, offload and parallel layers, each on all GPUs of the machine.

Where torch finds no GPU, the summary of the tests names each of these as not run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckpt_tools
from tests.training.conftest import in_process
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
    return RunResult.read(out / "result.json")


def losses(result: RunResult) -> list[float]:
    return [loss for epoch in result.history for loss in epoch.losses]


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


@pytest.mark.parametrize("clipped", [{}, {"clip_grad_norm": 0.5}, {"clip_grad_norm": 0.5, "precision": "fp16"}])
def test_full_shard_offloads_to_the_host(clipped, tmp_path):
    """Its gradients are on the CPU, and so is their norm."""
    offloaded = run(tmp_path / "offloaded", strategy="full_shard", cpu_offload=True, **clipped)
    check_learns(offloaded)
    on_gpu = run(tmp_path / "run", strategy="full_shard", **clipped)
    assert losses(offloaded) == pytest.approx(losses(on_gpu), rel=1e-2)


def test_a_save_in_the_background_is_whole(tmp_path):
    saved = run(tmp_path / "run", strategy="full_shard", async_save=True, save_every_steps=2)
    whole = run(tmp_path / "whole", strategy="full_shard")
    found, expected = (ckpt_tools.open(one.checkpoint) for one in (saved, whole))
    assert ckpt_tools.ls(tmp_path / "run").checkpoints[-1].is_complete
    assert list(found) == list(expected)
    assert losses(saved) == pytest.approx(losses(whole), rel=1e-3)


def test_a_compiled_run_learns_the_same(tmp_path):
    same = {"model": "lm", "dataset": "text", "strategy": "full_shard", "precision": "bf16"}
    plain, compiled = (run(tmp_path / f"compile-{each}", compile=each, **same) for each in (False, True))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-2)


@pytest.mark.parametrize("strategy", ["zero1_offload", "zero2_offload", "zero3_offload"])
def test_deepspeed_offloads_to_the_host(strategy, tmp_path):
    check_learns(run(tmp_path / "run", strategy=strategy, precision="bf16"))


def test_deepspeed_trains_with_its_fused_adam(tmp_path):
    """Which it compiles for the GPU when it is first used; ours is torch's."""
    file = tmp_path / "fused.json"
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    file.write_text(json.dumps({"train_batch_size": "auto", "optimizer": optimizer, "zero_optimization": {"stage": 2}}))
    fused = run(tmp_path / "fused", strategy="zero2", deepspeed_config=file)
    ours = run(tmp_path / "ours", strategy="zero2")
    assert losses(fused) == pytest.approx(losses(ours), rel=1e-2)


def test_a_profile_has_a_snapshot_of_the_gpus_memory(tmp_path):
    run(tmp_path / "run", strategy="full_shard", profile=True)
    assert (tmp_path / "run/profile/memory_rank_0.pickle").stat().st_size > 0


@pytest.mark.parametrize("clipped", [{}, {"clip_grad_norm": 0.5, "cpu_offload": True}])
@pytest.mark.parametrize("layers", ["tp", "pp", "ep"])
def test_layers_are_divided_over_gpus(layers, clipped, tmp_path):
    """Needs an even number of GPUs. All learn what one strategy without it does."""
    if torch.cuda.device_count() % 2:
        pytest.skip(f"not run: --{layers} needs an even number of GPUs")
    same: dict[str, object] = {
        "strategy": "full_shard",
        "dataset": "text",
        "model": "lm-moe" if layers == "ep" else "lm",
    }
    same |= {"gradient_accumulation": 2, **clipped}
    divided, whole = run(tmp_path / "divided", **{layers: 2}, **same), run(tmp_path / "whole", **same)
    check_learns(divided)
    assert losses(divided) == pytest.approx(losses(whole), rel=1e-3)


@pytest.mark.parametrize(
    "values", [{"strategy": "full_shard", "cpu_offload": True, "clip_grad_norm": 0.5}, {"strategy": "zero2"}]
)
def test_ray_gives_each_worker_a_gpu(values, tmp_path):
    """And both backends to the process group."""
    on_ray = run(tmp_path / "ray", launcher="ray", **values)
    assert losses(on_ray) == pytest.approx(losses(run(tmp_path / "torchrun", **values)), rel=1e-3)
    lines = [json.loads(line) for line in (tmp_path / "ray/metrics.jsonl").read_text().splitlines()]
    assert any("cuda_peak" in line for line in lines)


@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_a_deterministic_run_resumes_bit_for_bit(strategy, tmp_path):
    same: dict[str, object] = {"strategy": strategy, "deterministic": True, "clip_grad_norm": 0.5}
    whole = run(tmp_path / "whole", **same)
    rest = run(tmp_path / "rest", resume=str(Path(whole.checkpoint).with_name("epoch_0001")), **same)
    assert losses(rest) == losses(whole)[STEPS_PER_EPOCH:]
    assert ckpt_tools.diff(rest.checkpoint, whole.checkpoint).equal


def test_gradients_are_summed_in_fp16_and_products_in_tf32(tmp_path):
    same: dict[str, object] = {"strategy": "full_shard", "precision": "fp16"}
    narrow = run(tmp_path / "narrow", reduce_dtype="fp16", matmul_precision="high", **same)
    assert losses(narrow) == pytest.approx(losses(run(tmp_path / "wide", **same)), rel=1e-2)
