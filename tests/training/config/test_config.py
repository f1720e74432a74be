from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import click
import pytest

from ckpt_tools.errors import UsageError
from training.__main__ import main
from training.config.train_config import TrainConfig

pytestmark = pytest.mark.quick


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**({"out": Path("/run"), "engine": "fsdp2"} | values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engine": "ddp"}, "--engine is one of fsdp2, deepspeed, zero1, zero2, zero3, not 'ddp'"),
        ({"precision": "fp8"}, "--precision is one of fp32, bf16, fp16, not"),
        ({"num_workers": 0}, "^--num-workers is at least 1, not 0$"),
        ({"save_every": -1}, "^--save-every is at least 1, not -1$"),
        ({"save_every_steps": 0}, "^--save-every-steps is at least 1, not 0$"),
        ({"save_every_minutes": math.nan}, "^--save-every-minutes is above 0, not nan$"),
        ({"max_steps": 0}, "^--max-steps is at least 1, not 0$"),
        ({"max_restarts": -1}, "^--max-restarts is at least 0, not -1$"),
        ({"keep_best": "loss"}, "^--keep-best is for --keep-last"),
        ({"keep_best": "kappa", "keep_last": 1}, "^--keep-best kappa: give the better end, kappa:min or kappa:max$"),
        ({"rename": ("a=b",)}, "^--rename is for --init-from$"),
        ({"recipe": "mixtral"}, "^--recipe is for --init-from$"),
        ({"init_from": "a.pt", "inverse": True}, "^--inverse is for --recipe$"),
        ({"num_samples": 0}, "^--num-samples is at least 1, not 0$"),
        ({"num_workers": 3}, "64 does not divide over 3 workers"),
        ({"learning_rate": 0.0}, "^--learning-rate is above 0, not 0.0$"),
        ({"learning_rate": math.nan}, "^--learning-rate is above 0, not nan$"),
        ({"learning_rate": math.inf}, "^--learning-rate is above 0, not inf$"),
        ({"weight_decay": math.nan}, "^--weight-decay is at least 0, not nan$"),
        ({"warmup_fraction": 1.0}, "^--warmup-fraction is at least 0 and below 1, not 1.0$"),
        ({"seed": -1}, "^--seed is at least 0 and below 4294967296, not -1$"),
        ({"dataset": "fashion-mnist"}, "^--dataset fashion-mnist needs --data-root"),
        ({"data_root": Path("/data")}, "^--data-root is for the other datasets"),
        ({"override": ("seed",)}, "^--override is for --resume"),
        ({"strategy": "fsdp"}, "^--strategy is one of ddp, no_shard, .*, zero3_hpz, not 'fsdp'$"),
        ({"schedule": "step"}, "^--schedule is one of cosine, linear, constant, or a function, not 'step'$"),
        ({"clip_grad_norm": 0.0}, "^--clip-grad-norm is above 0, not 0.0$"),
        ({"forward_prefetch": -1}, "^--forward-prefetch is at least 0, not -1$"),
    ],
)
def test_values_that_make_no_sense_are_refused(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        config(**values)


def test_an_epoch_holds_whole_batches_only():
    assert config(batch_size=64).steps_per_epoch(130) == 2
    with pytest.raises(UsageError, match="63 training samples do not fill one batch; --batch-size is 64"):
        config(batch_size=64).steps_per_epoch(63)


def test_arguments_give_the_configuration_back():
    run = {"until": 2, "num_samples": 100, "launcher": "torchrun", "seed": 3}
    data = {"dataset": "fashion-mnist", "data_root": Path("/data")}
    more = {"cpu_offload": True, "clip_grad_norm": 1.0, "activation_checkpointing": True, "reshard_after_forward": 2}
    asked = config(**run, **data, **more, resume="latest", override=("seed", "learning-rate"))
    parsed = main.make_context("training", asked.to_args()).params
    assert TrainConfig(**parsed) == asked
    saving = {"async_save": True, "save_every_steps": 5, "save_every_minutes": 1.5, "keep_last": 2, "keep_best": "loss"}
    asked = config(**saving, max_restarts=2, init_from="a.pt", rename=("a=b", "c=d"), export="b.pt")
    assert TrainConfig(**main.make_context("training", asked.to_args()).params) == asked


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("epochs = [1]", "epochs is a number, not [1]"),
        ("epochs = true", "epochs is a number, not True"),
        ("learning-rate = '1e-3'", "learning-rate is a number, not '1e-3'"),
        ("rename = [1]", "rename is a list of strings, not [1]"),
        ("async-save = 'yes'", "async-save is true or false, not 'yes'"),
        ("export = false", "export is a string, not False"),
        ('export = "a\\u0000b"', r"export is a string, not 'a\x00b'"),
        ("out = {}", "out is a string, not {}"),
    ],
)
def test_a_file_has_the_types_of_the_options(line, sentence, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f"{line}\n")
    with pytest.raises(click.BadParameter, match=f"^{re.escape(f'{file}: {sentence}')}$"):
        main.make_context("training", ["--engine=fsdp2", "--out=/run", f"--config={file}"])


def test_a_file_gives_every_type(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("epochs = 3\nlearning-rate = 1\nrename = ['a=b']\nasync-save = true\nexport = 'x.pt'\n")
    params = main.make_context("training", ["--engine=fsdp2", "--out=/run", f"--config={file}"]).params
    found = [params[name] for name in ("epochs", "learning_rate", "rename", "async_save", "export")]
    assert found == [3, 1.0, ("a=b",), True, "x.pt"]


def test_a_null_byte_is_refused():
    with pytest.raises(UsageError, match=r"^--export has a null byte$"):
        config(export="a\0b")
