"""What a run shows while it trains, what it records and can be asked to trace, and how it evaluates."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c
from torch import Tensor

from tests.training.jobs import BATCH_SIZE, EPOCHS, STEPS_PER_EPOCH, losses, tiny_config
from training.config.train_config import TrainConfig
from training.data.datasets import TensorSamples
from training.loop.evaluation import CHUNK, PREDICTED, Evaluator, choose_metrics
from training.loop.measuring import PROFILED_STEPS, SKIPPED_STEPS, WARMUP_STEPS, profile_steps, work_per_sample
from training.loop.screen import PLAIN_SECONDS, ProgressDisplay
from training.models.losses import standard_loss


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars of event files by tag, oldest file first, each record checked by its sums."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            body = data[at + 12 : at + 12 + size]
            assert int.from_bytes(data[at + 12 + size : at + 16 + size], "little") == masked_crc32c(body)
            event = Event.FromString(body)
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            at += 16 + size
    return found


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_every_measured_step_is_recorded_with_the_loss_of_all_ranks(engine, small_run):
    """In event files too. Lines about steps are not taken for an epoch's, whose loss ``prune --keep-best loss`` looks
    for by the key ``epoch``."""
    result = small_run(engine)
    run = Path(result.checkpoint).parents[1]
    lines, events = lines_of(run), events_of(run / "tensorboard")
    measured = [line for line in lines if "learning_rate" in line]
    assert [line["epoch"] for line in lines if "epoch" in line] == list(range(1, EPOCHS + 1))
    assert [line["step"] for line in measured] == [2, 4, 6, 8]
    assert [line["loss"] for line in measured] == pytest.approx(losses(result)[1::2], rel=1e-12)
    for line in measured:
        assert set(line) == {"step", "loss", "learning_rate", "samples_per_second", "peak_rss"}
        assert len(line["peak_rss"]) == 2 and min(line["peak_rss"]) > 10**8
        assert BATCH_SIZE / 60 < line["samples_per_second"] < 10**6
    rates = [line["learning_rate"] for line in measured]
    assert rates == sorted(rates, reverse=True) and rates[0] <= 1e-3
    of_steps = {f"train/{name}" for name in ("loss", "learning_rate", "samples_per_second")}
    of_steps |= {f"train/peak_rss_rank_{rank}" for rank in (0, 1)}
    assert of_steps | {"epoch/loss", "epoch/accuracy", "checkpoint/stall_seconds"} <= events.keys()
    assert [step for step, _ in events["train/loss"]] == [2, 4, 6, 8]
    assert [value for _, value in events["train/loss"]] == pytest.approx(losses(result)[1::2], rel=1e-6)
    assert [step for step, _ in events["epoch/accuracy"]] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]


def test_a_resumed_run_records_how_long_that_took(small_run):
    run = Path(small_run("fsdp2-resumed").checkpoint).parents[1]
    first = lines_of(run)[0]
    assert (first["resumed"], first["step"]) == ("epoch_0001", STEPS_PER_EPOCH)
    assert first["resume_seconds"] > 0
    assert events_of(run / "tensorboard")["train/resume_seconds"][0][0] == STEPS_PER_EPOCH


def test_a_plain_line_comes_every_few_seconds(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr("training.loop.screen.time.monotonic", lambda: now)
    screen = ProgressDisplay()
    for _ in range(11):
        screen.show_status("step 120/600")
        now += PLAIN_SECONDS / 5
    screen.close()
    assert capsys.readouterr().out == 2 * "step 120/600\n"


@pytest.mark.usefixtures("alone")
def test_a_profile_is_a_trace_of_some_steps(tmp_path):
    config = TrainConfig(out=tmp_path / "run", strategy="ddp", profile=True)
    with profile_steps(config) as end_step:
        for _ in range(SKIPPED_STEPS + WARMUP_STEPS + PROFILED_STEPS + 2):
            torch.ones(32, 32) @ torch.ones(32, 32)
            end_step()
    trace = json.loads((tmp_path / "run/profile/rank_0.json").read_text())
    names = [event["name"] for event in trace["traceEvents"]]
    assert names.count("aten::matmul") == PROFILED_STEPS
    summary = (tmp_path / "run/profile/rank_0.txt").read_text()
    assert summary.startswith(f"{PROFILED_STEPS * 2 * 32**3:,} FLOPs of matrix products in {PROFILED_STEPS} steps\n")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["profile"]


def test_tokens_and_utilization_come_from_the_first_batch(tmp_path):
    """Of the language model: six FLOPs for each token and weight of a matrix, and attention: 2 products of 64 x 64."""
    words = torch.zeros(4, 64, dtype=torch.int64)
    work = work_per_sample(
        tiny_config(tmp_path, model="lm", strategy="ddp", num_workers=1, peak_tflops=0.001), (words, words)
    )
    weights, attention = 4 * (4 * 128 * 128 + 3 * 128 * 256) + 128 * 256, 4 * 2 * 64 * 128
    assert work["tokens_per_second"] == 64
    assert work["mfu"] * 1e9 == pytest.approx(6 * 64 * (weights + attention))
    images = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    assert work_per_sample(tiny_config(tmp_path, model="cnn", strategy="ddp"), images) == {}


CPU = torch.device("cpu")


def numbered_images(count: int) -> TensorSamples:
    """Image ``i`` is grey level ``i`` and has the label ``i % 10``."""
    numbers = torch.arange(count)
    return TensorSamples(numbers.to(torch.uint8)[:, None, None].expand(count, 28, 28).contiguous(), numbers % 10)


def last_digit_logits(images: Tensor) -> Tensor:
    """A model that is right about :func:`numbered_images`, except that it takes every 0 for a 1."""
    assert images.shape == (CHUNK, 1, 28, 28)
    digits = (images[:, 0, 0, 0].add(1).mul(127.5).round().long() % 10).clamp(min=1)
    return torch.nn.functional.one_hot(digits, 10).float()


def parts_of(dataset: Any, model: Callable[..., Any], loss: Any, world_size: int) -> list[dict[str, Tensor]]:
    """Rows of each rank; all ranks make the same number of forward passes."""
    parts, num_passes = [], []
    for rank in range(world_size):
        passes: list[Any] = []

        def evaluated(metrics: Any, batch: Any, passes: list[Any] = passes) -> Mapping[str, Tensor]:
            passes.append(batch)
            return metrics(model, batch)

        evaluator = Evaluator(dataset, choose_metrics(None, loss), CHUNK, CPU, rank, world_size)
        parts.append(evaluator.compute_rows(evaluated))
        num_passes.append(len(passes))
    assert len(set(num_passes)) == 1, "ranks would wait for each other for ever"
    return parts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 7, 4 * CHUNK, 360])
def test_every_sample_counts_once_over_ranks(world_size, count):
    parts = parts_of(numbered_images(count), last_digit_logits, standard_loss, world_size)
    found = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    expected = [max(number % 256 % 10, 1) for number in range(count)]
    assert found[PREDICTED].tolist() == expected
    assert found["accuracy"].tolist() == [float(one == number % 10) for number, one in enumerate(expected)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_loss_of_the_users_is_a_mean_over_samples(world_size):
    """The last pass is smaller, and counts as many samples as it has."""
    numbers = [{"x": float(number)} for number in range(CHUNK + 7)]
    parts = parts_of(numbers, torch.nn.Identity(), lambda model, batch: model(batch["x"]).mean(), world_size)
    assert float(torch.stack([part["loss"] for part in parts]).sum(0).mean()) == pytest.approx((CHUNK + 6) / 2)
