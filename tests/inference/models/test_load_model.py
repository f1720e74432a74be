"""``inference.load_model`` as a user's own code calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

import ckpt_tools
import inference
from ckpt_tools.errors import CkptError, FormatError, SourceNotFoundError, UnsupportedError, UsageError
from ckpt_tools.transfer.tensor_reader import TensorReader
from inference.models.architectures import Architecture
from inference.models.predictor import load_predictor
from tests.inference.models.test_loading import assert_same_weights

ROOT = Path(inference.__file__).parent.parent

PROGRAM = """
import sys, {package}
assert "torch" not in sys.modules
print(type({package}.load_model(sys.argv[1])).__name__, {package}.load_predictor(sys.argv[1]).max_batch)
"""


@pytest.mark.extended
@pytest.mark.parametrize("package", ["inference", "ckpt_tools_inference"])
def test_it_stands_at_the_top_of_the_package_which_is_imported_without_torch(package, forms, tmp_path):
    """The second is what an installed wheel calls it."""
    for name in ("training", "inference"):
        (tmp_path / f"ckpt_tools_{name}").symlink_to(ROOT / name)
    paths = [str(tmp_path), str(ROOT if package == "inference" else _only_ckpt_tools(tmp_path))]
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(package=package), str(forms / "model.pt")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "VisionTransformer 30\n"), done.stderr


def _only_ckpt_tools(folder: Path) -> Path:
    (folder / "only").mkdir()
    (folder / "only" / "ckpt_tools").symlink_to(ROOT / "ckpt_tools")
    return folder / "only"


def test_each_byte_of_a_weight_is_read_once(forms, weights, tmp_path, monkeypatch):
    ckpt_tools.convert(forms / "model.pt", tmp_path / "run", to="dcp", world_size=3)
    counted, read = [], TensorReader.read

    def counting(
        reader: TensorReader, entry: Any, box: Any, shape: Any, start: int, stop: int, out: memoryview
    ) -> None:
        counted.append(len(out))
        read(reader, entry, box, shape, start, stop, out)

    monkeypatch.setattr(TensorReader, "read", counting)
    assert_same_weights(inference.load_model(tmp_path / "run"), weights)
    assert sum(counted) == sum(each.nbytes for each in weights.values())


def test_all_that_does_not_fit_is_listed(tmp_path):
    save_file(
        {"0.weight": torch.zeros(2, 3), "0.scale": torch.zeros(2), "1.weight": torch.zeros(1)},
        tmp_path / "w.safetensors",
    )
    with pytest.raises(FormatError) as caught:
        inference.load_model(tmp_path / "w.safetensors", model=nn.Sequential(nn.Linear(4, 2)))
    assert caught.value.message.endswith(
        "the checkpoint does not fit the model: "
        "shape mismatch: 0.weight (checkpoint [2, 3], model [2, 4]); "
        "not in the checkpoint: 0.bias; not in the model: 0.scale, 1.weight"
    )


# --- names


def linear_at(folder: Path, prefix: str, **more: Tensor) -> tuple[nn.Linear, Path]:
    """A file of a module as if it were a part of another one."""
    module = nn.Linear(3, 2)
    torch.save({f"{prefix}{name}": each for name, each in module.state_dict().items()} | more, folder / "model.pt")
    return module, folder / "model.pt"


def test_a_prefix_is_taken_off(tmp_path):
    own, path = linear_at(tmp_path, "net.")
    with pytest.raises(FormatError, match=r"not in the model: net\.weight, net\.bias"):
        inference.load_model(path, model=nn.Linear(3, 2))
    loaded = inference.load_model(path, model=nn.Linear(3, 2), rename=r"^net\.=")  # type: ignore[arg-type]
    assert loaded.weight.equal(own.weight)
    assert not loaded.training


def test_names_are_mapped_and_parts_are_chosen(tmp_path):
    own, path = linear_at(tmp_path, "student.", **{"teacher.weight": torch.zeros(9)})
    (tmp_path / "map.json").write_text(json.dumps({"student.weight": "weight", "student.bias": "bias"}))
    for chosen in ({"include": ["student.*"]}, {"exclude": ["teacher.*"]}):
        loaded = inference.load_model(path, model=nn.Linear(3, 2), key_map=tmp_path / "map.json", **chosen)  # type: ignore[arg-type]
        assert loaded.bias.equal(own.bias)


def test_a_recipe_cuts_tensors(tmp_path):
    own, path = linear_at(tmp_path, "")
    rows = '{left = {"weight" = "(top:1 rest:1) W"}, right = {"top.weight" = "top W", "rest.weight" = "rest W"}}'
    biases = '{left = {"bias" = "(top:1 rest:1)"}, right = {"top.bias" = "top", "rest.bias" = "rest"}}'
    (tmp_path / "rows.toml").write_text(f"map = [{rows}, {biases}]")
    model = nn.ModuleDict({"top": nn.Linear(3, 1), "rest": nn.Linear(3, 1)})
    loaded = inference.load_model(path, model=model, recipe=tmp_path / "rows.toml")
    assert torch.equal(torch.cat([loaded["top"].weight, loaded["rest"].weight]), own.weight)
    torch.save(loaded.state_dict(), tmp_path / "cut.pt")
    back = inference.load_model(
        tmp_path / "cut.pt", model=nn.Linear(3, 2), recipe=str(tmp_path / "rows.toml"), inverse=True
    )
    assert back.bias.equal(own.bias)


def test_a_part_of_a_tree_is_chosen(tmp_path):
    own, other = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save({"model": own.state_dict(), "ema": other.state_dict()}, tmp_path / "model.pt")
    assert inference.load_model(tmp_path / "model.pt", model=nn.Linear(3, 2), model_key="ema").weight.equal(
        other.weight
    )


def test_a_rule_that_changes_no_name_is_refused(tmp_path):
    _, path = linear_at(tmp_path, "")
    with pytest.raises(CkptError, match=r"rename='\^net=' matches no"):
        inference.load_model(path, model=nn.Linear(3, 2), rename=["^net="])


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
    loaded = inference.load_model(tmp_path / "model.pt", model=empty, dtype=torch.bfloat16)
    assert loaded is empty
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded.head.weight.equal(own.head.weight.bfloat16())
    assert loaded.count.device.type == "cpu"


def test_a_table_that_no_checkpoint_has_is_not_made_up(tmp_path):
    class WithTable(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("table", torch.arange(3), persistent=False)

    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        empty = WithTable()
    with pytest.raises(UsageError, match="the model's table table is on the meta device, and no checkpoint has it"):
        inference.load_model(tmp_path / "model.pt", model=empty)


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match="the architecture needs the package timm, which is not installed"):
        Architecture.parse("timm:resnet18").build(None)


# --- programs


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A model, and a folder with it as ``model.pt2`` and as TorchScript, ``script.pt``."""
    folder = tmp_path_factory.mktemp("programs")
    own = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    torch.export.save(torch.export.export(own, (torch.ones(5, 3),)), folder / "model.pt2")
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.jit.script(own).save(folder / "script.pt")
    return own, folder


@pytest.mark.parametrize(("kind", "file"), [("torch.export", "model.pt2"), ("torchscript", "script.pt")])
def test_a_program_is_loaded_by_its_name(kind, file, program):
    own, folder = program
    with fsspec.open(f"memory://programs/{file}", "wb") as remote:
        remote.write((folder / file).read_bytes())
    images = torch.randn(5, 3)
    for url in (folder / file, f"memory://programs/{file}"):
        assert inference.load_model(url, model=kind)(images).equal(own(images))


def test_a_program_that_is_not_asked_for_is_not_run(program):
    _, folder = program
    with pytest.raises(
        UsageError, match=r"program of torch\.export, and to load it is to run it; .*name torch\.export"
    ):
        inference.load_model(folder / "model.pt2")
    with pytest.raises(UnsupportedError, match=r"TorchScript archive.*; or name torchscript as its architecture"):
        inference.load_model(folder / "script.pt")
    with pytest.raises(UsageError, match="to load it is to run it"):
        load_predictor(folder / "model.pt2", architecture="hf")


@pytest.mark.parametrize(("kind", "file"), [("torch.export", "model.pt2"), ("torchscript", "script.pt")])
def test_what_is_not_that_program_is_named(kind, file, program, tmp_path, capfd):
    whole = (program[1] / file).read_bytes()
    torch.save({"a": torch.ones(1)}, tmp_path / "plain.pt")
    for data in (b"", b"PK\3\4", whole[: len(whole) // 2], (tmp_path / "plain.pt").read_bytes()):
        (tmp_path / file).write_bytes(data)
        with pytest.raises(FormatError, match=f"{file} is not .*, or is damaged"):
            inference.load_model(tmp_path / file, model=kind)
    with pytest.raises(SourceNotFoundError, match=r"there is no file .*none\.pt2"):
        inference.load_model(tmp_path / "none.pt2", model=kind)
    with pytest.raises(UsageError, match="has its own names and dtypes; leave out dtype"):
        inference.load_model(program[1] / file, model=kind, dtype=torch.float16)
    assert "Traceback" not in capfd.readouterr().err
