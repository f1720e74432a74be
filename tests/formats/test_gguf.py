"""GGUF against llama.cpp's own library, and what is refused."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import IncompleteError, MalformedError, SeveralCheckpointsError, UnsupportedError, UsageError
from ckpt_tools.formats.gguf.header import DTYPES, QUANTIZED
from fixtures.corpus import make


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    reader = GGUFReader(path)
    return {
        each.name: (each.tensor_type.name, tuple(reversed(each.shape.tolist())), each.data.tobytes())
        for each in reader.tensors
    }


def test_types_are_those_of_the_library():
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: size for number, size in sizes.items() if number not in DTYPES} == QUANTIZED
    assert {number: sizes[number][2] for number in DTYPES} == {
        number: dtype.item_bytes for number, dtype in DTYPES.items()
    }


def test_the_library_reads_what_is_written(tmp_path):
    """Every type, 0-d to 4-d, no elements, and lengths that need padding."""
    kinds = (
        ("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("F64", torch.float64),
        ("I8", torch.int8), ("I16", torch.int16), ("I32", torch.int32), ("I64", torch.int64),
    )  # fmt: skip
    shapes = [(), (3,), (2, 5), (2, 3, 5), (2, 1, 3, 7), (1, 33), (4, 2), (7,)]
    tensors = {
        f"t.{name}": (torch.randn(shape) * 40).to(dtype) for (name, dtype), shape in zip(kinds, shapes, strict=True)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    report = ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / "model.gguf")
    found = read(tmp_path / "model.gguf")
    assert [note.what for note in report.plan.notes] == ["general.architecture", "hyperparameters and vocabulary"]
    assert found.keys() == tensors.keys()
    for (name, _), tensor in zip(kinds, tensors.values(), strict=True):
        kind, shape, data = found[f"t.{name}"]
        assert (kind, shape) == (name, tuple(tensor.shape))
        assert data == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_key_values_stay_byte_for_byte(tmp_path):
    """Also on the way through a torch file."""
    source, same = make("gguf").source, tmp_path / "same.gguf"
    ckpt_tools.convert(source, same)
    assert same.read_bytes() == source.read_bytes()
    ckpt_tools.convert(source, tmp_path / "all.pt", state="all")
    assert ckpt_tools.inspect(tmp_path / "all.pt").extras["gguf"]["general.name"] == ["string", "tiny"]
    ckpt_tools.convert(tmp_path / "all.pt", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()
    same.rename(tmp_path / "blob")
    assert ckpt_tools.inspect(tmp_path / "blob", from_="gguf").num_tensors == 4


def test_the_parts_of_a_model_are_read_as_one(tmp_path):
    made = make("gguf-split")
    ckpt_tools.convert(made.source, tmp_path / "whole.gguf")
    assert read(tmp_path / "whole.gguf").keys() == made.state.weights.keys()
    assert not [name for name in GGUFReader(tmp_path / "whole.gguf").fields if name.startswith("split.")]


def test_a_missing_part_is_an_error(tmp_path):
    [first, _] = sorted(make("gguf-split").source.glob("*.gguf"))
    with pytest.raises(UnsupportedError, match="this is one file of a checkpoint; name its folder"):
        ckpt_tools.inspect(first)
    with pytest.raises(IncompleteError, match="one of 2 parts"):
        ckpt_tools.inspect(first, from_="gguf")
    for name, data in (("a.gguf", first), ("b.gguf", first)):
        (tmp_path / name).write_bytes(data.read_bytes())
    with pytest.raises(IncompleteError, match="missing, or are there twice"):
        ckpt_tools.inspect(tmp_path)
    (tmp_path / "b.gguf").write_bytes(make("gguf").source.read_bytes())
    with pytest.raises(SeveralCheckpointsError, match="name the file"):
        ckpt_tools.inspect(tmp_path)


def test_unquantized_tensors_of_a_quantized_file_can_be_chosen(tmp_path):
    """Or the quantized ones left out by name, also by a pattern that matches nothing else."""
    source, norm = make("gguf-quantized").source, tmp_path / "norm.gguf"
    report = ckpt_tools.convert(source, norm, include=["*norm*"])
    assert read(norm).keys() == {"output_norm.weight"}
    assert "1 quantized tensor" in [note.what for note in report.plan.notes]
    with pytest.raises(UnsupportedError, match=r"quantized.*llama-quantize.*include="):
        ckpt_tools.convert(source, tmp_path / "no.gguf", include=["*weight"])
    with pytest.raises(UnsupportedError) as refused:
        ckpt_tools.inspect(source)
    ckpt_tools.convert(source, norm, exclude=[str(refused.value.key)], overwrite=True)
    assert read(norm).keys() == {"output_norm.weight"}
    with pytest.raises(UsageError, match="matches no tensor"):
        ckpt_tools.convert(source, tmp_path / "no.gguf", exclude=[str(refused.value.key), "nothing"])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"n" * 64: torch.ones(2)}, "at most 63 bytes"),
        ({"w": torch.ones(1, 1, 1, 1, 2)}, "at most 4"),
        ({"w": torch.ones(2, dtype=torch.uint8)}, "does not support uint8"),
    ],
)
def test_what_gguf_cannot_hold_is_refused(tensors, words, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=words):
        ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / "model.gguf")


def _header(*, version: int = 3, values: bytes = b"", num_values: int = 0, infos: bytes = b"", num: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num, num_values) + values + infos


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _info(name: bytes = b"w", dims: tuple[int, ...] = (2,), kind: int = 0, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def _filled(header: bytes, size: int = 32) -> bytes:
    return header + b"\0" * (-len(header) % 32 + size)


def _value(value: bytes) -> bytes:
    return _filled(_header(values=_text(b"k") + value, num_values=1, infos=_info()))


HOSTILE = {
    "another version": (_filled(_header(version=1)), UnsupportedError, "version 1"),
    "big-endian": (b"GGUF\0\0\0\3" + b"\0" * 99, UnsupportedError, "big-endian"),
    "no GGUF": (b"GGML" + b"\0" * 99, MalformedError, "not a GGUF"),
    "a million million tensors": (_filled(_header(num=1 << 40)), IncompleteError, "the file is cut"),
    "a name longer than the file": (_filled(_header(infos=struct.pack("<Q", 1 << 60))), IncompleteError, "cut"),
    "an array of arrays": (_value(struct.pack("<IIQ", 9, 9, 1)), UnsupportedError, "array of arrays"),
    "an array longer than memory": (_value(struct.pack("<IIQ", 9, 0, 1 << 50)), MalformedError, "more than"),
    "a key twice": (_filled(_header(values=(_text(b"k") + struct.pack("<IB", 0, 1)) * 2, num_values=2, infos=_info())),
        MalformedError, "appears twice"),
    "an alignment of 3": (_filled(_header(values=_text(b"general.alignment") + struct.pack("<II", 4, 3), num_values=1,
        infos=_info())), MalformedError, "power of two"),
    "an unknown type": (_filled(_header(infos=_info(kind=99))), UnsupportedError, "type 99"),
    "five dims": (_filled(_header(infos=_info(dims=(1,) * 5))), MalformedError, "5 dims"),
    "too large": (_filled(_header(infos=_info(dims=(1 << 40, 1 << 40)))), MalformedError, "too large"),
    "half a block": (_filled(_header(infos=_info(dims=(31,), kind=8))), MalformedError, "whole blocks"),
    "two of a name": (_filled(_header(infos=_info() + _info(offset=32), num=2), 64), MalformedError, "two tensors"),
    "one over another": (_filled(_header(infos=_info() + _info(b"v"), num=2), 64), MalformedError, "instead of 32"),
    "a gap": (_filled(_header(infos=_info(offset=64)), 96), MalformedError, "instead of 0"),
    "a cut file": (_filled(_header(infos=_info()), 4), IncompleteError, "the file is cut"),
    "more than its tensors": (_filled(_header(infos=_info()), 64), MalformedError, "too many"),
    "no tensors": (_filled(_header(num=0), 0), UnsupportedError, "no tensors"),
    "a name that is not text": (_filled(_header(infos=_info(b"\xff"))), MalformedError, "not UTF-8"),
    "a bool of 2": (_value(struct.pack("<IB", 7, 2)), MalformedError, "neither 0 nor 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_broken_file_has_a_named_error(name, tmp_path):
    data, kind, words = HOSTILE[name]
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(kind, match=words) as raised:
        ckpt_tools.inspect(tmp_path / "model.gguf")
    assert raised.value.exit_code == 4


def test_a_vocabulary_that_is_not_utf8_stays_as_it_is(tmp_path):
    value = _text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + _text(b"\xff\xfe") + _text("é".encode())
    architecture = _text(b"general.architecture") + struct.pack("<I", 8) + _text(b"llama")
    data = _filled(_header(values=architecture + value, num_values=2, infos=_info()))
    (tmp_path / "model.gguf").write_bytes(data)
    ckpt_tools.convert(tmp_path / "model.gguf", tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == data
    assert np.frombuffer(data[-32:-24], "<f4").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("model_type", "written"), [("llama", "llama"), ("mixtral", "unknown"), (None, "unknown"), (3, "unknown")]
)
def test_the_architecture_is_that_of_the_config(tmp_path, model_type, written):
    source = tmp_path / "model"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": model_type}))
    report = ckpt_tools.convert(source, tmp_path / "out.gguf")
    field = GGUFReader(tmp_path / "out.gguf").get_field("general.architecture")
    assert field is not None and field.contents() == written
    told = {note.what: note.why for note in report.plan.notes}
    assert "llama.cpp will refuse this file" in told.pop("hyperparameters and vocabulary")
    assert told.pop("config.json") == "the output has no place for a model's files"
    assert set(told) == (set() if written == model_type else {"general.architecture"})
