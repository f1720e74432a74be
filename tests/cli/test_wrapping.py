"""Text wraps at words, on terminals of every width; a pipe gets one line a sentence."""

import re
import shutil

import pytest
import torch

import ckpt_tools
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


LONG = "encoder.layers.encoder_layer_6.self_attention.out_proj.weight"


def test_tensors_fit_the_terminal(tmp_path):
    torch.save({LONG: torch.ones(4, 5), "a." * 60 + "b": torch.ones(2)}, tmp_path / "m.pt")
    for more in ([], ["--all"]):
        text = run_command("inspect", tmp_path / "m.pt", "--tensors", *more, columns=60).out
        lines = text.split("\n")
        assert LONG in lines and "a." * 60 + "b" in lines
        assert not [line for line in lines_that_are_too_long(text, 60) if "/m.pt" not in line]
