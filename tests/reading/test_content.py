"""Files whose name does not tell what they are: each format that can be named reads its own, and refuses all others."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import CkptError
from ckpt_tools.formats.index import all_formats
from fixtures.corpus import make
from tests.support.every_verb import refusal

READERS = {"torch": "torch", "torch before 1.6": "torch", "safetensors": "safetensors", "npz": "npz", "gguf": "gguf"}
KINDS = [*READERS, "a text", "an empty file"]
FORMATS = [each.name for each in all_formats() if each.reads]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, state = tmp_path_factory.mktemp("files"), {"a.weight": torch.ones(2, 2)}
    torch.save(state, folder / "torch.pt")
    torch.save(state, folder / "torch before 1.6.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "safetensors.safetensors")
    np.savez(folder / "npz.npz", **{"a.weight": np.ones((2, 2), np.float32)})
    ckpt_tools.convert(folder / "torch.pt", folder / "gguf.gguf")
    contents = {path.stem: path.read_bytes() for path in folder.iterdir()}
    return {**contents, "a text": b"nothing\n" * 20, "an empty file": b""}


@pytest.mark.parametrize("from_", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_an_ending(kind, from_, files, tmp_path):
    (tmp_path / "blob").write_bytes(files[kind])
    reader = READERS.get(kind)
    if from_ == reader or (from_, reader) == ("peft", "safetensors"):
        assert list(ckpt_tools.open(tmp_path / "blob", from_=from_)) == ["a.weight"]
        ckpt_tools.convert(tmp_path / "blob", tmp_path / "out.pt", from_=from_)
        assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["a.weight"], torch.ones(2, 2))
        return
    code, sentence = refusal(tmp_path / "blob", tmp_path / "out", from_=from_)
    assert code in (3, 4) and "0 tensors" not in sentence


@pytest.mark.parametrize("from_", [None, *FORMATS])
def test_a_torch_file_with_the_name_of_lightnings(from_, files, tmp_path):
    (tmp_path / "meta.pt").write_bytes(files["torch"])
    if from_ in (None, "torch"):
        assert ckpt_tools.inspect(tmp_path / "meta.pt", from_=from_).num_tensors == 1
        return
    assert refusal(tmp_path / "meta.pt", tmp_path / "out", from_=from_)[0] in (3, 4)


def test_lightnings_own_is_one_file_of_a_checkpoint(tmp_path):
    shutil.copytree(make("lightning-model-parallel").folder, tmp_path / "run")
    (meta,) = (tmp_path / "run").rglob("meta.pt")
    assert "this is one file of a checkpoint" in refusal(meta, tmp_path / "out")[1]


def test_a_folder_without_a_file_of_the_named_format(tmp_path):
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CkptError, match="there is no file of safetensors in"):
        ckpt_tools.inspect(tmp_path, from_="safetensors")


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
PAGE = "\n<!DOCTYPE html><html>Sign in</html>"
ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf", ".npz", "")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("text", "wanted"), [(POINTER, "it is a Git LFS pointer"), (PAGE, "it is a page of HTML")])
def test_what_a_download_left_in_the_place_of_a_file(text, wanted, ending, tmp_path):
    (tmp_path / f"model{ending}").write_text(text)
    for src in (tmp_path, tmp_path / f"model{ending}"):
        assert wanted in refusal(src, tmp_path.parent / f"{tmp_path.name}-out")[1]


def test_pointers_in_the_place_of_shards(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    (tmp_path / "x.safetensors").write_text(POINTER)
    assert "x.safetensors: it is a Git LFS pointer" in refusal(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")[1]


@pytest.mark.parametrize("ending", [".safetensors", ".gguf", ".npz", ""])
@pytest.mark.parametrize("kind", ["torch", "torch before 1.6"])
def test_a_torch_file_under_another_name(kind, ending, files, tmp_path):
    (tmp_path / f"model{ending}").write_bytes(files[kind])
    wanted = "its content is that of torch.save, but its name is not; add from_='torch'"
    assert wanted in refusal(tmp_path / f"model{ending}", tmp_path / "out")[1]
    assert ckpt_tools.inspect(tmp_path / f"model{ending}", from_="torch").num_tensors == 1


def test_two_complete_sets_of_shards(tmp_path):
    (tmp_path / "two").mkdir()
    for total in (2, 3):
        for number in range(total):
            name = f"model-{number + 1:05d}-of-{total:05d}.safetensors"
            save_file({f"m.{number}": torch.ones(2)}, tmp_path / "two" / name)
    sentence = refusal(tmp_path / "two", tmp_path / "out")[1]
    assert "2 complete sets of shards (of 2, of 3) and no index: name one" in sentence
    (tmp_path / "two" / "model-00002-of-00003.safetensors").unlink()
    assert "are missing" in refusal(tmp_path / "two", tmp_path / "out")[1]
