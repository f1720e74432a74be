"""Bad input: one clear sentence, the documented exit code, no traceback, and no output that looks whole."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import all_commands

COMMAND = [sys.executable, "-m", "ckpt_tools"]


def run(*words: str | Path, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        import signal

        if limit_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=60, preexec_fn=limited, check=False
    )


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One sentence on stderr with ``words`` in it, and the exit code."""
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.fixture
def zero3(tmp_path, checkpoint):
    return Path(shutil.copytree(checkpoint("zero3-fp32", "awkward", 3).checkpoint, tmp_path / "zero3"))


@pytest.fixture
def dcp(tmp_path, checkpoint):
    return Path(shutil.copytree(checkpoint("fsdp2", "awkward", 3).checkpoint, tmp_path / "dcp"))


def truncate(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def first(folder: Path, pattern: str) -> Path:
    return sorted(folder.rglob(pattern))[0]


def test_nothing_at_the_source(tmp_path):
    refused(run("convert", tmp_path / "no", tmp_path / "m.pt"), 3, "no file or folder")


def test_an_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(run("inspect", tmp_path / "empty"), 3, "empty folder")


OF_EMPTY_FOLDERS: dict[str, list[str]] = {
    "inspect": ["E"],
    "cat": ["E", "name"],
    "ls": ["E"],
    "plan": ["E", "OUT.pt"],
    "convert": ["E", "OUT.pt"],
    "reshard": ["E", "OUT", "--world-size", "2"],
    "consolidate": ["E", "OUT.safetensors"],
    "merge-lora": ["E", "E", "OUT.pt"],
    "make-loadable": ["E", "OUT.pt"],
    "verify": ["E"],
    "diff": ["E", "E"],
    "scan": ["E"],
    "checksum": ["E"],
    "sign": ["E", "--private-key", "E.pem"],
    "recipes check": ["E.toml", "E"],
    "prune": ["E", "--keep-last", "1"],
    "predict": ["--model", "E", "--input", "E", "--output", "OUT.jsonl"],
    "serve": ["E"],
}
WITHOUT_A_SOURCE = {"clean", "completion", "formats", "recipes", "recipes show", "train"}
"""``clean`` is told a destination, at which nothing need be left."""


def test_the_table_has_every_command():
    assert OF_EMPTY_FOLDERS.keys() | WITHOUT_A_SOURCE == all_commands().keys()


@pytest.mark.parametrize("command", OF_EMPTY_FOLDERS)
def test_an_empty_folder_is_nothing_at_the_source(command, tmp_path):
    (tmp_path / "E").mkdir()
    words = [str(tmp_path / word) if word[0] in "EO" else word for word in OF_EMPTY_FOLDERS[command]]
    refused(run(*command.split(), *words), 3, str(tmp_path / "E"))
    assert [path.name for path in tmp_path.rglob("*")] == ["E"]


def test_a_format_nobody_knows(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("hello")
    refused(run("inspect", tmp_path / "x"), 4, "not in a known format", "--from")


def test_no_such_format_to_write(dcp, tmp_path):
    refused(run("convert", dcp, tmp_path / "out", "--to", "onnx"), 2, "'onnx'")


def test_no_format_said(dcp, tmp_path):
    refused(run("convert", dcp, tmp_path / "out"), 2, "--to")


def test_a_wrong_tag_names_the_right_ones(zero3, tmp_path):
    refused(run("convert", zero3, tmp_path / "m.pt", "--tag", "global_step999"), 3, "global_step999", "global_step4")


def _missing_rank(zero3: Path) -> None:
    first(zero3, "*zero_pp_rank_1_*optim_states.pt").unlink()


def _truncated_optimizer(zero3: Path) -> None:
    truncate(first(zero3, "*zero_pp_rank_2_*optim_states.pt"), 2000)


@pytest.mark.parametrize("harm", [_missing_rank, _truncated_optimizer])
def test_a_harmed_zero_checkpoint(harm, zero3, tmp_path):
    harm(zero3)
    refused(run("convert", zero3, tmp_path / "m.safetensors"), 4, "zero_pp_rank_")
    assert not (tmp_path / "m.safetensors").exists()


def _truncated_shard(dcp: Path) -> None:
    path = first(dcp, "*.distcp")
    truncate(path, path.stat().st_size // 2)


def _missing_shard(dcp: Path) -> None:
    first(dcp, "__2_*.distcp").unlink()


def _cut_metadata(dcp: Path) -> None:
    truncate(dcp / ".metadata", 500)


def _garbage_metadata(dcp: Path) -> None:
    (dcp / ".metadata").write_bytes(os.urandom(4096))


@pytest.mark.parametrize("harm", [_truncated_shard, _missing_shard, _cut_metadata, _garbage_metadata])
def test_a_harmed_dcp(harm, dcp, tmp_path):
    harm(dcp)
    refused(run("convert", dcp, tmp_path / "m.safetensors"), 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_an_existing_destination(dcp, tmp_path):
    (tmp_path / "m.pt").write_text("mine")
    refused(run("convert", dcp, tmp_path / "m.pt"), 8, "--overwrite")
    refused(run("convert", dcp, tmp_path / "m.pt", "--overwrite"), 8, "is not a checkpoint")
    assert (tmp_path / "m.pt").read_text() == "mine"
    (tmp_path / "m.pt").unlink()
    for words in ((), ("--overwrite",)):
        assert run("convert", dcp, tmp_path / "m.pt", *words).returncode == 0


def test_overwrite_deletes_no_folder_that_is_no_checkpoint(dcp, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("mine")
    refused(run("convert", dcp, tmp_path / "thesis", "--to", "dcp", "--overwrite"), 8, "is not a checkpoint")
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "mine"


def test_overwrite_deletes_no_other_tag(dcp, tmp_path):
    assert run("convert", dcp, tmp_path / "out", "--to", "zero2", "--tag", "first").returncode == 0
    refused(run("convert", dcp, tmp_path / "out", "--to", "zero2", "--tag", "second", "--overwrite"), 8, "first")
    assert run("convert", dcp, tmp_path / "out", "--to", "zero2", "--tag", "first", "--overwrite").returncode == 0


def test_a_budget_that_nothing_fits_in(dcp, tmp_path):
    refused(run("convert", dcp, tmp_path / "m.pt", "--memory", "1MiB"), 9, "--memory")


def test_a_size_that_is_none(dcp, tmp_path):
    refused(run("convert", dcp, tmp_path / "m.pt", "--memory", "lots"), 2, "512MiB")


def test_a_loss_that_strict_forbids(zero3, tmp_path):
    refused(run("convert", zero3, tmp_path / "m.pt", "--strict"), 1, "exp_avg")
    assert run("consolidate", zero3, tmp_path / "m.pt", "--strict").returncode == 0


def test_a_file_size_limit_stands_for_a_full_disk(dcp, tmp_path):
    refused(run("convert", dcp, tmp_path / "out", "--to", "safetensors", limit_bytes=1000), 5, "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_a_difference_has_its_own_code(dcp, zero3, tmp_path):
    assert run("convert", dcp, tmp_path / "m.safetensors").returncode == 0
    path = tmp_path / "m.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = run("verify", dcp, path)
    assert (done.returncode, done.stderr) == (6, "")
    assert done.stdout.startswith("verification failed\n1 of ")


def test_a_flipped_bit_breaks_a_stored_checksum(zero3):
    path = first(zero3, "*optim_states.pt")
    data = bytearray(path.read_bytes())
    data[data.index(b"/data/0") + 200] ^= 4
    path.write_bytes(data)
    done = run("verify", zero3)
    assert done.returncode in (4, 6), done.stderr


def test_a_link_out_of_the_checkpoint_is_not_followed(dcp, tmp_path):
    shard = first(dcp, "*.distcp")
    shutil.move(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    refused(run("convert", dcp, tmp_path / "m.pt"), 7, "outside")
