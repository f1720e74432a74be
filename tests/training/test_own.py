"""A new user's model and data, by docs/training_own.md alone: the files that it prints are written down and used.

They train under each strategy, resume elsewhere, are exported and predict.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckpt_tools.errors import UsageError
from fixtures.launch import pool
from inference.batch import __main__ as batch
from tests.support.sweep import tiered
from tests.training.jobs import check_same_end, losses, result_of, small_config, train, train_each
from training.checkpoints.weights import export_weights
from training.config.options import STRATEGIES
from training.config.train_config import TrainConfig
from training.launchers.checks import check_before_start
from training.launchers.failures import RankFailure
from training.loop.result import RunResult

SECONDS = 600.0
STEPS = 6  # of two epochs
MID_EPOCH = "epoch_0000_step_000002"
TRIED = [name for name in STRATEGIES if name not in ("zero1_offload", "zero3_offload")]
PAGE = (Path(__file__).parents[2] / "docs/training_own.md").read_text()
LINES = {"dataset_arg": (), "epoch_steps": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files that the page prints."""
    folder = tmp_path_factory.mktemp("own")
    for code in re.findall(r'```python\n(""".*?)```', PAGE, re.DOTALL):
        name = re.match(r'"""(\w+[.]py):', code)
        assert name is not None, code
        (folder / name[1]).write_text(code)
    return folder


def own_config(files: Path, out: Path, **values: Any) -> TrainConfig:
    usual = {"strategy": "full_shard", "batch_size": 16, "num_samples": None, "save_every_steps": 1, "log_every": 1}
    functions = {"model": f"{files}/mine.py:net", "dataset": f"{files}/mine.py:points", "dataset_arg": ("count=48",)}
    return small_config(out, **(usual | functions | values))


def run(config: TrainConfig) -> RunResult:
    train_each(config)
    return result_of(config)


def resumed(config: TrainConfig, name: str, **values: Any) -> RunResult:
    """A run of its own from the middle of the first epoch."""
    return run(replace(config, out=config.out.parent / name, resume=f"{config.out}/checkpoints/{MID_EPOCH}", **values))


def check_goes_on(config: TrainConfig, other: str) -> None:
    """The same bits again, and the same losses under another strategy at another world size."""
    whole = run(config)
    assert len(losses(whole)) == STEPS
    check_same_end(resumed(config, "again"), whole)
    elsewhere = resumed(config, "elsewhere", strategy=other, num_workers=1, shard_size=None)
    assert losses(elsewhere) == pytest.approx(losses(whole)[2:], rel=1e-5)


@pytest.mark.parametrize("strategy", tiered(TRIED, test=["full_shard"], extended=["zero3"]))
def test_the_file_trains_and_resumes_under_each_strategy(strategy, files, tmp_path):
    values = {"shard_size": 2} if strategy in ("hybrid_shard", "zero3_hpz") else {}
    # Dropout is drawn by rank, so it is off at another world size.
    (tmp_path / "mine.py").write_text((files / "mine.py").read_text().replace("Dropout(0.1)", "Dropout(0.0)"))
    config = own_config(tmp_path, tmp_path / "run", strategy=strategy, metrics=f"{tmp_path}/mine.py:metrics", **values)
    check_goes_on(config, "zero1" if config.sharding.framework == "fsdp2" else "full_shard")
    assert {"loss", "error"} == result_of(config).held_out.keys()


@pytest.mark.extended
def test_a_resumed_run_draws_the_same_dropout_and_augmentation(files, tmp_path):
    config = own_config(files, tmp_path / "run")
    whole = run(config)
    check_same_end(resumed(config, "again"), whole)


@pytest.mark.extended
def test_a_stream_of_dictionaries_resumes_from_its_state(files, tmp_path):
    """A model of transformers, which gives its loss; no part is held out."""
    model = files / "stream.py"
    still = "n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0"
    (tmp_path / "gpt.py").write_text(model.read_text().replace("n_head=2", still))
    functions = {"model": f"{tmp_path}/gpt.py:gpt2", "dataset": f"{model}:lines"}
    config = own_config(files, tmp_path / "run", strategy="zero2", **functions, **LINES)
    check_goes_on(config, "ddp")
    assert result_of(config).held_out == {}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "function": {"optimizer": "{files}/tuning.py:optimizer", "schedule": "{files}/tuning.py:steps"},
    "momentum": {"optimizer": "sgd", "optimizer_arg": ("momentum=0.9",)},
}
FRAMEWORKS = ["zero0", "full_shard", "zero1", "zero2", "zero3"]


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak if n != "function" else ()) for n in OPTIMIZERS]
)
@pytest.mark.parametrize("at", [pytest.param(n, marks=pytest.mark.soak if n else ()) for n in range(len(FRAMEWORKS))])
def test_optimizers_and_groups_resume_under_another_strategy(name, at, files, tmp_path):
    given = OPTIMIZERS[name].items()
    values = {key: each.format(files=files) if isinstance(each, str) else each for key, each in given}
    config = own_config(files, tmp_path / "run", strategy=FRAMEWORKS[at], **values)
    whole = run(config)
    other = resumed(config, "other", strategy=FRAMEWORKS[(at + 1) % len(FRAMEWORKS)])
    assert losses(other) == pytest.approx(losses(whole)[2:], rel=1e-5)


WRONG_FILE = """
import torch
from mine import *

def net_of_a_number(): return 3
def net_unknown_key(): return {**net(), "layers": 1}
def net_forgotten_parameter():
    model = nn.Linear(8, 2)
    return {"model": model, "loss": loss, "groups": [{"params": [model.weight]}]}
def net_loss_of_samples(): return {"model": nn.Linear(8, 2), "loss": lambda model, batch: model(batch["x"]).sum(1)}
def net_error(): return 1 / 0
class Other(Points):
    def __getitem__(self, index): return self.y[index]
def data_fails(part, count): return Other(count, 1)
def metrics_number(model, batch): return 1.0
def optimizer_none(groups, lr, weight_decay): return None
def schedule_infinite(step, total): return 1e999
callback = 3
"""
WRONG = {
    "net_of_a_number": "gives int, and a torch.nn.Module is needed",
    "net_unknown_key": "'layers' is not one of model, blocks, loss and groups",
    "net_forgotten_parameter": "bias is in no group",
    "net_loss_of_samples": r"is a tensor of shape \[8\], and has to be",
    "net_error": r"ZeroDivisionError: division by zero \(wrong.py, line 11\)",
    "data_fails": r"failed with AttributeError: .* \(wrong.py, line 13\)",
    "metrics_number": "something else than tensors by name",
    "optimizer_none": "gives NoneType, not an Optimizer",
    "schedule_infinite": "gives inf, and a factor",
    "callback": "is not a function",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_one_sentence_before_workers_start(name, files, tmp_path, capfd):
    (files / "wrong.py").write_text(WRONG_FILE)
    kind = name.partition("_")[0]
    option = {"net": "model", "data": "dataset"}.get(kind, kind)
    value: Any = f"{files}/wrong.py:{name}"
    with pytest.raises(UsageError, match=WRONG[name]):
        check_before_start(own_config(files, tmp_path, **{option: (value,) if option == "callback" else value}))
    assert capfd.readouterr() == ("", "")


WATCHING = """
import json, os

class Watch:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self.write
    def __exit__(self, kind, *error):
        self.write({"ended": kind and kind.__name__})
    def write(self, line):
        print(json.dumps({**line, "pid": os.getpid()}), file=self.file.open("a"))

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


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def watched(files, tmp_path, monkeypatch):
    """A run that is watched by a callback."""
    monkeypatch.chdir(files)
    (files / "watch.py").write_text(WATCHING)
    return own_config(files, tmp_path / "run", model_arg=("width=48",), callback=(f"{files}/watch.py:watch",))


@pytest.mark.extended
def test_a_run_with_a_callback_is_exported_and_predicts(watched, files, tmp_path):
    whole = run(replace(watched, out=tmp_path / "whole", callback=()))
    config = replace(watched, export=str(tmp_path / "own.safetensors"))
    check_same_end(run(config), whole)
    export_weights(config, result_of(config).checkpoint)
    check_watched(config.out, starts=1)
    check_predicts(files, Path(config.export))


@pytest.mark.soak
def test_a_script_trains_a_function_within_another_one_under_ray_and_predicts(watched, files, tmp_path):
    train_each(watched)
    (files / "script.py").write_text(SCRIPT)
    words, out = [sys.executable, "script.py", f"{watched.out}/checkpoints/epoch_0001"], tmp_path / "ray"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (files, *sys.path)))}
    done = subprocess.run([*words, out], cwd=files, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert len(result_of(out).history) == 1
    check_watched(out, starts=1)
    check_predicts(files, out.with_suffix(".safetensors"))


def check_predicts(files: Path, model: Path) -> None:
    (files / "point.json").write_text("[1, 2, 3, 4, 5, 6, 7, 8]")
    (files / "points.txt").write_text("point.json\n")
    answers = model.with_suffix(".jsonl")
    words = ["--model", model, "--architecture", "mine.py:net?width=48", "--input", "points.txt", "--output", answers]
    done = CliRunner().invoke(batch.main, list(map(str, words)))
    assert done.exit_code == 0, done.output
    [answer] = lines_of(answers)
    assert len(answer["outputs"]["output"]) == 2


def check_watched(out: Path, starts: int) -> None:
    """Each line of metrics was seen once, by one process of each start, and the last start has ended the callback."""
    watched = lines_of(out / "watched.jsonl")
    assert len({line["pid"] for line in watched}) == starts
    assert [line["ended"] for line in watched if "ended" in line] == [None]
    found = [{key: value for key, value in line.items() if key != "pid"} for line in watched if "ended" not in line]
    assert found == lines_of(out / "metrics.jsonl")


def sentence_of_failure(config: TrainConfig) -> str:
    try:
        train(config)
    except KeyError as error:
        return RankFailure.from_error(0, error).sentence
    return "it did not fail"


def test_an_error_in_the_loss_names_rank_file_and_line(files, tmp_path):
    (tmp_path / "failing.py").write_text(
        "from mine import *\ndef net():\n    return {'model': nn.Linear(8, 2), 'loss': failing}\n"
        "def failing(model, batch):\n    raise KeyError('colour')\n"
    )
    config = own_config(files, tmp_path / "run", model=f"{tmp_path}/failing.py:net", num_workers=1)
    [found] = pool(1).run(sentence_of_failure, config)
    assert found == "rank 0 failed with KeyError: 'colour' (failing.py, line 5)"
