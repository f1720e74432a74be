"""safetensors and indexes: one broken rule of the header each."""

import json
import struct
from collections.abc import Iterator
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import FormatError, UnsafeError
from tests.end_to_end.malformed.case import HOSTILE_NAMES, NUMBERS, ODDITIES, Case, seed

Header = dict[str, Any]


def packed(header: Header | bytes, data: bytes = bytes(24), *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def good() -> Header:
    return {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "I64", "shape": [1], "data_offsets": [16, 24]},
    }


def with_a(**changes: Any) -> Header:
    return {**good(), "a": {**good()["a"], **changes}}


def cases() -> Iterator[Case]:
    made = [*_lengths(), *_ranges(), *_fields(), *_numbers(), *_text(), *_bombs()]
    for rule, name, data in made:
        yield Case("safetensors", rule, name, {"model.safetensors": data}, must_fail=False)
    yield from _indexes()


Made = Iterator[tuple[str, str, bytes]]


def _lengths() -> Made:
    for length in (0, 1, 2**20, 100_000_000, 100_000_001, 2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1):
        yield "header length", str(length), packed(good(), length=length)
    for surplus in range(1, 9):
        yield "bytes behind the data", str(surplus), packed(good(), bytes(24 + surplus))
        yield "bytes missing", str(surplus), packed(good(), bytes(24 - surplus))


def _ranges() -> Made:
    for start in range(0, 25, 2):
        for stop in (*range(0, 41, 4), 2**40, 2**62):
            if [start, stop] != [0, 16]:
                yield "range", f"a at [{start}, {stop}]", packed(with_a(data_offsets=[start, stop]))
    same = {**good(), "b": {**good()["a"]}}
    yield "range", "two tensors at one place", packed(same, bytes(16))
    for dtype in DType:
        if dtype.safetensors_name:
            for off in (-dtype.item_bytes, -1, 1, dtype.item_bytes):
                size = 3 * dtype.item_bytes + off
                entry = {"dtype": dtype.safetensors_name, "shape": [3], "data_offsets": [0, size]}
                yield "dtype and length disagree", f"{dtype.value} {off:+}", packed({"a": entry}, bytes(max(size, 0)))


def _fields() -> Made:
    for field in ("dtype", "shape", "data_offsets"):
        for oddity in (*ODDITIES[:-1], *NUMBERS[:-1]):
            yield "field of the wrong kind", f"{field} = {oddity!r}", packed(with_a(**{field: _json(oddity)}))
        without = with_a()
        del without["a"][field]
        yield "field missing", field, packed(without)
    yield "field", "an unknown one", packed(with_a(stride=[1]))
    for oddity in ODDITIES[:-1]:
        yield "entry of the wrong kind", repr(oddity), packed({**good(), "a": _json(oddity)})
        yield "header of the wrong kind", repr(oddity), packed(json.dumps(_json(oddity)).encode())
        yield "metadata of the wrong kind", repr(oddity), packed({"__metadata__": _json(oddity), **good()})
        yield "metadata of the wrong kind", f"a: {oddity!r}", packed({"__metadata__": {"a": _json(oddity)}, **good()})


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _numbers() -> Made:
    for number in NUMBERS[:-1]:
        for shape in ([number], [number, number], [0, number], [2, number], [number, 0], [2**31, 2**31, number]):
            yield "shape that overflows", str(shape), packed(with_a(shape=shape))
        for offsets in ([number, 16], [0, number], [number, number], [-number, number]):
            yield "offsets that overflow", str(offsets), packed(with_a(data_offsets=offsets))
    for dims in (63, 64, 65, 1000, 100_000):
        yield "many dims", str(dims), packed(with_a(shape=[1] * (dims - 2) + [2, 2]))
        yield "many dims", f"huge ones {dims}", packed(with_a(shape=[2**62] * dims))


def _text() -> Made:
    text = json.dumps(good()).encode()
    yield "duplicate key", "a tensor", packed(text[:-1] + b', "a": ' + json.dumps(good()["a"]).encode() + b"}")
    yield "duplicate key", "by escape", packed(text[:-1] + b', "\\u0061": ' + json.dumps(good()["a"]).encode() + b"}")
    yield "duplicate key", "a field", packed(text.replace(b'"dtype"', b'"dtype": "F32", "dtype"', 1))
    yield "duplicate key", "the metadata", packed(b'{"__metadata__": {}, "__metadata__": {}, ' + text[1:])
    for bad in (b"\xff", b"\xc3\x28", b"\\ud800", b"\\udfff\\ud800", b"\\u00", b"\\x", b"\0", b"\n"):
        yield "text", repr(bad), packed(text.replace(b'"a"', b'"' + bad + b'"'))
        yield "text in the metadata", repr(bad), packed(b'{"__metadata__": {"x": "' + bad + b'"}, ' + text[1:])
    for bad in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"0x10", b"01", b"1_0", b"--1", b"9" * 5000, b"1" * 10**5):
        yield "number", repr(bad[:20]), packed(text.replace(b"24", bad))
    for end in (b"}", b"]", b",", b"x", b"\0", b"{}"):
        yield "after the header", repr(end), packed(text + end)
    yield "byte order mark", "before the header", packed(b"\xef\xbb\xbf" + text)
    yield "encoding", "UTF-16", packed(text.decode().encode("utf-16"))


def _bombs() -> Made:
    for depth in (100, 1000, 10_000, 100_000):
        yield "depth bomb", f"lists {depth}", packed(b"[" * depth + b"]" * depth)
        yield "depth bomb", f"dicts {depth}", packed(b'{"a":' * depth + b"1" + b"}" * depth)
        yield "depth bomb", f"open lists {depth}", packed(b"[" * depth)
        yield "depth bomb", f"in a shape {depth}", packed(b'{"a":{"shape":' + b"[" * depth + b"]" * depth + b"}}")
    many = b"{" + b",".join(b'"%d":0' % n for n in range(50_000))
    yield "many keys", "and one twice", packed(many + b',"49999":0}')
    yield "many keys", "of the wrong kind", packed(many + b"}")
    yield "many values", "in a shape", packed(with_a(shape=[1] * 200_000))


def _indexes() -> Iterator[Case]:
    for name in ("safetensors_sharded", "torch_sharded"):
        files = seed(name)
        index = next(path for path in files if path.endswith("index.json"))
        weight_map = json.loads(files[index])["weight_map"]
        family = name.partition("_")[0]

        def case(rule: str, name: str, content: Any, *errors: Any, fails: bool = True) -> Case:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            changed = {**files, index: data}  # noqa: B023
            return Case(family, rule, name, changed, errors or (FormatError,), must_fail=fails)  # noqa: B023

        for hostile in HOSTILE_NAMES:
            hostile_map = {**weight_map, "a.bias": hostile}
            yield case("path out of the checkpoint", repr(hostile), {"weight_map": hostile_map}, UnsafeError)
        for hostile in ("\ud800", "x" * 100_000, ".", "", "./x", "missing"):
            hostile_map = {**weight_map, "a.bias": hostile}
            yield case("no such file", repr(hostile)[:40], {"weight_map": hostile_map}, UnsafeError, FormatError)
        for oddity in ODDITIES[:-1]:
            yield case("weight_map of the wrong kind", repr(oddity), {"weight_map": _json(oddity)}, fails=False)
            one = {"weight_map": {"a.bias": _json(oddity)}}
            yield case("file of the wrong kind", repr(oddity), one, UnsafeError, FormatError)
            yield case("index of the wrong kind", repr(oddity), _json(oddity))
        for name, file in {"zzz": weight_map["a.bias"], "a.bias": weight_map["count"]}.items():
            yield case("promise", f"{name} in {file}", {"weight_map": {**weight_map, name: file}})
        for depth in (1000, 100_000):
            yield case("depth bomb", str(depth), b"[" * depth + b"]" * depth)
            yield case("depth bomb", f"dicts {depth}", b'{"weight_map":' * depth)
        yield case("duplicate key", "a name", files[index].replace(b'"count"', b'"a.bias"'))
