"""Judges of a folder as the hub has it, against a model that was trained: the loader of transformers, its logits, and
what `save_pretrained` of that model wrote."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from fixtures.hub_runs import Family
from fixtures.truth import raw_bytes

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""By name: dtype, shape and bytes."""


def assert_is_hub_folder(family: Family, folder: Path, trained: Path) -> None:
    """`from_pretrained` finds all and no more, computes the logits of the trained model, and its tensors are those of
    `save_pretrained`."""
    assert_loads(family, folder, trained)
    assert_same_tensors(tensors_of(folder), tensors_of(trained / "pretrained"))


def assert_loads(family: Family, folder: Path, trained: Path) -> None:
    """`from_pretrained` finds all and no more, and computes the logits of the trained model."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = getattr(transformers, architecture).from_pretrained(folder, **options)
    assert not any(info.values()), info
    for each in (*model.parameters(), *model.buffers()):
        each.data = each.data.clone()
    threads = torch.get_num_threads()
    # As in a rank: products of matrices differ in the last bit with threads, and with the alignment of their factors.
    torch.set_num_threads(1)
    try:
        logits = family.logits(model.eval())
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(logits, torch.load(trained / "logits.pt"))


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert raw_bytes(found) == raw_bytes(wanted), f"logits differ by up to {(found - wanted).abs().max():g}"


def assert_same_values(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same tensors bit for bit; wider ones after a cast."""
    cast = {name: tensor.to(wanted[name].dtype) if name in wanted else tensor for name, tensor in found.items()}
    assert_same_tensors(_described(cast), _described(wanted))


def _described(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: (str(each.dtype), tuple(each.shape), raw_bytes(each)) for name, each in tensors.items()}


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a folder's safetensors files, read by the library itself."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded = load_file(path)
        assert not found.keys() & loaded.keys(), f"{path.name} has tensors of another file"
        found |= loaded
    return _described(found)


def assert_same_tensors(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys(), {
        "missing": sorted(wanted.keys() - found.keys()),
        "left over": sorted(found.keys() - wanted.keys()),
    }
    for name, (dtype, shape, data) in wanted.items():
        assert found[name][:2] == (dtype, shape), (name, found[name][:2], (dtype, shape))
        assert found[name][2] == data, f"{name} has other bytes"
