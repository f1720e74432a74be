"""Every checkpoint kind, by 1 to 4 real processes, to safetensors and `.pt`: the bits the framework itself gathered."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

import ckpt_tools
import fixtures
from tests.support.sweep import name_of, tiered
from tests.support.truth import Truth, assert_same_bits, dtype_of


def from_safetensors(path: Path) -> dict[str, np.ndarray]:
    """What the library itself reads, ties under both names."""
    with safetensors.safe_open(path, "pt") as file:
        found = {name: bits(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        ties = {alias: owner for alias, owner in (file.metadata() or {}).items() if owner in found}
    return found | {alias: found[owner] for alias, owner in ties.items()}


def from_torch(path: Path) -> dict[str, np.ndarray]:
    return {name: bits(tensor) for name, tensor in torch.load(path, weights_only=True).items()}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements as the numpy dtype of the same name."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return np.frombuffer(raw, dtype_of(str(tensor.dtype).removeprefix("torch."))).reshape(tuple(tensor.shape))


READ: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {".safetensors": from_safetensors, ".pt": from_torch}
TRAINED = {name_of(f): f for f in fixtures.CORE if f.kind.startswith(("fsdp2", "zero"))}
CASES = [f"{name}{suffix}" for name in TRAINED for suffix in READ]
IN_TEST = ["fsdp2-awkward-2.safetensors", "fsdp2-bf16-awkward-2.pt", "fsdp2-titan-awkward-2.pt",
           "fsdp2-hsdp-awkward-4.safetensors", "zero2-fp16-awkward-2.pt",
           "zero3-bf16-awkward-2.safetensors"]  # fmt: skip
IN_EXTENDED = ["fsdp2-awkward-2.pt", "zero1-bf16acc-awkward-2.safetensors", "fsdp2-hf-awkward-2.safetensors",
               "fsdp2-bf16-awkward-2.safetensors", "fsdp2-pair-awkward-2.safetensors",
               "fsdp2-model-awkward-2.safetensors",
               "fsdp2-accelerate-awkward-2.safetensors", "fsdp2-files-plain-2.safetensors",
               "fsdp2-tp-plain-4.safetensors", "fsdp2-scalar-1.safetensors",
               "zero1-bf16-awkward-2.safetensors", "zero1-fp16-awkward-2.pt",
               "zero2-bf16-awkward-2.safetensors", "zero2-fp32-lone-3.safetensors",
               "zero2-fp32-empty-2.safetensors", "zero3-fp32-awkward-4.safetensors",
               "zero3-fp16-awkward-2.safetensors", "zero3-fp32-sub-awkward-2.safetensors",
               "zero3-fp32-sgd-2.safetensors"]  # fmt: skip
"""Each kind, each of the peculiar cases, and each world size."""


@pytest.mark.parametrize("case", tiered(CASES, test=IN_TEST, extended=IN_EXTENDED))
def test_weights_have_the_bits_the_framework_gathered(case, tmp_path, checkpoint):
    name, dot, suffix = case.rpartition(".")
    fixture = TRAINED[name]
    made = checkpoint(fixture.kind, fixture.case, fixture.world_size)
    target = tmp_path / f"model.{suffix}"
    ckpt_tools.convert(made.checkpoint, target)
    truth = Truth.load(made.root)
    stored = {name for name in truth.kinds if fixture.kind != "fsdp2-hf" or name not in truth.facts["ties"]}
    expected = {name: tensor for name, tensor in truth.best_weights().items() if name in stored}
    assert_same_bits(expected, READ[dot + suffix](target))
    assert ckpt_tools.verify(made.checkpoint, target).equal


@pytest.mark.parametrize("kind", ["zero2-bf16", pytest.param("zero3-fp16", marks=pytest.mark.extended)])
def test_model_copies_have_the_models_own_bits(kind, tmp_path, checkpoint):
    made = checkpoint(kind, "awkward", 3)
    ckpt_tools.convert(made.checkpoint, tmp_path / "m.safetensors", weights="model")
    assert_same_bits(Truth.load(made.root).slot("weight"), from_safetensors(tmp_path / "m.safetensors"))


def test_a_written_zip_is_whole_and_ties_share_one_storage(tmp_path, checkpoint):
    made = checkpoint("zero3-fp32", "awkward", 2)
    ckpt_tools.convert(made.checkpoint, tmp_path / "m.pt", workers=2)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None
    assert ckpt_tools.verify(tmp_path / "m.pt").equal
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    (alias, owner), *_ = Truth.load(made.root).facts["ties"].items()
    assert found[alias].data_ptr() == found[owner].data_ptr()


def test_names_are_chosen_and_rewritten(tmp_path, checkpoint):
    made = checkpoint("fsdp2", "plain", 2)
    names = sorted(Truth.load(made.root).slot("weight"))
    options: dict[str, Any] = {"include": [names[0], names[-1]], "rename": [r"^=net.", r"weight$=w"]}
    ckpt_tools.convert(made.checkpoint, tmp_path / "m.safetensors", **options)
    wanted = {f"net.{name}".replace("weight", "w") for name in (names[0], names[-1])}
    assert set(from_safetensors(tmp_path / "m.safetensors")) == wanted
    assert ckpt_tools.verify(made.checkpoint, tmp_path / "m.safetensors", **options).equal


def test_a_file_saved_without_checksums_is_read_and_whole(tmp_path):
    wanted = {"a": torch.arange(10.0)}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(wanted, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same_bits({"a": bits(wanted["a"])}, {"a": ckpt_tools.open(tmp_path / "m.pt")["a"][...]})
    assert ckpt_tools.verify(tmp_path / "m.pt").equal
