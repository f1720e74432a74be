from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import checkpoint

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, UnsafeError
from inference.models.loading import load_model
from tests.inference.conftest import FORMS

Weights = dict[str, Tensor]


def assert_same_weights(model: torch.nn.Module, weights: Weights) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name].view(torch.int32), weights[name].view(torch.int32)) for name in weights)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bits(form, forms, weights):
    model = load_model(forms / form)
    assert not model.training
    assert_same_weights(model, weights)


def test_no_random_numbers_are_drawn_for_what_is_read(tmp_path):
    """For a model of 1 GB that would take longer than to read it."""
    from torchvision.models import resnet18

    resnet = resnet18(weights=None)
    torch.save(resnet.state_dict(), tmp_path / "resnet.pt")
    before = torch.get_rng_state()
    loaded = load_model(tmp_path / "resnet.pt", model="torchvision:resnet18")
    assert torch.get_rng_state().equal(before)
    assert all(loaded.state_dict()[name].equal(each) for name, each in resnet.state_dict().items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weights: weights.pop("encoder.ln.bias"), r"not in the checkpoint: encoder\.ln\.bias"),
        (lambda weights: weights.update(extra=torch.zeros(1)), r"not in the model: extra"),
        (
            lambda weights: weights.update({"encoder.ln.bias": torch.zeros(3)}),
            r"shape mismatch: encoder\.ln\.bias \(checkpoint \[3\], model \[128\]\)",
        ),
    ],
)
def test_names_and_shapes_are_strict(change, sentence, weights, tmp_path):
    changed = dict(weights)
    change(changed)
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=sentence):
        load_model(tmp_path / "model.safetensors")


class _RunsOnLoad:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran-by-loading",)


def test_no_code_of_a_pickle_is_run(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(weights | {"extra": _RunsOnLoad()}, "model.pt")
    assert_same_weights(load_model(Path("model.pt")), weights)
    assert not Path("ran-by-loading").exists()


def test_a_nested_checkpoint_is_loaded(weights, tmp_path):
    torch.save({"model": weights, "epoch": 3}, tmp_path / "model.pt")
    assert_same_weights(load_model(tmp_path / "model.pt"), weights)


@pytest.fixture(scope="module")
def dcp(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp") / "epoch 1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save({"model": dict(weights)}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("to", ["dcp", "zero1", "zero2", "zero3", "universal"])
def test_a_sharded_checkpoint_is_loaded_directly(to, dcp, weights, tmp_path):
    ckpt_tools.convert(dcp, tmp_path / "out", to=to, world_size=None if to == "universal" else 3)
    assert_same_weights(load_model(tmp_path / "out"), weights)


def test_a_remote_checkpoint_is_loaded(dcp, weights):
    ckpt_tools.convert(dcp, "memory://inference/model", to="dcp", world_size=2)
    assert_same_weights(load_model("memory://inference/model"), weights)


@pytest.mark.parametrize("form", ["model.safetensors", "model.pt"])
def test_a_truncated_file_is_refused(form, forms, tmp_path):
    (tmp_path / form).write_bytes((forms / form).read_bytes()[:-1000])
    with pytest.raises(FormatError, match=form):
        load_model(tmp_path / form)


@pytest.fixture
def sharded(forms, tmp_path):
    return shutil.copytree(forms / "sharded", tmp_path / "sharded")


def point_index(folder: Path, name: str, file: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", ""])
def test_an_index_cannot_point_out_of_its_folder(file, sharded):
    point_index(sharded, "encoder.ln.bias", file)
    with pytest.raises(UnsafeError, match="outside of itself; it was not opened"):
        load_model(sharded)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded):
    point_index(sharded, "class_token", "model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="class_token"):
        load_model(sharded)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CkptError, match=r"model-00002-of-00002\.safetensors"):
        load_model(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(text, sharded):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json"):
        load_model(sharded)


@pytest.mark.parametrize("name", ["none.safetensors", "empty", "model.onnx"])
def test_what_is_no_model_is_named(name, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.onnx").touch()
    with pytest.raises(CkptError, match=name):
        load_model(tmp_path / name)
