"""safetensors: one test a rule of the format, and the library itself as the judge."""

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from ckpt_tools.core.layout import Literal
from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError, UnsupportedError
from ckpt_tools.formats.safetensors.format import SafetensorsFormat
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def info(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(files: dict[str, bytes]) -> Manifest:
    store = MemoryStore({name: bytearray(data) for name, data in files.items()})
    return SafetensorsFormat().read(Source.open(store), ReadOptions())


def read_one(data: bytes) -> Manifest:
    return read({"model.safetensors": data})


def test_reads_what_the_library_wrote():
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(7, np.int64),
        "c": np.empty((0, 3), "u1"),
    }
    manifest = read_one(safetensors.numpy.save(tensors, {"note": "x"}))
    assert {key.fqn: (entry.shape, entry.dtype.value) for key, entry in manifest.tensors.items()} == {
        "a": ((2, 3), "float32"),
        "b": ((), "int64"),
        "c": ((0, 3), "uint8"),
    }


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"abc", IncompleteError, "3 bytes"),
        (struct.pack("<Q", 100_000_001) + b"{}", MalformedError, "100,000,001"),
        (struct.pack("<Q", 50) + b"{}", IncompleteError, "does not fit"),
        (packed(b"{"), MalformedError, "JSON"),
        (packed(b"\xff\xfe{}"), MalformedError, "JSON"),
        (packed(b"[" * 100_000), MalformedError, "JSON"),
        (packed([1]), MalformedError, "not a JSON object"),
        (packed({"a": {"dtype": "F32"}}), MalformedError, "needs dtype"),
        (packed({"a": {**info(), "more": 1}}, bytes(8)), MalformedError, "nothing else"),
        (packed({"a": info("F31")}, bytes(8)), UnsupportedError, "F31"),
        (packed({"a": info(["F32"])}, bytes(8)), UnsupportedError, "F32"),
        (packed({"a": info(shape=[-2])}, bytes(8)), MalformedError, "are not valid"),
        (packed({"a": info(shape=[2.0])}, bytes(8)), MalformedError, "are not valid"),
        (packed({"a": info(shape=[True, 2])}, bytes(8)), MalformedError, "are not valid"),
        (packed({"a": info(offsets=[8, 0])}, bytes(8)), MalformedError, "are not valid"),
        (packed({"a": info(offsets=[0, 4])}, bytes(4)), MalformedError, "cannot hold"),
        (packed({"a": info(shape=[1 << 62, 1 << 62])}, bytes(8)), MalformedError, "cannot hold"),
        (packed({"a": info(), "b": info(offsets=[4, 12])}, bytes(12)), MalformedError, "overlaps"),
        (packed({"a": info(offsets=[4, 12])}, bytes(12)), MalformedError, "gap"),
        (packed({"a": info()}, bytes(9)), MalformedError, "no tensor has the 1 byte after"),
        (packed({"a": info()}, bytes(7)), IncompleteError, "truncated"),
        (packed(b'{"a":{},"a":{}}'), MalformedError, "twice"),
        (packed({"__metadata__": {"n": 1}}), MalformedError, "__metadata__"),
        (packed(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)), MalformedError, "NaN"),
    ],
)
def test_refuses_a_broken_rule(data, error, words):
    with pytest.raises(error, match=words):
        read_one(data)


ONE = packed({"a": info()}, bytes(8))
TWO = packed({"b": info()}, bytes(8))


def indexed(weight_map: object) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"model.safetensors.index.json": indexed({"a": "x.safetensors"})}, IncompleteError, "missing"),
        ({"model.safetensors.index.json": indexed({"a": "../x.safetensors"})}, UnsafeError, "outside"),
        ({"model.safetensors.index.json": indexed({"a": "/x.safetensors"})}, UnsafeError, "outside"),
        ({"model.safetensors.index.json": indexed(["a"])}, MalformedError, "weight_map"),
        (
            {"model.safetensors.index.json": indexed({"z": "x.safetensors"}), "x.safetensors": ONE},
            IncompleteError,
            "'z'",
        ),
        ({"a.safetensors": ONE, "b.safetensors": TWO}, UnsupportedError, "several models"),
        ({"m-00001-of-00003.safetensors": ONE, "m-00003-of-00003.safetensors": TWO}, IncompleteError, "missing"),
        ({"m-00001-of-00002.safetensors": ONE, "m-00002-of-00002.safetensors": ONE}, MalformedError, "two files"),
    ],
)
def test_refuses_a_broken_folder(files, error, words):
    with pytest.raises(error, match=words):
        read(files)


def test_shards_without_an_index_are_one_model_if_complete():
    manifest = read({"m-00001-of-00002.safetensors": ONE, "m-00002-of-00002.safetensors": TWO})
    assert manifest.fqns == {"a", "b"}


def test_header_is_exactly_this():
    manifest = read_one(packed({"a": info()}, bytes(8)))
    (file,) = SafetensorsFormat().layout(manifest, WriteOptions()).files
    header = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   '
    assert file.path == "model.safetensors"
    assert file.segments[0] == Literal(struct.pack("<Q", 88) + header)
    assert file.size_bytes == 8 + 88 + 8


def test_wide_elements_come_first_so_that_all_are_aligned():
    entries = {"bytes": info("U8", [3], [0, 3]), "words": info("I64", [1], [3, 11])}
    (file,) = SafetensorsFormat().layout(read_one(packed(entries, bytes(11))), WriteOptions()).files
    assert [segment.key.fqn for segment in file.segments[1:]] == ["words", "bytes"]  # type: ignore[union-attr]


def test_shards_have_an_index_published_last():
    entries = {name: info(offsets=[8 * n, 8 * n + 8]) for n, name in enumerate("abc")}
    layout = SafetensorsFormat().layout(read_one(packed(entries, bytes(24))), WriteOptions(max_shard_bytes=16))
    assert [file.path for file in layout.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    (index,) = layout.files[-1].load().segments
    assert isinstance(index, Literal)
    assert json.loads(index.data) == {
        "metadata": {"total_size": 24},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }


def test_a_tie_is_stored_once_and_found_again():
    manifest = read_one(packed({"__metadata__": {"head": "a"}, "a": info()}, bytes(8)))
    assert manifest.aliases == {"head": "a"}
    (file,) = SafetensorsFormat().layout(manifest, WriteOptions()).files
    assert b'"head":"a"' in file.segments[0].data  # type: ignore[union-attr]


def test_a_type_that_has_no_name_here():
    from dataclasses import replace

    from ckpt_tools.core.dtypes import DType

    manifest = read_one(packed({"a": info("C64", [1], [0, 8])}, bytes(8)))
    wide = {StateKey("a"): replace(manifest.tensors[StateKey("a")], dtype=DType.COMPLEX128)}
    with pytest.raises(UnsupportedError, match="complex128"):
        SafetensorsFormat().layout(Manifest("x", wide), WriteOptions())
