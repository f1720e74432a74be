"""What every worker would fail at is one sentence with the documented exit code, before any of them starts; and the
command imports no more than what it needs for that."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import training
from ckpt_tools.errors import UsageError
from tests.training.jobs import small_config, tiny_config
from training.__main__ import main
from training.config.model_names import MODELS
from training.config.train_config import TrainConfig
from training.launchers.checks import check_before_start
from training.launchers.devices import check_gpus
from training.models.zoo import build_own_model

Files = dict[str, Any]
TEXT = "--model lm --dataset text --data-root {}"
HUGGING_FACE = "--model hf:{} --dataset text"
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA: Files = {"model_type": "llama", **SIZES}
MINE: Files = {"file": "mine"}
USED: Files = {f"checkpoints/{name}": None for name in ("epoch_0002", "epoch_0010", ".epoch_0011.partial")}
UNFIT = "the checkpoint does not fit the model: "
LONG = "x" * 300


def with_shape(**weights: torch.Tensor) -> Files:
    return {"weights.pt": build_own_model("cnn").state_dict() | weights}


def hugging_face(**config: Any) -> Files:
    return {"config.json": json.dumps(config)}


REFUSED: list[tuple[Files, str, int, str]] = [
    ({}, "--num-samples 5000", 2, "--num-samples is 5000 and digits has 1437 to train on"),
    ({}, "--resume latest", 3, "{}/run holds no checkpoint to resume from..."),
    ({"notes.txt": "nothing"}, "--resume {}/notes.txt", 4, "...notes.txt..."),
    (USED, "--out {}", 8, "{} already holds checkpoints of a run; continue it with --resume latest..."),
    ({}, f"--out {{}}/{LONG}", 5, "...: File name too long"),
    (MINE, "--out {}/file", 8, "--out {}/file is to be a folder, and {}/file is a file"),
    ({"torchrun.log": None}, "--out {} --num-samples 64", 5, "{}/torchrun.log: Is a directory"),
    ({}, "--model cnn --init-from {}/none.pt", 3, "...none.pt..."),
    (
        with_shape(**{"hidden.bias": torch.zeros(3)}),
        "--model cnn --init-from {}/weights.pt",
        2,
        f"{UNFIT}shape mismatch: hidden.bias (checkpoint [3], model [64])",
    ),
    ({}, "--export {}/out.xyz", 2, "--export {}/out.xyz ends as no model file does: name a file..."),
    (MINE, "--export {}/file/model.pt", 5, "{}/file/model.pt cannot be written: {}/file/..."),
    ({}, "--export nowhere://bucket/model.pt", 4, "nowhere://bucket/model.pt: Protocol not known: nowhere..."),
    (MINE, "--export {}/file", 8, "--export {}/file exists already; move it away or choose another name"),
    (
        hugging_face(model_type="bert"),
        HUGGING_FACE,
        4,
        "--model hf:{}: bert is not causal, so it sees the text that it has to predict; set ...",
    ),
    (
        hugging_face(**LLAMA | {"vocab_size": 16}),
        HUGGING_FACE,
        4,
        "{}: vocab_size is 16, and there are 256 bytes ...",
    ),
    ({}, "--model hf:/nonexistent --dataset text", 3, "--model hf:/nonexistent: there is no folder /nonexistent"),
]
"""What lies in the folder ``{}``, where the run is ``{}/run``; words of the command; its exit code and sentence."""


@pytest.mark.parametrize(("files", "words", "code", "sentence"), REFUSED, ids=[row[1][:60] for row in REFUSED])
def test_it_is_refused(files, words, code, sentence, tmp_path):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        elif content is None:
            path.mkdir()
        else:
            torch.save(content, path)
    usual = "--engine fsdp2 --launcher torchrun --out {}/run"
    done = CliRunner().invoke(main, f"{usual} {words}".replace("{}", str(tmp_path)).split())
    pattern = ".*".join(map(re.escape, sentence.replace("{}", str(tmp_path)).split("...")))
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert re.fullmatch(f"Error: {pattern}", done.stderr.splitlines()[-1]), done.stderr
    assert not (tmp_path / "run").exists()
    if "file" in files:
        assert (tmp_path / "file").read_text() == "mine"


def test_a_run_of_several_checkpoints_is_not_one(small_run, tmp_path):
    folder = Path(small_run("fsdp2").checkpoint).parents[1]
    done = CliRunner().invoke(main, ["--engine=fsdp2", f"--out={tmp_path / 'new'}", f"--resume={folder}"])
    names = ", ".join(f"checkpoints/epoch_000{epoch}" for epoch in (2, 1))
    assert done.exit_code == 4
    assert f"there are several checkpoints here ({names}); name the folder of one" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("model", MODELS)
def test_first_weights_of_another_model_are_refused_and_those_of_the_model_taken(model, tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "other.pt")
    torch.save(build_own_model(model).state_dict(), tmp_path / "weights.pt")
    data = {"model": model, "dataset": "text" if MODELS[model].task == "text" else "digits"}
    other, fits = (
        TrainConfig(
            out=tmp_path / "run", engine="fsdp2", launcher="torchrun", **data, init_from=f"{tmp_path}/{name}.pt"
        )
        for name in ("other", "weights")
    )
    with pytest.raises(UsageError, match=f"^{UNFIT}not in the checkpoint: .*; not in the model: w$") as caught:
        check_before_start(other)
    assert "meta" not in str(caught.value)
    check_before_start(fits)


@pytest.mark.parametrize("engine", ["fsdp2", "zero1", "zero3"])
def test_a_checkpoint_of_every_engine_fits(engine, small_run, tmp_path):
    resume = str(Path(small_run(engine).checkpoint).with_name("epoch_0001"))
    check_before_start(small_config(tmp_path / "run", engine="zero2", resume=resume))


@pytest.mark.parametrize("export", ["model.gguf", "v2.5", "no/such/parent/model.safetensors"])
def test_an_export_that_can_be_written_is_not_begun(export, tmp_path):
    check_before_start(small_config(tmp_path / "run", engine="fsdp2", export=f"{tmp_path}/{export}"))
    assert not list(tmp_path.iterdir())


def test_more_workers_than_gpus_are_refused_and_none_is_a_cpu(tmp_path, monkeypatch):
    for workers, gpus in ((2, 0), (2, 2), (1, 8)):
        check_gpus(workers, gpus, "this machine")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    expected = "^--num-workers is 2 and this machine has 1 GPU, one for each worker; give --num-workers 1 or less$"
    with pytest.raises(UsageError, match=expected):
        check_before_start(tiny_config(tmp_path / "run", strategy="full_shard"))
    check_before_start(tiny_config(tmp_path / "run", strategy="full_shard", num_workers=1))


FRAMEWORKS = {"torch", "torchvision", "ray", "deepspeed", "sklearn", "pyarrow", "numpy"}
ROOT = Path(training.__file__).parent.parent

# As `python -m training ARGS...` with each ARGS; and what each said, and the names of all modules that were imported.
RUN = """
import contextlib, io, json, runpy, sys
ends = []
for args in json.loads(sys.argv[1]):
    sys.argv[1:] = args
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module("training", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            ends.append((error.code or 0, said.getvalue()))
print(json.dumps((ends, [*{name.partition(".")[0] for name in sys.modules}])))
"""


def test_options_are_checked_before_a_framework_is_imported():
    refused = [
        ["--engine=fsdp", "--out=x"],
        ["--engine=fsdp2", "--out=x", "--epoch=three"],
        ["--strategy=full_shard", "--out=x", "--tp=3"],
        ["--config=none", "--out=x"],
        ["--engine=fsdp2", "--out=x", "--dataset=fashion-mnist"],
        ["--engine=fsdp2", "--out=x", "--launcher=torchrun", "--storage=s3://bucket/run"],
    ]
    words = [sys.executable, "-c", RUN, json.dumps([["--help"], *refused])]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ends, modules = json.loads(done.stdout)
    for args, (code, stderr) in zip(refused, ends[1:], strict=True):
        assert (code, "Traceback" in stderr) == (2, False), (args, stderr)
    assert ends[0] == [0, ""]
    assert "click" in modules
    assert not {*modules} & FRAMEWORKS
