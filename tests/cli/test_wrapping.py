"""Text wraps at words, on terminals of every width; a pipe gets one line a sentence."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools.cli.main import group
from tests.cli.terminals import shown
from tests.support.commands import all_commands

WIDTHS = (60, 80, 120, 200)


def lines_that_are_too_long(text: str, columns: int) -> list[str]:
    """Lines beyond the width that a break between two words could have shortened."""
    return [line for line in text.split("\n") if len(line) > columns and len(line.split()) > 1]


def words(text: str) -> list[str]:
    return re.findall(r"\S+", text)


def piped(*given: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_tools", *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, checkpoint):
    """Twelve checkpoints of one run, of which none is named."""
    folder = tmp_path_factory.mktemp("run")
    made = checkpoint("fsdp2", "plain", 2).checkpoint
    for number in range(1, 13):
        shutil.copytree(made, folder / "checkpoints" / f"epoch_{number}")
    return folder


@pytest.mark.parametrize("columns", WIDTHS)
def test_an_error_wraps_at_words(columns, run_folder):
    code, text = shown("inspect", run_folder, "--tensors", columns=columns)
    assert code == 4
    assert not lines_that_are_too_long(text, columns)
    plain = piped("inspect", run_folder, "--tensors").stderr
    assert plain.count("\n") == 1
    assert words(text) == words(plain)


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_usage_error_wraps_at_words(columns):
    code, text = shown("convert", "a", "b", "--dtype", "bf17", "--to", "dcp", columns=columns)
    assert code == 2
    assert not lines_that_are_too_long(text, columns)
    assert "'float32', 'bfloat16', 'float16'" in " ".join(words(text))


@pytest.mark.parametrize("columns", WIDTHS)
def test_notes_wrap_at_words(columns, tmp_path, checkpoint):
    source = checkpoint("fsdp2", "plain", 2).checkpoint
    given = ("convert", source, tmp_path / "out", "--to", "zero2", "--overwrite", "--quiet")
    code, text = shown(*given, columns=columns)
    assert code == 0
    assert not lines_that_are_too_long(text, columns)
    assert "bias_correction = True in parameter group 0" in " ".join(words(text))
    assert len([line for line in piped(*given).stdout.split("\n") if "bias_correction" in line]) == 1


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("command", ["", *sorted(all_commands())])
def test_help_wraps_at_words_and_says_everything(columns, command):
    """Every word of the help at 110 columns is in that of any width, and no summary is cut."""
    found = all_commands()[command] if command else group
    texts = []
    for width in (columns, 110):
        context = found.make_context("ckpt-tools", [], resilient_parsing=True, max_content_width=width)
        context.terminal_width = width - 2
        texts.append(found.get_help(context))
    assert not lines_that_are_too_long(texts[0], columns)
    assert words(texts[0]) == words(texts[1])
    assert not any(line.endswith("...") for line in texts[0].split("\n")[1:]), texts[0]


@pytest.mark.parametrize("columns", WIDTHS)
def test_help_on_a_terminal(columns):
    code, text = shown("--help", columns=columns)
    assert code == 0
    assert not lines_that_are_too_long(text, columns)
    said = " ".join(words(text))
    assert "5 I/O failure (a retry may help), 6 differences found" in said
    assert "Sign every file of a checkpoint, or a list of digests, with OpenSSF model-signing." in said


def test_help_is_shown_where_no_command_is_named():
    code, text = shown(columns=60)
    assert code == 2
    assert words(text) == words(shown("--help", columns=60)[1])


def test_counts_have_their_plural(tmp_path, checkpoint):
    import torch

    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    done = piped("convert", tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert "1 tensor (8 B) in 1 file (8 B)" in re.sub(r"\d+ B", "8 B", done.stdout)
    assert "in 1 task\n" in piped("plan", tmp_path / "m.pt", tmp_path / "n.safetensors").stdout


def test_a_run_folder_names_its_newest_checkpoints(run_folder):
    said = piped("inspect", run_folder, "--tensors").stderr
    assert "epoch_12, checkpoints/epoch_11, checkpoints/epoch_10, checkpoints/epoch_9 and 8 more" in said


def test_tags_are_named_the_newest_first(tmp_path, checkpoint):
    made = checkpoint("zero3-fp32", "awkward", 2).checkpoint
    tag = (made / "latest").read_text()
    for number in range(1, 13):
        shutil.copytree(made / tag, tmp_path / "run" / f"global_step{number}")
    said = piped("inspect", tmp_path / "run", "--tree").stderr
    assert "(global_step12, global_step11, global_step10, global_step9 and 8 more)" in said


def test_memory_is_said_in_units(tmp_path, checkpoint):
    source = checkpoint("fsdp2", "plain", 2).checkpoint
    done = piped("convert", source, tmp_path / "o", "--to", "dcp", "--memory", "10MB")
    assert done.returncode == 9
    assert re.search(
        r"needs at least \d+\.\d\d MB of memory with \d+ workers?, and the budget is 10\.00 MB", done.stderr
    )


@pytest.mark.parametrize("name", ["a.onnx", "x.npy", "x.NPZ", "x.PT", "m.ckpt", "weights.tar.gz"])
@pytest.mark.parametrize("more", [(), ("--to", "safetensors")])
def test_endings_of_foreign_files_are_refused(name, more, tmp_path, checkpoint):
    done = piped("convert", checkpoint("fsdp2", "plain", 2).checkpoint, tmp_path / name, *more)
    assert done.returncode == 2
    assert name in done.stderr
    assert ".safetensors, .pt, .pth, .bin, .gguf or .npz" in done.stderr
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(("name", "to"), [("run.v1", "dcp"), ("epoch=1-step=2.ckpt", "zero2"), ("a.b", "safetensors")])
def test_other_folders_may_have_a_dot(name, to, tmp_path, checkpoint):
    ckpt_tools.convert(checkpoint("fsdp2", "plain", 2).checkpoint, tmp_path / name, to=to)
    assert (tmp_path / name).is_dir()


def test_what_is_renamed_is_said(tmp_path):
    import torch

    torch.save({f"old.{number}": torch.ones(1) for number in range(9)}, tmp_path / "m.pt")
    given = (tmp_path / "m.pt", tmp_path / "m.safetensors", "--rename", "^old=new")
    assert "renamed: 9 names (old.0 to new.0, " in piped("plan", *given).stdout
    assert " and 5 more)" in piped("plan", *given).stdout
    assert json.loads(piped("plan", *given, "--json").stdout)["renamed"] == {f"old.{n}": f"new.{n}" for n in range(9)}
    assert "renamed: 9 names" in piped("convert", *given).stdout
    found = json.loads(piped("convert", *given, "--overwrite", "--json").stdout)
    assert found["plan"]["renamed"]["old.8"] == "new.8"
