"""Text wraps at words, on terminals of every width; a pipe gets one line a sentence."""

import json
import re
import shutil

import pytest
import torch

import ckpt_tools
from tests.cli.terminals import shown
from tests.support.commands import printed, run_command

WIDTHS = (60, 80, 120, 200)


def lines_that_are_too_long(text: str, columns: int) -> list[str]:
    """Lines beyond the width that a break between two words could have shortened."""
    return [line for line in text.split("\n") if len(line) > columns and len(line.split()) > 1]


def words(text: str) -> list[str]:
    return re.findall(r"\S+", text)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, checkpoint):
    """Twelve checkpoints of one run, of which none is named."""
    folder = tmp_path_factory.mktemp("run")
    made = checkpoint("fsdp2", "plain", 2).checkpoint
    for number in range(1, 13):
        shutil.copytree(made, folder / "checkpoints" / f"epoch_{number}")
    return folder


@pytest.mark.parametrize("columns", WIDTHS)
def test_errors_and_notes_wrap_at_words(columns, run_folder, tmp_path, checkpoint):
    said = run_command("inspect", run_folder, "--tensors", columns=columns)
    plain = run_command("inspect", run_folder, "--tensors")
    assert said.code == 4 and not lines_that_are_too_long(said.err, columns)
    assert plain.err.count("\n") == 1 and words(said.err) == words(plain.err)
    said = run_command("convert", "a", "b", "--dtype", "bf17", "--to", "dcp", columns=columns)
    assert said.code == 2 and not lines_that_are_too_long(said.err, columns)
    assert "'float32', 'bfloat16', 'float16'" in " ".join(words(said.err))
    source = checkpoint("fsdp2", "plain", 2).checkpoint
    given = ("convert", source, tmp_path / "out", "--to", "zero2", "--overwrite", "--quiet")
    said = run_command(*given, columns=columns)
    assert said.code == 0 and not lines_that_are_too_long(said.out, columns)
    assert "bias_correction = True in parameter group 0" in " ".join(words(said.out))
    assert len([line for line in printed(*given).split("\n") if "bias_correction" in line]) == 1


def test_help_on_a_terminal_is_shown_where_no_command_is_named():
    code, text = shown("--help", columns=60)
    assert code == 0 and not lines_that_are_too_long(text, 60)
    said = " ".join(words(text))
    assert "5 I/O failure (a retry may help), 6 differences found" in said
    assert "Sign every file of a checkpoint, or a list of digests, with OpenSSF model-signing." in said
    code, alone = shown(columns=60)
    assert code == 2 and words(alone) == words(text)


def test_counts_have_their_plural(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    done = printed("convert", tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert "1 tensor (8 B) in 1 file (8 B)" in re.sub(r"\d+ B", "8 B", done)
    assert "in 1 task\n" in printed("plan", tmp_path / "m.pt", tmp_path / "n.safetensors")


def test_the_newest_of_many_are_named(run_folder, tmp_path, checkpoint):
    said = run_command("inspect", run_folder, "--tensors").err
    assert "epoch_12, checkpoints/epoch_11, checkpoints/epoch_10, checkpoints/epoch_9 and 8 more" in said
    made = checkpoint("zero3-fp32", "awkward", 2).checkpoint
    tag = (made / "latest").read_text()
    for number in range(1, 13):
        shutil.copytree(made / tag, tmp_path / "run" / f"global_step{number}")
    said = run_command("inspect", tmp_path / "run", "--tree").err
    assert "(global_step12, global_step11, global_step10, global_step9 and 8 more)" in said


def test_memory_is_said_in_units(tmp_path, checkpoint):
    source = checkpoint("fsdp2", "plain", 2).checkpoint
    done = run_command("convert", source, tmp_path / "o", "--to", "dcp", "--memory", "10MB")
    said = r"needs at least \d+\.\d\d MB of memory with \d+ workers?, and the budget is 10\.00 MB"
    assert done.code == 9 and re.search(said, done.err)


@pytest.mark.parametrize("name", ["a.onnx", "x.npy", "x.NPZ", "x.PT", "m.ckpt", "weights.tar.gz"])
def test_endings_of_foreign_files_are_refused(name, tmp_path, checkpoint):
    for more in ((), ("--to", "safetensors")):
        done = run_command("convert", checkpoint("fsdp2", "plain", 2).checkpoint, tmp_path / name, *more)
        assert (done.code, (tmp_path / name).exists()) == (2, False)
        assert name in done.err and ".safetensors, .pt, .pth, .bin, .gguf or .npz" in done.err


@pytest.mark.parametrize(("name", "to"), [("run.v1", "dcp"), ("epoch=1-step=2.ckpt", "zero2"), ("a.b", "safetensors")])
def test_other_folders_may_have_a_dot(name, to, tmp_path, checkpoint):
    ckpt_tools.convert(checkpoint("fsdp2", "plain", 2).checkpoint, tmp_path / name, to=to)
    assert (tmp_path / name).is_dir()


def test_what_is_renamed_is_said(tmp_path):
    torch.save({f"old.{number}": torch.ones(1) for number in range(9)}, tmp_path / "m.pt")
    given = (tmp_path / "m.pt", tmp_path / "m.safetensors", "--rename", "^old=new")
    said = printed("plan", *given)
    assert "renamed: 9 names (old.0 to new.0, " in said and " and 5 more)" in said
    assert json.loads(printed("plan", *given, "--json"))["renamed"] == {f"old.{n}": f"new.{n}" for n in range(9)}
    assert "renamed: 9 names" in printed("convert", *given)
    found = json.loads(printed("convert", *given, "--overwrite", "--json"))
    assert found["plan"]["renamed"]["old.8"] == "new.8"


def test_findings_and_file_names_are_not_folded(tmp_path):
    """A name stays whole, so that it can be copied; what is said of it wraps."""
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    name = "pytorch_model_of_the_second_epoch_with_a_long_name.safetensors"
    for columns in (40, 80):
        done = run_command("plan", tmp_path / "a.pt", tmp_path / name, columns=columns)
        assert done.code == 0 and name in done.out
    name = "a_checkpoint_of_somebody_else_with_a_long_name_of_its_own.npy"
    (tmp_path / "a.pt").unlink()
    (tmp_path / name).write_bytes(b"\x93NUMPY\x01\x00\x02\x00{}")
    done = run_command("scan", tmp_path, columns=60)
    assert done.code == 7 and name in done.out and not lines_that_are_too_long(done.out + done.err, 60)
    said = " ".join(words(done.out + done.err))
    assert "the header of the array is not as numpy writes it; it may mean objects" in said


LONG = "encoder.layers.encoder_layer_6.self_attention.out_proj.weight"


def test_tensors_fit_the_terminal(tmp_path):
    torch.save({LONG: torch.ones(4, 5), "a." * 60 + "b": torch.ones(2)}, tmp_path / "m.pt")
    for more in ([], ["--all"]):
        text = run_command("inspect", tmp_path / "m.pt", "--tensors", *more, columns=60).out
        lines = text.split("\n")
        assert LONG in lines and "a." * 60 + "b" in lines
        assert not [line for line in lines_that_are_too_long(text, 60) if "/m.pt" not in line]


def test_a_pipe_gets_a_line_a_tensor(tmp_path):
    names = [f"{LONG}.{LONG}.{LONG}.{number}" for number in range(3)]
    torch.save({name: torch.ones(4, 5) for name in names}, tmp_path / "m.pt")
    text = printed("inspect", tmp_path / "m.pt", "--tensors", "--all")
    lines = [line.split("\t") for line in text.split("\n") if LONG in line]
    assert [line[0] for line in lines] == names
    assert lines[0][1:] == ["weight", "parameter", "float32", "4 x 5", "80", "1"]
    assert not [line for line in text.split("\n") if line != line.rstrip() or "  " in line]


@pytest.mark.parametrize("columns", WIDTHS)
def test_lists_on_terminals(columns, checkpoint):
    source = checkpoint("zero3-fp32", "awkward", 2).checkpoint
    done = run_command("inspect", source, "--tensors", "--tree", "--stats", "-q", columns=columns)
    assert done.code == 0 and not lines_that_are_too_long(done.out, columns)[1:]
    assert not [line for line in done.out.split("\n") if line != line.rstrip()]
