from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import checkpoint

from ckpt_tools.errors import CkptError, FormatError, SourceNotFoundError, UnsafeError
from inference.loading import load_model
from tests.inference.conftest import FORMS, Form


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bits(form: Form, forms: Path, weights: dict[str, Tensor]) -> None:
    model = load_model(forms / form)
    assert not model.training
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name].view(torch.int32), weights[name].view(torch.int32)) for name in weights)


Weights = dict[str, Tensor]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weights: weights.pop("encoder.ln.bias"), r"lacks tensor encoder\.ln\.bias \(1 in all\)"),
        (lambda weights: weights.update(extra=torch.zeros(1)), r"has the unknown tensor extra"),
        (lambda weights: weights.update({"encoder.ln.bias": torch.zeros(3)}), r"of shape \[3\] where .* \[128\]"),
    ],
)
def test_names_and_shapes_are_strict(
    change: Callable[[Weights], object], sentence: str, weights: Weights, tmp_path: Path
) -> None:
    changed = dict(weights)
    change(changed)
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=sentence):
        load_model(tmp_path / "model.safetensors")


class _RunsOnLoad:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran-by-loading",)


def test_a_pickle_that_would_run_code_is_refused_and_not_run(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(weights | {"extra": _RunsOnLoad()}, "model.pt")
    with pytest.raises(FormatError, match="could run code"):
        load_model(Path("model.pt"))
    assert not Path("ran-by-loading").exists()


def test_a_nested_checkpoint_is_told_to_be_consolidated(weights: Weights, tmp_path: Path) -> None:
    torch.save({"model": weights}, tmp_path / "model.pt")
    with pytest.raises(
        FormatError,
        match=r"not a flat state dict of tensors; .* ckpt-tools consolidate .*/model\.pt model\.safetensors$",
    ):
        load_model(tmp_path / "model.pt")


def test_a_sharded_checkpoint_is_told_to_be_consolidated(weights: Weights, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save({"model": dict(weights)}, checkpoint_id=tmp_path / "epoch 1", no_dist=True)
    with pytest.raises(FormatError) as raised:
        load_model(tmp_path / "epoch 1")
    assert "is a checkpoint (dcp), not a model file" in str(raised.value)
    command = str(raised.value).partition("first: ")[2]
    subprocess.run([sys.executable, "-m", "ckpt_tools", *shlex.split(command)[1:]], check=True, cwd=tmp_path)
    assert load_model(tmp_path / "model.safetensors").state_dict().keys() == weights.keys()


@pytest.mark.parametrize("form", ["model.safetensors", "model.pt"])
def test_a_truncated_file_is_refused(form: Form, forms: Path, tmp_path: Path) -> None:
    (tmp_path / form).write_bytes((forms / form).read_bytes()[:-1000])
    with pytest.raises(FormatError, match="is not a whole"):
        load_model(tmp_path / form)


@pytest.fixture
def sharded(forms: Path, tmp_path: Path) -> Path:
    return shutil.copytree(forms / "sharded", tmp_path / "sharded")


def point_index(folder: Path, name: str, file: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", ""])
def test_an_index_cannot_point_out_of_its_folder(file: str, sharded: Path) -> None:
    point_index(sharded, "encoder.ln.bias", file)
    with pytest.raises(UnsafeError, match="not a file in its own folder"):
        load_model(sharded)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    point_index(sharded, "class_token", "model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="does not hold the tensors"):
        load_model(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SourceNotFoundError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_model(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(text: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json"):
        load_model(sharded)


@pytest.mark.parametrize("name", ["none.safetensors", "empty", "model.onnx"])
def test_what_is_no_model_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.onnx").touch()
    with pytest.raises(CkptError, match=name):
        load_model(tmp_path / name)
