"""``inference.load_model`` as a user calls it: every form and format gives the same bits, or one sentence."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.nn.functional import linear

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, SourceNotFoundError, UnsafeError, UnsupportedError, UsageError
from ckpt_tools.transfer.tensor_reader import TensorReader
from inference import load_model
from inference.models.predictor import load_predictor
from tests.inference.conftest import FORMS
from tests.support.refusals import refusal_test

INDEX, SECOND = "model.safetensors.index.json", "model-00002-of-00002.safetensors"


def assert_same_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name].view(torch.int32), weights[name].view(torch.int32)) for name in weights)


# --- forms and formats


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bits(form, forms, weights):
    model = load_model(forms / form)
    assert not model.training
    assert_same_weights(model, weights)


@pytest.fixture(scope="module")
def dcp(weights, tmp_path_factory):
    """As torch writes it."""
    folder = tmp_path_factory.mktemp("dcp") / "epoch 1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save({"model": dict(weights)}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("to", ["dcp", "zero3", "universal"])
def test_a_sharded_checkpoint_is_loaded_directly(to, dcp, weights, tmp_path):
    ckpt_tools.convert(dcp, tmp_path / "out", to=to, world_size=None if to == "universal" else 3)
    assert_same_weights(load_model(tmp_path / "out"), weights)


def test_a_remote_checkpoint_is_loaded_and_each_byte_of_a_weight_is_read_once(dcp, weights, monkeypatch):
    ckpt_tools.convert(dcp, "memory://inference/model", to="dcp", world_size=3)
    counted, read = [], TensorReader.read

    def counting(reader: TensorReader, *args: Any) -> None:
        counted.append(len(args[-1]))
        read(reader, *args)

    monkeypatch.setattr(TensorReader, "read", counting)
    assert_same_weights(load_model("memory://inference/model"), weights)
    assert sum(counted) == sum(each.nbytes for each in weights.values())


class _RunsOnLoad:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran-by-loading",)


def test_a_nested_checkpoint_is_loaded_and_no_code_of_a_pickle_is_run(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(weights | {"extra": _RunsOnLoad()}, "model.pt")
    torch.save({"model": weights, "epoch": 3}, "nested.pt")
    for name in ("model.pt", "nested.pt"):
        assert_same_weights(load_model(Path(name)), weights)
    assert not Path("ran-by-loading").exists()


# --- what does not fit


@pytest.fixture
def sharded(forms, tmp_path):
    return shutil.copytree(forms / "sharded", tmp_path / "sharded")


def point_index(folder: Path, name: str, file: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def pointed(name: str, file: str) -> Callable[[Path], None]:
    return lambda folder: point_index(folder, name, file)


def written(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


OUTSIDE = "outside of itself; it was not opened"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        *((pointed("encoder.ln.bias", to), UnsafeError, OUTSIDE) for to in ("../m.pt", "/etc/passwd")),
        (pointed("class_token", SECOND), FormatError, "class_token"),
        (lambda folder: (folder / SECOND).unlink(), CkptError, SECOND),
        *((written(text), FormatError, INDEX) for text in ("[]", '{"weight_map": {"a": 1}}')),
    ],
)
def test_shards_that_are_not_as_the_index_says_are_refused(change, error, words, sharded):
    change(sharded)
    with pytest.raises(error, match=words):
        load_model(sharded)


@pytest.mark.parametrize("form", ["model.safetensors", "model.pt"])
def test_a_truncated_file_is_refused(form, forms, tmp_path):
    (tmp_path / form).write_bytes((forms / form).read_bytes()[:-1000])
    with pytest.raises(FormatError, match=form):
        load_model(tmp_path / form)


def of_an_empty(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def load(folder: Path) -> object:
        make(folder / name)
        return load_model(folder / name)

    return load


def unfit(folder: Path) -> object:
    tensors = {"0.weight": torch.zeros(2, 3), "0.scale": torch.zeros(2), "1.weight": torch.zeros(1)}
    save_file(tensors, folder / "w.safetensors")
    return load_model(folder / "w.safetensors", model=nn.Sequential(nn.Linear(4, 2)))


test_what_is_no_model_is_named = refusal_test(
    ("nothing", lambda folder: load_model(folder / "none.safetensors"), SourceNotFoundError, "none.safetensors"),
    ("an empty folder", of_an_empty("empty", Path.mkdir), SourceNotFoundError, "empty"),
    ("an empty file", of_an_empty("model.onnx", Path.touch), UnsupportedError, "model.onnx"),
    (
        "all that does not fit",
        *(unfit, FormatError),
        r"the checkpoint does not fit the model: shape mismatch: 0\.weight \(checkpoint \[2, 3\], model \[2, 4\]\); "
        r"not in the checkpoint: 0\.bias; not in the model: 0\.scale, 1\.weight$",
    ),
)


# --- names


def renamed(folder: Path) -> dict[str, str]:
    (folder / "map.json").write_text(json.dumps({"student.weight": "weight", "student.bias": "bias"}))
    return {"key_map": str(folder / "map.json")}


@pytest.mark.parametrize(
    ("prefix", "mapped", "options"),
    [
        ("net.", False, {"rename": r"^net\.="}),
        ("student.", True, {"include": ["student.*"]}),
        ("student.", True, {"exclude": ["teacher.*"]}),
    ],
)
def test_names_are_changed_and_parts_are_chosen(prefix, mapped, options, tmp_path):
    """In a file of a module as if it were a part of another one."""
    own, path = nn.Linear(3, 2), tmp_path / "model.pt"
    held = {f"{prefix}{name}": each for name, each in own.state_dict().items()}
    torch.save(held | ({"teacher.weight": torch.zeros(9)} if mapped else {}), path)
    with pytest.raises(FormatError, match=rf"not in the model: {prefix}weight, {prefix}bias"):
        load_model(path, model=nn.Linear(3, 2))
    loaded = load_model(path, model=nn.Linear(3, 2), **options, **(renamed(tmp_path) if mapped else {}))
    assert loaded.weight.equal(own.weight) and loaded.bias.equal(own.bias)
    assert not loaded.training
    with pytest.raises(CkptError, match=r"rename='\^none=' matches no"):
        load_model(path, model=nn.Linear(3, 2), rename=["^none="])


def test_a_recipe_cuts_tensors(tmp_path):
    own, path = nn.Linear(3, 2), tmp_path / "model.pt"
    torch.save(own.state_dict(), path)
    rows = '{left = {"weight" = "(top:1 rest:1) W"}, right = {"top.weight" = "top W", "rest.weight" = "rest W"}}'
    biases = '{left = {"bias" = "(top:1 rest:1)"}, right = {"top.bias" = "top", "rest.bias" = "rest"}}'
    recipe = tmp_path / "rows.toml"
    recipe.write_text(f"map = [{rows}, {biases}]")
    model = nn.ModuleDict({"top": nn.Linear(3, 1), "rest": nn.Linear(3, 1)})
    loaded = load_model(path, model=model, recipe=recipe)
    assert torch.equal(torch.cat([loaded["top"].weight, loaded["rest"].weight]), own.weight)
    torch.save(loaded.state_dict(), tmp_path / "cut.pt")
    back = load_model(tmp_path / "cut.pt", model=nn.Linear(3, 2), recipe=str(recipe), inverse=True)
    assert back.bias.equal(own.bias)


def test_a_part_of_a_tree_is_chosen(tmp_path):
    own, other = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save({"model": own.state_dict(), "ema": other.state_dict()}, tmp_path / "model.pt")
    loaded = load_model(tmp_path / "model.pt", model=nn.Linear(3, 2), model_key="ema")
    assert loaded.weight.equal(other.weight)


# --- modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.ones(3))

    def forward(self, numbers: Tensor) -> Tensor:
        return linear(self.embedding(numbers), self.head.weight)


def test_a_module_on_the_meta_device_is_filled_and_stays_tied(tmp_path):
    own = Tied()
    torch.save(own.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        empty = Tied()
    loaded = load_model(tmp_path / "model.pt", model=empty, dtype=torch.bfloat16)
    assert loaded is empty
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded.head.weight.equal(own.head.weight.bfloat16())
    assert loaded.count.device.type == "cpu"


# --- programs

KINDS = pytest.mark.parametrize(("kind", "file"), [("torch.export", "model.pt2"), ("torchscript", "script.pt")])


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A model, and a folder with it as ``model.pt2`` and as TorchScript, ``script.pt``."""
    folder = tmp_path_factory.mktemp("programs")
    own = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    torch.export.save(torch.export.export(own, (torch.ones(5, 3),)), folder / "model.pt2")
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.jit.script(own).save(folder / "script.pt")
    return own, folder


@KINDS
def test_a_program_is_loaded_by_its_name(kind, file, program):
    own, folder = program
    with fsspec.open(f"memory://programs/{file}", "wb") as remote:
        remote.write((folder / file).read_bytes())
    images = torch.randn(5, 3)
    for url in (folder / file, f"memory://programs/{file}"):
        assert load_model(url, model=kind)(images).equal(own(images))


def test_a_program_that_is_not_asked_for_is_not_run(program):
    _, folder = program
    told = r"program of torch\.export, and to load it is to run it; .*name torch\.export"
    with pytest.raises(UsageError, match=told):
        load_model(folder / "model.pt2")
    with pytest.raises(UnsupportedError, match=r"TorchScript archive.*; or name torchscript as its architecture"):
        load_model(folder / "script.pt")
    with pytest.raises(UsageError, match="to load it is to run it"):
        load_predictor(folder / "model.pt2", architecture="hf")


@KINDS
def test_what_is_not_that_program_is_named(kind, file, program, tmp_path, capfd):
    whole = (program[1] / file).read_bytes()
    torch.save({"a": torch.ones(1)}, tmp_path / "plain.pt")
    for data in (b"", b"PK\3\4", whole[: len(whole) // 2], (tmp_path / "plain.pt").read_bytes()):
        (tmp_path / file).write_bytes(data)
        with pytest.raises(FormatError, match=f"{file} is not .*, or is damaged"):
            load_model(tmp_path / file, model=kind)
    with pytest.raises(SourceNotFoundError, match=r"there is no file .*none\.pt2"):
        load_model(tmp_path / "none.pt2", model=kind)
    with pytest.raises(UsageError, match="has its own names and dtypes; leave out dtype"):
        load_model(program[1] / file, model=kind, dtype=torch.float16)
    assert "Traceback" not in capfd.readouterr().err
