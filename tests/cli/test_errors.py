"""Bad input: one clear sentence, the documented exit code, no traceback, and no output that looks whole."""

import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Done, all_commands, run_command


def refused(done: Done, code: int, *words: str) -> None:
    """One sentence on stderr with ``words`` in it, and the exit code."""
    assert (done.code, done.err.count("\n"), "Traceback" in done.err) == (code, 1, False), done.err
    assert all(word in done.err for word in words), done.err


@pytest.fixture
def zero3(tmp_path, checkpoint):
    return Path(shutil.copytree(checkpoint("zero3-fp32", "awkward", 3).checkpoint, tmp_path / "zero3"))


@pytest.fixture
def dcp(tmp_path, checkpoint):
    return Path(shutil.copytree(checkpoint("fsdp2", "awkward", 3).checkpoint, tmp_path / "dcp"))


def first(folder: Path, pattern: str) -> Path:
    return sorted(folder.rglob(pattern))[0]


OF_EMPTY_FOLDERS: dict[str, list[str]] = {
    "inspect": ["E"],
    "cat": ["E", "name"],
    "ls": ["E"],
    "plan": ["E", "OUT.pt"],
    "convert": ["E", "OUT.pt"],
    "reshard": ["E", "OUT", "--world-size", "2"],
    "consolidate": ["E", "OUT.safetensors"],
    "average": ["E", "E", "OUT.pt"],
    "delta": ["E", "E", "OUT/weight_v000001"],
    "convert-run": ["E", "OUT/{step}.pt"],
    "merge-lora": ["E", "E", "OUT.pt"],
    "make-loadable": ["E", "OUT.pt"],
    "verify": ["E"],
    "diff": ["E", "E"],
    "scan": ["E"],
    "check": ["E"],
    "checksum": ["E"],
    "sign": ["E", "--private-key", "E.pem"],
    "recipes check": ["E.toml", "E"],
    "prune": ["E", "--keep-last", "1"],
    "predict": ["--model", "E", "--input", "E", "--output", "OUT.jsonl"],
    "serve": ["E"],
    "verify-forward": ["E", "E"],
}
WITHOUT_A_SOURCE = {"clean", "completion", "formats", "recipes", "recipes show", "samples", "train"}
"""``clean`` is told a destination, at which nothing need be left."""


def test_an_empty_folder_is_nothing_at_the_source(tmp_path):
    assert OF_EMPTY_FOLDERS.keys() | WITHOUT_A_SOURCE == all_commands().keys()
    (tmp_path / "E").mkdir()
    for command, given in OF_EMPTY_FOLDERS.items():
        words = [str(tmp_path / word) if word[0] in "EO" else word for word in given]
        refused(run_command(*command.split(), *words), 3, str(tmp_path / "E"))
    assert [path.name for path in tmp_path.rglob("*")] == ["E"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["convert", "no", "m.pt"], 3, ["no file or folder"]),
        (["inspect", "empty"], 3, ["empty folder"]),
        (["inspect", "notes"], 4, ["not in a known format", "--from"]),
        (["convert", "dcp", "out", "--to", "onnx"], 2, ["'onnx'"]),
        (["convert", "dcp", "out"], 2, ["--to"]),
        (["convert", "dcp", "m.pt", "--memory", "1MiB"], 9, ["--memory"]),
        (["convert", "dcp", "m.pt", "--memory", "lots"], 2, ["512MiB"]),
    ],
)
def test_wrong_words(words, code, said, dcp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("notes").mkdir()
    Path("notes/notes.txt").write_text("hello")
    refused(run_command(*words), code, *said)


def test_a_wrong_tag_and_a_loss_that_strict_forbids(zero3, tmp_path):
    words = ("convert", zero3, tmp_path / "m.pt")
    refused(run_command(*words, "--tag", "global_step999"), 3, "global_step999", "global_step4")
    refused(run_command(*words, "--strict"), 1, "exp_avg")
    assert run_command("consolidate", zero3, tmp_path / "m.pt", "--strict").code == 0


def test_a_file_size_limit_stands_for_a_full_disk(dcp, tmp_path):
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    # Without -B, Python would leave files of bytecode that the limit has cut off.
    command = [sys.executable, "-B", "-m", "ckpt_tools", "convert", dcp, tmp_path / "out", "--to", "safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limited, check=False)
    refused(Done(done.returncode, done.stdout, done.stderr), 5, "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_an_end_of_data_is_no_interrupt(dcp, monkeypatch):
    def fail(*_, **__):
        raise EOFError("marshal data too short")

    monkeypatch.setattr("ckpt_tools.api.inspect", fail)
    done = run_command("inspect", dcp)
    assert (done.code, "marshal data too short" in done.err, "Interrupted" in done.err) == (1, True, False)
