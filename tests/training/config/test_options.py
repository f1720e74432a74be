"""Options from the command line, from files for a run and from files for DeepSpeed, and the schedule that they give."""

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ckpt_tools.errors import UsageError
from training.__main__ import main
from training.config.command_line import bundled_names, parse_options
from training.config.model_names import MODELS
from training.config.options import BY_NAME, STRATEGIES, choose_strategy
from training.config.train_config import TrainConfig
from training.engines.deepspeed_config import deepspeed_config
from training.engines.optimizers import LearningRateSchedule, make_warmup_schedule
from training.launchers.checks import check_frameworks

pytestmark = pytest.mark.quick

PIPELINE = {"pp": 2, "gradient_accumulation": 4, "model": "lm", "dataset": "text"}
PAGES = [path.read_text() for path in sorted((Path(__file__).parents[3] / "docs").glob("training*.md"))]
ALL = re.sub(r" \\\n +", " ", "\n".join(PAGES))
DOCUMENTED = re.findall(r"(?m)^\$ ckpt-tools train (.*)$", ALL)


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**({"out": Path("/run")} | values))


@pytest.mark.parametrize(
    ("strategy", "engine", "name"),
    [
        ("full_shard", "fsdp2", "full_shard"),
        ("full_shard", "deepspeed", "zero3"),
        ("hybrid_shard", "deepspeed", "zero3_hpz"),
        (None, "fsdp2", "full_shard"),
        (None, "zero1", "zero1"),
    ],
)
def test_strategy_and_engine_mean_one_strategy(strategy, engine, name):
    assert choose_strategy(strategy, engine) is BY_NAME[name]


@pytest.mark.parametrize("words", [*(f"--config {name} --out /run" for name in bundled_names(".toml")), *DOCUMENTED])
def test_each_bundled_file_and_documented_command_is_a_run(words):
    assert config(**parse_options(words.split())).sharding.name in STRATEGIES


def test_every_strategy_and_model_is_documented():
    """Options are in ``--help`` and in the reference made of it; the pages name those to begin with."""
    assert {name for name in {*MODELS, *STRATEGIES} if f"`{name}`" not in ALL} == set()


def test_arguments_give_the_configuration_back():
    run = {"until": 2, "num_samples": 100, "launcher": "torchrun", "seed": 3, "engine": "fsdp2"}
    data = {"dataset": "fashion-mnist", "data_root": Path("/data")}
    more = {"cpu_offload": True, "clip_grad_norm": 1.0, "activation_checkpointing": True, "reshard_after_forward": 2}
    resumed = config(**run, **data, **more, resume="latest", override=("seed", "learning-rate"))
    saving = {"async_save": True, "save_every_steps": 5, "save_every_minutes": 1.5, "keep_last": 2, "keep_best": "loss"}
    started = config(engine="fsdp2", **saving, max_restarts=2, init_from="a.pt", rename=("a=b", "c=d"), export="b.pt")
    for asked in (resumed, started):
        assert TrainConfig(**parse_options(asked.to_args())) == asked


def test_a_file_gives_every_type_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("epochs = 3\nlearning-rate = 1\nrename = ['a=b']\nasync-save = true\nexport = 'x.pt'\nseed = 4\n")
    params = parse_options(["--engine=fsdp2", "--out=/run", f"--config={file}", "--seed=5"])
    names = ("epochs", "learning_rate", "rename", "async_save", "export", "seed")
    assert [params[name] for name in names] == [3, 1.0, ("a=b",), True, "x.pt", 5]
    params = parse_options(["--config=tensor_parallel", "--out=/run", "--num-workers=2"])
    assert (params["num_workers"], params["tp"]) == (2, 2)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("epochs = [1]", "epochs is one value, not [1]"),
        ("num-workers = 'two'", "'two' is not a valid integer"),
        ("rename = 'a=b'", "rename is a list, not 'a=b'"),
        ("async-save = 'often'", "'often' is not a valid boolean"),
        ("out = {a = 1}", "out is one value, not {'a': 1}"),
        ("wings = 2", "wings is not an option of a run"),
    ],
)
def test_a_wrong_file_of_options_is_refused(line, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(f"{line}\n")
    words = ["--engine=fsdp2", "--out=/run", "--config=run.toml"]
    with pytest.raises(click.BadParameter) as caught:
        parse_options(words)
    assert str(caught.value).removeprefix("run.toml: ").startswith(sentence)
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, sentence in done.stderr) == (2, True)


@pytest.mark.parametrize("name", bundled_names(".json"))
def test_each_json_file_is_one_that_deepspeed_takes(name):
    import deepspeed

    groups = {"shard_size": 2} if name == "zero3_hpz" else {}
    read = deepspeed.DeepSpeedConfig(deepspeed_config(config(strategy=name, **groups), 1))
    assert (read.zero_optimization_stage, read.train_batch_size) == (BY_NAME[name].stage, 64)
    assert (read.zero_config.offload_optimizer is not None) == name.endswith("_offload")


def adam(**params: object) -> dict[str, object]:
    return {"optimizer": {"type": "AdamW", "params": {"torch_adam": True} | params}}


TORCHS = ': --pp needs torch\'s AdamW: set optimizer.type to "AdamW" and optimizer.params.torch_adam to true'
WRONG: list[tuple[Any, str]] = [
    ({"train_batch_size": 32}, " sets train_batch_size to 32 and the options of the run say 64; change one of them"),
    ({"zero_optimization": {"stage": 3}}, " sets zero_optimization.stage to 3 and the options of the run say 2"),
    ({"zero_optimisation": {}}, ": zero_optimisation is not a key that a run takes; it takes "),
    ({"zero_optimization": {"stage": 2, "wings": 1}}, ": wings: "),
    (adam() | {"aio": "auto"}, ": aio is an object, not 'auto'"),
    ({"optimizer": "AdamW"}, ": optimizer is an object, not 'AdamW'"),
    ({}, ": optimizer.type is missing; set it to AdamW"),
    ({"optimizer": {"type": "Adom"}}, ": optimizer.type Adom is none of DeepSpeed or torch.optim; set it to AdamW"),
    (adam(betas=[0.9]), ": optimizer.params.betas: [0.9] is not taken by AdamW: "),
    (adam(betas=[0.9, 1.5], eps="auto"), ": optimizer.params is not taken by AdamW: "),
    (adam(eps="auto"), ": optimizer.params.eps: 'auto' is not taken by AdamW: "),
    (adam(wings=1), ": optimizer.params.wings: 1 is not taken by AdamW: "),
    (adam(torch_adam=False, bias_correction=True, betas=[0.9, 2]), ": optimizer.params.betas: [0.9, 2] is not taken"),
    (
        {"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
        ": optimizer.params.nesterov: True is not taken by SGD: Nesterov momentum requires a momentum",
    ),
    (adam() | {"train_batch_size": True}, " sets train_batch_size to True and the options of the run say 64"),
    (adam() | {"tensorboard": {"output_path": 3}}, ": tensorboard.output_path: "),
    ([], " is not a JSON object"),
]
WRONG_PIPELINE: list[tuple[Any, str]] = [
    ({"optimizer": {"type": "AdamW", "params": {}}}, TORCHS),
    (adam() | {"data_types": {}}, " sets data_types, which does not go together with --pp"),
    (adam() | {"pipeline": {}}, ": pipeline is not a key "),
]


@pytest.mark.parametrize(
    ("run", "content", "sentence"),
    [
        *(({"strategy": "zero2"}, *each) for each in WRONG),
        *(({"strategy": "zero1", **PIPELINE}, *each) for each in WRONG_PIPELINE),
    ],
)
def test_a_file_for_deepspeed_that_does_not_fit_is_refused(run, content, sentence, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError) as caught:
        check_frameworks(config(deepspeed_config=file, **run))
    assert str(caught.value).startswith(f"--deepspeed-config {file}{sentence}")


def test_a_file_for_deepspeed_is_taken_with_what_the_options_decide(tmp_path):
    file = tmp_path / "ds.json"
    zero = {"stage": 2, "reduce_bucket_size": 1000}
    file.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": zero, **adam(betas=[0.9, 0.95])}))
    run = config(strategy="zero2", deepspeed_config=file)
    check_frameworks(run)
    made = deepspeed_config(run, 2)
    assert made["zero_optimization"] == zero
    assert (made["train_batch_size"], made["train_micro_batch_size_per_gpu"]) == (64, 32)


@pytest.mark.parametrize(
    ("shape", "factors"),
    [
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("constant", [0.5, *[1.0] * 6]),
    ],
)
def test_factors_of_a_short_run(shape, factors):
    schedule = LearningRateSchedule(2, 6, shape)
    assert [schedule.compute_factor(step) for step in range(7)] == pytest.approx(factors, abs=1e-6)
    assert LearningRateSchedule(2, 6).compute_factor(3) == pytest.approx(0.853553, abs=1e-6)
    assert make_warmup_schedule(1, 0.5) == LearningRateSchedule(0, 1), "a run of one step has no warm-up"
