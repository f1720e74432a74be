from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.errors import UsageError
from training.__main__ import main
from training.config import TrainConfig


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**({"out": Path("/run"), "engine": "fsdp2"} | values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engine": "ddp"}, "engine is one of fsdp2, zero1, zero2, zero3, not 'ddp'"),
        ({"precision": "fp8"}, "precision is one of fp32, bf16"),
        ({"num_workers": 0}, "num_workers is at least 1"),
        ({"num_workers": 3}, "64 does not divide over 3 workers"),
        ({"epochs": 2, "until": 3}, "--until 3 lies beyond --epochs 2"),
        ({"learning_rate": 0.0}, "learning_rate is above 0"),
        ({"warmup_fraction": 1.0}, r"warmup_fraction is in \[0, 1\)"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        config(**values)


def test_an_epoch_holds_whole_batches_only() -> None:
    assert config(batch_size=64).steps_per_epoch(130) == 2
    with pytest.raises(UsageError, match="63 training samples do not fill one batch of 64"):
        config(batch_size=64).steps_per_epoch(63)


def test_the_last_epoch_is_always_saved() -> None:
    chosen = config(epochs=10, until=7, save_every=3)
    assert [epoch for epoch in range(1, 8) if chosen.saves_after(epoch)] == [3, 6, 7]


def test_arguments_give_the_configuration_back() -> None:
    asked = config(until=2, data_root=Path("/data"), num_samples=100, resume="latest", launcher="torchrun", seed=3)
    parsed = main.make_context("training", asked.to_args()).params
    assert TrainConfig(**parsed) == asked
