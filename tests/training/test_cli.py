"""What goes wrong before any worker starts: one sentence and the documented exit code."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

import training
from tests.training.failure_jobs import LIMIT_BYTES
from tests.training.jobs import small_config
from training.__main__ import main
from training.config.options import DATASETS
from training.config.strategies import EngineName

FRAMEWORKS = {"torch", "torchvision", "ray", "deepspeed", "sklearn", "pyarrow", "numpy"}
ROOT = Path(training.__file__).parent.parent

# As `python -m training ARGS...` with each ARGS; and what each said, and the names of all modules that were imported.
RUN = """
import contextlib, io, json, runpy, sys
refused, each = json.loads(sys.argv[1]), json.loads(sys.argv[2])
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refusing())
ends = []
for args in each:
    sys.argv[1:] = args
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module("training", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            ends.append((error.code or 0, said.getvalue()))
print(json.dumps((ends, [*{name.partition(".")[0] for name in sys.modules}])))
"""


def run_each(args: list[list[str]], refused: str = "") -> tuple[list[tuple[int, str]], set[str]]:
    """The exit code and the standard error of the real command with each of the arguments, one after the other in a
    process; and what it imported. Some is as if not installed."""
    given = [json.dumps(refused.split()), json.dumps(args)]
    done = subprocess.run([sys.executable, "-c", RUN, *given], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ends, modules = json.loads(done.stdout)
    return [(code, said) for code, said in ends], {*modules}


def run(*args: str, refused: str = "") -> tuple[int, str, set[str]]:
    [(code, said)], modules = run_each([[*args]], refused)
    return code, said, modules


def fail(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["--engine=fsdp2", *args])
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.exit_code, result.stderr


@pytest.fixture
def used(tmp_path):
    """The folder of a run that has saved epochs 2, 9 and 10, and begun another."""
    for name in ("epoch_0002", "epoch_0009", "epoch_0010", ".epoch_0011.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    return tmp_path


def test_options_that_do_not_fit_are_a_usage_error(tmp_path):
    code, sentence = fail(f"--out={tmp_path}", "--num-workers=3")
    assert code == 2
    assert sentence.startswith("Error: the global batch of 64 does not divide over 3 workers")


def test_an_option_without_its_value_is_a_usage_error():
    """click took it for a flag, and ``out`` was None."""
    ended = CliRunner().invoke(main, ["--engine=fsdp2", "--out", "--num-workers", "3"])
    assert (ended.exit_code, ended.stderr.splitlines()[-1]) == (2, "Error: Got unexpected extra argument (3)")


def test_there_is_nothing_to_resume(tmp_path):
    assert fail(f"--out={tmp_path}", "--resume=latest")[0] == 3
    code, sentence = fail(f"--out={tmp_path}", f"--resume={tmp_path / 'none'}")
    assert code == 3
    assert "there is no file or folder " in sentence


def test_a_used_folder_is_not_written_to_by_accident(used, tmp_path):
    assert fail(f"--out={used}")[0] == 8
    code, sentence = fail(f"--out={used}", f"--resume={tmp_path}")
    assert code == 8
    assert "--resume latest" in sentence


def test_options_are_checked_before_a_framework_is_imported():
    refused = [
        ["--engine=fsdp", "--out=x"],
        ["--engine=fsdp2"],
        ["--engine=fsdp2", "--out=x", "--epoch=three"],
        ["--out=x"],
        ["--strategy=full_shard", "--out=x", "--tp=3"],
        ["--strategy=full_shard", "--out=x", "--model=lm-moe", "--dataset=text", "--tp=2", "--ep=2"],
        ["--strategy=zero3", "--out=x", "--model=lm-moe", "--dataset=text", "--ep=2"],
        ["--config=none", "--out=x"],
        ["--engine=fsdp2", "--out=x", "--num-workers=3"],
        ["--engine=fsdp2", "--out=x", "--dataset=fashion-mnist"],
        ["--engine=fsdp2", "--out=x", "--override=lr", "--resume=latest"],
        ["--engine=fsdp2", "--out=x", "--launcher=torchrun", "--storage=s3://bucket/run"],
    ]
    ends, modules = run_each([["--help"], *refused])
    for args, (code, stderr) in zip(refused, ends[1:], strict=True):
        assert (code, "Traceback" in stderr) == (2, False), (args, stderr)
    assert ends[0] == (0, "")
    assert "click" in modules
    assert not modules & FRAMEWORKS


def test_the_command_imports_torch_without_its_compiler_and_torchvision(tmp_path):
    """Which would take as long again; the run ends at the last check of its options."""
    options = ("--engine=fsdp2", "--model=cnn", "--launcher=torchrun", f"--out={tmp_path / 'run'}")
    code, stderr, modules = run(*options, f"--init-from={tmp_path / 'none.pt'}")
    assert (code, "none.pt" in stderr) == (3, True), stderr
    assert "torch" in modules
    assert not modules & (FRAMEWORKS - {"torch", "numpy"} | {"sympy", "triton"})


@pytest.mark.parametrize(
    ("refused", "args", "names"),
    [
        ("torch", [], "torch"),
        ("torch torchvision sklearn", [], "torch, torchvision, scikit-learn"),
        ("ray", ["--launcher=ray"], "ray"),
        ("deepspeed", ["--engine=zero3"], "deepspeed"),
    ],
)
def test_a_missing_library_is_a_sentence_with_the_command_that_installs_it(refused, args, names, tmp_path):
    given = ["--engine=fsdp2", "--launcher=torchrun", f"--out={tmp_path / 'run'}", *args]
    code, stderr, modules = run(*given, refused=refused)
    assert code == 2
    install = "pip install 'ckpt-tools[train]'"
    assert stderr == f"Error: this run needs {names}, not installed here; install with: {install}\n"
    assert not modules & FRAMEWORKS


def test_the_names_that_options_take_are_the_light_ones():
    assert DATASETS == ("digits", "fashion-mnist", "image-folder", "text")
    assert get_args(EngineName) == ("fsdp2", "deepspeed", "zero1", "zero2", "zero3")


@pytest.mark.parametrize("out", ["/proc/run", "/proc", "/sys/run"])
def test_an_out_that_cannot_be_made_is_a_sentence(out):
    code, sentence = fail(f"--out={out}", "--launcher=torchrun")
    assert code == 5
    assert sentence.startswith(f"Error: {out} cannot be written: ")


@pytest.mark.parametrize("option", ["--out", "--resume"])
def test_a_name_that_is_too_long_is_a_sentence(option, tmp_path):
    code, sentence = fail(f"--out={tmp_path / 'run'}", f"{option}={tmp_path / ('x' * 300)}")
    assert code == 5
    assert sentence.endswith(": File name too long\n")


@pytest.mark.parametrize("below", ["", "/run", "/runs/run"])
def test_a_file_at_out_stays(below, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    code, sentence = fail(f"--out={file}{below}", "--launcher=torchrun")
    assert code == 8
    assert sentence == f"Error: --out {file}{below} is to be a folder, and {file} is a file\n"
    assert file.read_text() == "mine"


def test_more_samples_than_there_are_is_refused(tmp_path):
    code, sentence = fail(f"--out={tmp_path / 'run'}", "--num-samples=5000")
    assert (code, sentence) == (2, "Error: --num-samples is 5000 and digits has 1437 to train on\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_run_of_several_checkpoints_is_not_one(below, small_runs, tmp_path):
    run_folder = small_runs / "fsdp2" / below
    code, sentence = fail(f"--out={tmp_path / 'new'}", f"--resume={run_folder}")
    assert code == 4
    names = [f"{'' if below else 'checkpoints/'}epoch_000{epoch}" for epoch in (2, 1)]
    assert f"there are several checkpoints here ({', '.join(names)}); name the folder of one" in sentence
    assert not (tmp_path / "new").exists()


def test_a_resume_of_something_else_is_refused_before_any_worker_starts(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    code, sentence = fail(f"--out={tmp_path / 'new'}", f"--resume={tmp_path / 'notes.txt'}")
    assert code == 4
    assert "notes.txt" in sentence
    assert not (tmp_path / "new").exists()


@pytest.mark.extended
def test_a_failed_run_says_how_to_go_on(small_run, tmp_path):
    """The disk is full, or as good as: no file may grow beyond 0.1 MB, and a shard is of 1.3."""
    epoch = Path(small_run("fsdp2").checkpoint).with_name("epoch_0001")
    shutil.copytree(epoch, tmp_path / "checkpoints/epoch_0001", copy_function=os.link)
    config = small_config(tmp_path, engine="fsdp2", num_workers=1, resume="latest")
    done = subprocess.run(
        [sys.executable, "-m", "training", *config.to_args()],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES)),
    )
    assert done.returncode == 5
    unfinished = tmp_path / "checkpoints/.epoch_0002.partial"
    assert done.stderr.startswith(f"Error: {unfinished} cannot be written: torch could not write a whole file; ")
    assert done.stderr.endswith(" bytes left; continue with --resume latest\n")
    assert done.stderr.count("\n") == 1


def test_a_log_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "torchrun.log").mkdir()
    code, sentence = fail(f"--out={tmp_path}", "--launcher=torchrun", "--num-samples=64")
    assert (code, sentence) == (5, f"Error: {tmp_path / 'torchrun.log'}: Is a directory\n")
