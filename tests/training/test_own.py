"""A new user's model and data, by docs/training_own.md alone: the files that it prints are written down and used.

They train under each strategy, are killed, resume elsewhere, are exported and predict.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import UsageError
from tests.training.documents import PAGES
from tests.training.jobs import small_config
from tests.training.own_jobs import STEPS, own_config, write_files
from tests.training.strategy_jobs import train_each
from training.config.model_names import MODELS
from training.config.train_config import TrainConfig
from training.launchers.checks import check_before_start
from training.loop.result import RunResult

SECONDS = 600.0
MID_EPOCH = "epoch_0000_step_000002"
SAMPLE = ("full_shard", "zero3")
SOAK = ("ddp", "no_shard", "shard_grad_op", "hybrid_shard", "zero0", "zero1", "zero2", "zero3_hpz", "zero2_offload")
LINES = {"dataset_arg": (), "epoch_steps": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("own"))


def run(config: TrainConfig) -> RunResult:
    train_each(config.num_workers, config)
    return RunResult.read(config.out / "result.json")


def losses_of(result: RunResult) -> list[float]:
    return [loss for epoch in result.history for loss in epoch.losses]


def resumed(config: TrainConfig, name: str, **values: Any) -> RunResult:
    """A run of its own from the middle of the first epoch."""
    return run(replace(config, out=config.out.parent / name, resume=f"{config.out}/checkpoints/{MID_EPOCH}", **values))


def check_goes_on(config: TrainConfig, other: str) -> None:
    """The same bits again, and the same losses under another strategy at another world size."""
    whole, again = run(config), resumed(config, "again")
    assert len(losses_of(whole)) == STEPS
    assert losses_of(again) == losses_of(whole)[2:]
    assert again.held_out == whole.held_out
    assert ckpt_tools.diff(again.checkpoint, whole.checkpoint).equal
    elsewhere = resumed(config, "elsewhere", strategy=other, num_workers=1, shard_size=None)
    assert losses_of(elsewhere) == pytest.approx(losses_of(whole)[2:], rel=1e-5)


@pytest.mark.parametrize("strategy", [*SAMPLE, *(pytest.param(each, marks=pytest.mark.soak) for each in SOAK)])
def test_the_file_trains_and_resumes_under_each_strategy(strategy, files, tmp_path):
    values = {"shard_size": 2} if strategy in ("hybrid_shard", "zero3_hpz") else {}
    # Dropout is drawn by rank, so it is off at another world size.
    (tmp_path / "mine.py").write_text((files / "mine.py").read_text().replace("Dropout(0.1)", "Dropout(0.0)"))
    config = own_config(tmp_path, tmp_path / "run", strategy=strategy, metrics=f"{tmp_path}/mine.py:metrics", **values)
    check_goes_on(config, "zero1" if config.sharding.framework == "fsdp2" else "full_shard")
    assert {"loss", "error"} == RunResult.read(config.out / "result.json").held_out.keys()


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["full_shard", pytest.param("zero3", marks=pytest.mark.soak)])
def test_a_resumed_run_draws_the_same_dropout_and_augmentation(strategy, files, tmp_path):
    config = own_config(files, tmp_path / "run", strategy=strategy)
    whole = run(config)
    again = resumed(config, "again")
    assert losses_of(again) == losses_of(whole)[2:]
    assert ckpt_tools.diff(again.checkpoint, whole.checkpoint).equal


@pytest.mark.parametrize("strategy", ["zero2", pytest.param("full_shard", marks=pytest.mark.soak)])
def test_a_stream_of_dictionaries_resumes_from_its_state(strategy, files, tmp_path):
    """A model of transformers, which gives its loss; no part is held out."""
    model = files / "stream.py"
    (tmp_path / "gpt.py").write_text(
        model.read_text().replace("n_head=2", "n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0")
    )
    functions = {"model": f"{tmp_path}/gpt.py:gpt2", "dataset": f"{model}:lines"}
    config = own_config(files, tmp_path / "run", strategy=strategy, **functions, **LINES)
    check_goes_on(config, "ddp")
    assert RunResult.read(config.out / "result.json").held_out == {}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "optimizer_arg": ("momentum=0.9",)},
    "function": {"optimizer": "{files}/tuning.py:optimizer", "schedule": "{files}/tuning.py:steps"},
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.soak) for each in OPTIMIZERS if each != "function"] + ["function"]
)
@pytest.mark.parametrize(
    "strategies",
    [
        ("zero0", "full_shard"),
        *(
            pytest.param(pair, marks=pytest.mark.soak)
            for pair in (("full_shard", "zero1"), ("zero1", "zero2"), ("zero2", "zero3"), ("zero3", "zero0"))
        ),
    ],
)
def test_optimizers_and_groups_resume_under_another_strategy(name, strategies, files, tmp_path):
    values = {
        key: each.format(files=files) if isinstance(each, str) else each for key, each in OPTIMIZERS[name].items()
    }
    config = own_config(files, tmp_path / "run", strategy=strategies[0], **values)
    whole = run(config)
    assert losses_of(resumed(config, "other", strategy=strategies[1])) == pytest.approx(losses_of(whole)[2:], rel=1e-5)


@pytest.mark.extended
def test_the_last_group_has_no_weight_decay(files, tmp_path):
    """Under ZeRO-3 too, in which parameters have no shape while the optimizer is made."""
    for strategy in ("full_shard", "zero3"):
        config = own_config(files, tmp_path / strategy, strategy=strategy, epochs=1)
        found = ckpt_tools.open(run(config).checkpoint).manifest
        decays = {name: group.options["weight_decay"] for group in found.groups for name in group.params}
        assert {name for name, decay in decays.items() if decay == 0.0} == {
            name for name in decays if name.endswith("bias") or ".norm." in name
        }


WRONG: dict[str, tuple[str, str, str]] = {
    "no module": ("def net():\n    return 3\n", "net", "gives int, and a torch.nn.Module is needed"),
    "unknown key": (
        "from mine import net as made\ndef net():\n    return {**made(), 'layers': 1}\n",
        "net",
        "'layers' is not one of model, blocks, loss and groups",
    ),
    "strange block": (
        "from mine import *\ndef net():\n    return {'model': nn.Linear(8, 2), 'blocks': [nn.Linear(8, 2)]}\n",
        "net",
        "a block, Linear, is not a module of the model",
    ),
    "forgotten parameter": (
        "from mine import *\ndef net():\n    model = nn.Linear(8, 2)\n"
        "    return {'model': model, 'loss': loss, 'groups': [{'params': [model.weight]}]}\n",
        "net",
        "bias is in no group",
    ),
    "loss of each sample": (
        "from mine import *\ndef net():\n"
        "    return {'model': nn.Linear(8, 2), 'loss': lambda model, batch: model(batch['x']).sum(1)}\n",
        "net",
        r"is a tensor of shape \[8\], and has to be",
    ),
    "loss without a gradient": (
        "from mine import *\ndef net():\n    return {'model': nn.Linear(8, 2), 'loss': lambda model, batch: 1.0}\n",
        "net",
        "is float, and has to be a tensor",
    ),
    "other shape": (
        "from mine import *\ndef net():\n    return {'model': nn.Linear(9, 2), 'loss': loss}\n",
        "net",
        r"failed with RuntimeError: .*\(mine.py, line 26\)",
    ),
    "no loss": ("from mine import *\ndef net():\n    return nn.Linear(8, 2)\n", "net", "failed with TypeError"),
    "error": ("def net():\n    return 1 / 0\n", "net", r"ZeroDivisionError: division by zero \(wrong.py, line 2\)"),
    "no dataset": (
        "def points(part, count):\n    return [1] * 3 if part == 'x' else 7\n",
        "points",
        "gives int for train",
    ),
    "dataset that fails": (
        "from mine import *\nclass Other(Points):\n    def __getitem__(self, index):\n        return self.y[index]\n"
        "def points(part, count):\n    return Other(count, 1)\n",
        "points",
        r"failed with AttributeError: .* \(wrong.py, line 4\)",
    ),
    "metrics of a number": (
        "def metrics(model, batch):\n    return 1.0\n",
        "metrics",
        "something else than tensors by name",
    ),
    "too few metrics": (
        "import torch\ndef metrics(model, batch):\n    return {'one': torch.ones(1)}\n",
        "metrics",
        "the metric one has 1 values for 30 samples",
    ),
    "no optimizer": (
        "def optimizer(groups, lr, weight_decay):\n    return None\n",
        "optimizer",
        "gives NoneType, not an Optimizer",
    ),
    "arguments of an optimizer": ("def optimizer(groups):\n    return None\n", "optimizer", "it takes none"),
    "infinite rate": ("def schedule(step, total):\n    return 1e999\n", "schedule", "gives inf, and a factor"),
    "no function": ("callback = 3\n", "callback", "is not a function"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_function_is_one_sentence_before_workers_start(case, files, tmp_path, capfd):
    code, name, sentence = WRONG[case]
    file = files / f"{case.replace(' ', '_')}" / "wrong.py"
    file.parent.mkdir()
    file.write_text(code)
    option = {"net": "model", "points": "dataset"}.get(name, name)
    value: Any = f"{file}:{name}"
    with pytest.raises(UsageError, match=sentence):
        check_before_start(own_config(files, tmp_path, **{option: (value,) if option == "callback" else value}))
    assert capfd.readouterr() == ("", "")


def test_a_metric_that_no_checkpoint_has_is_refused(files, tmp_path):
    config = own_config(files, tmp_path, keep_last=1, keep_best="wer:min", metrics=f"{files}/mine.py:metrics")
    with pytest.raises(UsageError, match=r"^--keep-best wer: the metrics of this run are error, held_out_loss, loss$"):
        check_before_start(config)
    check_before_start(replace(config, keep_best="error:min"))


@pytest.mark.parametrize("model", MODELS)
def test_own_metrics_of_each_model_are_tried(model, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def metrics(model, batch):\n    return {'mean': model(batch[0]).float().flatten(1).mean(1)}\n")
    dataset: Any = "text" if MODELS[model].task == "text" else "digits"
    values = {"model": model, "dataset": dataset, "metrics": f"{file}:metrics", "keep_last": 1}
    check_before_start(small_config(tmp_path, engine="fsdp2", keep_best="mean:max", **values))
    with pytest.raises(UsageError, match=r"^--keep-best wer: the metrics of this run are .*, mean$"):
        check_before_start(small_config(tmp_path, engine="fsdp2", keep_best="wer:min", **values))


def test_weights_of_another_model_are_refused_before_workers_start(files, tmp_path):
    torch.save({"weight": torch.zeros(2, 8)}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"^the checkpoint does not fit the model: .*not in the model: weight$"):
        check_before_start(own_config(files, tmp_path, init_from=str(tmp_path / "other.pt")))


def test_a_length_that_tensor_parallelism_does_not_divide_is_refused(files, tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(
        "import torch\ndef texts(part):\n    rows = torch.zeros(99, 7, dtype=torch.int64)\n"
        "    return torch.utils.data.TensorDataset(rows, rows)\n"
    )
    with pytest.raises(UsageError, match=r"^--tp 2 does not divide a text of 7 bytes"):
        check_before_start(
            small_config(tmp_path, strategy="full_shard", model="lm", dataset=f"{file}:texts", tp=2, num_samples=None)
        )


def test_a_model_that_calls_numpy_is_tried_with_values(files, tmp_path):
    file = tmp_path / "by_numpy.py"
    file.write_text(
        "from mine import *\ndef net():\n    return {'model': nn.Linear(8, 2), 'loss': by_numpy}\n"
        "def by_numpy(model, batch):\n    return loss(model, batch) * float(np.mean(batch['x'].numpy() ** 2))\n"
    )
    check_before_start(own_config(files, tmp_path, model=f"{file}:net"))


WATCHING = """
import json, os, time

class Watch:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self.write
    def __exit__(self, kind, *error):
        self.write({"ended": kind and kind.__name__})
    def write(self, line):
        print(json.dumps({**line, "pid": os.getpid()}), file=self.file.open("a"))
        time.sleep(float(os.environ.get("PAUSE", 0)))

def watch(config):
    import contextlib
    class Both(Watch, contextlib.AbstractContextManager): pass
    return Both(config.out / "watched.jsonl")
"""

SCRIPT = """
import sys
from pathlib import Path

from mine import points
from training import TrainConfig, launch


def main():
    import mine, watch

    def net(width):  # Ray sends it
        return mine.net(width)

    resume, out = sys.argv[1:]
    launch(TrainConfig(
        model=net, model_arg=("width=48",), dataset=points, dataset_arg=("count=48",), batch_size=16, epochs=2,
        strategy="zero3", num_workers=1, out=Path(out), resume=resume, override=("model",), log_every=1,
        callback=(watch.watch,), loader_workers=1, export=out + ".safetensors",
    ))


if __name__ == "__main__":
    main()
"""


def command(*words: object, files: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=files,
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(map(str, (files, *sys.path)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, error
    return out


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def wait_for(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not there():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


@pytest.mark.extended
def test_a_killed_run_goes_on_and_predicts(files, tmp_path, pytestconfig):
    """Killed under torchrun; resumed to the same bits with a process that loads samples, exported, and asked for a
    prediction. In the soak resumed under Ray from Python, by a function within another one."""
    (files / "watch.py").write_text(WATCHING)
    options = {"model": f"{files}/mine.py:net", "model_arg": ("width=48",), "callback": (f"{files}/watch.py:watch",)}
    config = own_config(files, tmp_path / "killed", **options)
    whole = run(replace(config, out=tmp_path / "whole", callback=()))
    first = command("-m", "training", *config.to_args(), files=files, PAUSE="0.3")
    wait_for(lambda: (config.out / "checkpoints" / MID_EPOCH).is_dir(), first)
    first.kill()
    first.communicate()
    exported = tmp_path / "own.safetensors"
    again = replace(config, resume="auto", loader_workers=1, export=str(exported))
    finished(command("-m", "training", *again.to_args(), files=files))
    killed = RunResult.read(config.out / "result.json")
    assert len(losses_of(killed)) < STEPS
    assert losses_of(killed) == losses_of(whole)[STEPS - len(losses_of(killed)) :]
    assert ckpt_tools.diff(killed.checkpoint, whole.checkpoint).equal
    check_watched(config.out, starts=2)
    check_predicts(files, exported)
    if pytestconfig.getoption("--soak"):
        (files / "script.py").write_text(SCRIPT)
        out = tmp_path / "ray"
        finished(command("script.py", f"{config.out}/checkpoints/epoch_0001", out, files=files))
        assert len(RunResult.read(out / "result.json").history) == 1
        check_watched(out, starts=1)
        check_predicts(files, out.with_suffix(".safetensors"))


def check_predicts(files: Path, model: Path) -> None:
    (files / "point.json").write_text("[1, 2, 3, 4, 5, 6, 7, 8]")
    (files / "points.txt").write_text("point.json\n")
    answers = model.with_suffix(".jsonl")
    words = ["--architecture", "mine.py:net?width=48", "--input", "points.txt", "--output", answers]
    finished(command("-m", "inference.batch", "--model", model, *words, files=files))
    [answer] = lines_of(answers)
    assert len(answer["outputs"]["output"]) == 2


def check_watched(out: Path, starts: int) -> None:
    """Each line of metrics was seen once, by one process of each start, and the last start has ended the callback."""
    watched = lines_of(out / "watched.jsonl")
    assert len({line["pid"] for line in watched}) == starts
    assert [line["ended"] for line in watched if "ended" in line] == [None]
    found = [{key: value for key, value in line.items() if key != "pid"} for line in watched if "ended" not in line]
    assert found == lines_of(out / "metrics.jsonl")


@pytest.mark.extended
def test_an_error_in_the_loss_names_rank_file_and_line(files, tmp_path):
    (tmp_path / "failing.py").write_text(
        "import os\nfrom mine import *\ndef net():\n    return {'model': nn.Linear(8, 2), 'loss': failing}\n"
        "def failing(model, batch):\n    if os.environ.get('RANK') == '1':\n        raise KeyError('colour')\n"
        "    return loss(model, batch)\n"
    )
    config = own_config(files, tmp_path / "run", model=f"{tmp_path}/failing.py:net")
    process = command("-m", "training", *config.to_args(), files=files)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "rank 1 failed with KeyError: 'colour' (failing.py, line 7)" in error


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_commands_of_the_page_work(files):
    """One after the other in one folder; without the libraries of the callbacks."""
    commands = re.findall(r"(?m)^[$] ckpt-tools (.*)$", PAGES["training_own.md"])
    assert len(commands) == 7
    (files / "point.json").write_text("[1, 2, 3, 4, 5, 6, 7, 8]")
    (files / "points.txt").write_text("point.json\n")
    modules = {"train": "training", "predict": "inference.batch"}
    for verb, *words in (shlex.split(each) for each in commands if "to_wandb" not in each):
        finished(command("-m", modules[verb], *words, files=files))


def test_the_script_of_the_page_is_python():
    [script] = re.findall(r"(?s)```python\n(from pathlib.*?)```", PAGES["training_own.md"])
    compile(script, "script.py", "exec")
