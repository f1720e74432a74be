"""``verify FOLDER`` uses the lists of digests that ``checksum FILE`` wrote beside single files of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import FormatError
from ckpt_tools.verification.report import Aspect

SUFFIX = ".digests.json"
ONE = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3)}
OTHER = {"b.weight": torch.arange(8.0), "b.bias": torch.zeros(2)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def one_safetensors(folder: Path) -> list[Path]:
    save_file(ONE, folder / "model.safetensors")
    return [folder / "model.safetensors"]


def shards(folder: Path) -> list[Path]:
    paths = [folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for path, tensors in zip(paths, (ONE, OTHER), strict=True):
        save_file(tensors, path)
    names = {name: path.name for path, each in zip(paths, (ONE, OTHER), strict=True) for name in each}
    index = {"metadata": {"total_size": 92}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def torch_file(folder: Path) -> list[Path]:
    torch.save(ONE, folder / "pytorch_model.bin")
    return [folder / "pytorch_model.bin"]


def tied(folder: Path) -> list[Path]:
    torch.save({**ONE, "head.weight": ONE["a.weight"]}, folder / "pytorch_model.bin")
    return [folder / "pytorch_model.bin"]


def listed(path: Path) -> int:
    """Write the list of one file, beside it, and count its digests. A shard beside its index is refused."""
    alone = path.parent.parent / f"alone{path.suffix}"
    shutil.copy(path, alone)
    found = ckpt_tools.checksum(alone, overwrite=True)
    Path(f"{alone}{SUFFIX}").replace(f"{path}{SUFFIX}")
    return len(found.digests)


LAYOUTS = (one_safetensors, shards, torch_file, tied)


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """The file again, after a change of its tensors."""
    made = dict(load_file(path) if path.suffix == ".safetensors" else torch.load(path))
    change(made)
    save_file(made, path) if path.suffix == ".safetensors" else torch.save(made, path)


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], Aspect]] = {
    "value": (lambda made: made["a.bias"].add_(1), Aspect.DIGEST),
    "shape": (lambda made: made.update({"a.bias": torch.ones(3, 1)}), Aspect.SHAPE),
    "dtype": (lambda made: made.update({"a.bias": torch.ones(3).half()}), Aspect.DTYPE),
    "more": (lambda made: made.update({"c": torch.ones(3)}), Aspect.UNEXPECTED),
    "less": (lambda made: made.pop("a.bias"), Aspect.MISSING),
}


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_change_is_found_by_the_list_of_the_file(make, folder):
    paths = make(folder)
    assert ckpt_tools.verify(folder).num_digests is None
    count = sum(map(listed, paths))
    report = ckpt_tools.verify(folder)
    assert (report.equal, report.num_digests) == (True, count)
    whole = paths[0].read_bytes()
    for name, (apply, aspect) in CHANGES.items():
        if make is not shards or name not in ("more", "less"):  # the index names what is there
            changed(paths[0], apply)
            assert aspect in {each.aspect for each in ckpt_tools.verify(folder).differences}, name
            paths[0].write_bytes(whole)


@pytest.mark.parametrize("make", LAYOUTS)
def test_both_lists_are_used(make, folder):
    paths = make(folder)
    whole = ckpt_tools.checksum(folder)
    for path in paths:
        listed(path)
    assert ckpt_tools.verify(folder).num_digests == len(whole.digests)
    changed(paths[0], CHANGES["value"][0])
    assert {str(each.key) for each in ckpt_tools.verify(folder).differences} == {"a.bias"}
    listed(paths[0])  # this one is right now, and that of the folder is not
    assert not ckpt_tools.verify(folder).equal
    ckpt_tools.checksum(folder, overwrite=True)
    assert ckpt_tools.verify(folder).equal
    shutil.copy(paths[0].parent / (paths[0].name + SUFFIX), folder / f"unrelated{SUFFIX}")
    assert ckpt_tools.verify(folder).equal


def test_a_list_of_one_of_two_shards_says_nothing_of_the_other(folder):
    first, second = shards(folder)
    listed(first)
    changed(second, lambda made: made["b.bias"].add_(1))
    assert ckpt_tools.verify(folder).equal
    changed(first, CHANGES["value"][0])
    assert not ckpt_tools.verify(folder).equal


def test_a_damaged_list_is_an_error(folder):
    one_safetensors(folder)
    (folder / f"model.safetensors{SUFFIX}").write_text("{}")
    with pytest.raises(FormatError, match="not a list of digests"):
        ckpt_tools.verify(folder)
