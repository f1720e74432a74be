"""Every checkpoint kind, by 1 to 4 real processes, to safetensors and `.pt`: the bits the framework itself gathered."""

from __future__ import annotations

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
from tests.support.sweep import swept
from tests.support.truth import Truth, assert_same_bits, dtype_of

TRAINED = [f for f in fixtures.CORE if f.kind.startswith(("fsdp2", "zero"))]


def expected(truth: Truth) -> dict[str, np.ndarray]:
    return truth.best_weights()


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


@pytest.mark.parametrize("suffix", READ)
@pytest.mark.parametrize("fixture", swept(TRAINED))
def test_weights_have_the_bits_the_framework_gathered(fixture, suffix, tmp_path, checkpoint):
    made = checkpoint(fixture.kind, fixture.case, fixture.world_size)
    target = tmp_path / f"model{suffix}"
    ckpt_tools.convert(made.checkpoint, target)
    truth = Truth.load(made.root)
    stored = {name for name in truth.kinds if fixture.kind != "fsdp2-hf" or name not in truth.facts["ties"]}
    assert_same_bits({name: t for name, t in expected(truth).items() if name in stored}, READ[suffix](target))
    assert ckpt_tools.verify(made.checkpoint, target).equal


@pytest.mark.parametrize("kind", ["fsdp2", "zero2-bf16", "zero3-fp16"])
def test_model_copies_have_the_models_own_bits(kind, tmp_path, checkpoint):
    made = checkpoint(kind, "awkward", 3)
    ckpt_tools.convert(made.checkpoint, tmp_path / "m.safetensors", weights="model")
    assert_same_bits(Truth.load(made.root).slot("weight"), from_safetensors(tmp_path / "m.safetensors"))


def test_a_written_zip_passes_the_test_of_any_zip_tool(tmp_path, checkpoint):
    made = checkpoint("zero3-fp32", "awkward", 3)
    ckpt_tools.convert(made.checkpoint, tmp_path / "m.pt", workers=2)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None
    assert ckpt_tools.verify(tmp_path / "m.pt").equal


def test_ties_share_one_storage(tmp_path, checkpoint):
    made = checkpoint("zero2-fp32", "awkward", 2)
    ckpt_tools.convert(made.checkpoint, tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    (alias, owner), *_ = Truth.load(made.root).facts["ties"].items()
    assert found[alias].data_ptr() == found[owner].data_ptr()


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_shards_of_a_folder_are_one_model(to, tmp_path, checkpoint):
    made = checkpoint("zero1-bf16", "awkward", 4)
    report = ckpt_tools.convert(made.checkpoint, tmp_path / "m", to=to, max_shard_size=600)
    assert len(report.plan.files) > 3
    assert ckpt_tools.verify(made.checkpoint, tmp_path / "m").equal


def halved(tensor: torch.Tensor) -> torch.Tensor:
    """torch's own cast; of the two NaNs that its kernels make, the scalar one's (see ``casts``)."""
    half = tensor.bfloat16()
    half.view(torch.int16)[half.isnan()] = 0x7FC0
    return half


def test_the_cast_is_that_of_torch(tmp_path, checkpoint):
    made = checkpoint("zero3-fp32", "awkward", 2)
    ckpt_tools.convert(made.checkpoint, tmp_path / "whole.pt")
    ckpt_tools.convert(made.checkpoint, tmp_path / "half.pt", dtype="bfloat16")
    whole, half = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "half.pt"))
    kinds = Truth.load(made.root).kinds
    wanted = {
        name: halved(tensor) if kinds[name] == "parameter" and tensor.is_floating_point() else tensor
        for name, tensor in whole.items()
    }
    assert_same_bits({k: bits(v) for k, v in wanted.items()}, {k: bits(v) for k, v in half.items()})
    assert ckpt_tools.verify(made.checkpoint, tmp_path / "half.pt", dtype="bfloat16").equal
    assert not ckpt_tools.verify(made.checkpoint, tmp_path / "half.pt").equal


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
