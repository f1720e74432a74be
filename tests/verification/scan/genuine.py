"""Harmless files of numpy, joblib, scipy and torch, what can take the place of a value in them, and crafted files.

What is put in is a call of ``os.system``, a name of the closed list in another place, a hook, or a number.
"""

import collections
import io
import pickle
import pickletools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import joblib
import numpy as np
import scipy.sparse
import torch

from tests.serialization.archives import npy, records_of, saved, saved_legacy, zipped
from tests.verification.scan.generator import INNER, OWN, Files

Write = Callable[[Any], bytes]


def pickled(protocol: int) -> Write:
    return lambda value: pickle.dumps(value, protocol)


def compressed(value: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, first=np.arange(3), second=value)
    return stream.getvalue()


def sparse_npz(value: Any) -> bytes:
    stream = io.BytesIO()
    scipy.sparse.save_npz(stream, value)
    return stream.getvalue()


def dumped(protocol: int) -> Write:
    def write(value: Any) -> bytes:
        stream = io.BytesIO()
        joblib.dump(value, stream, protocol=protocol)
        return stream.getvalue()

    return write


class _Pipe(io.RawIOBase):
    """A stream without a position: joblib aligns nothing in it, as before 1.2."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


def piped(protocol: int) -> Write:
    def write(value: Any) -> bytes:
        stream = _Pipe()
        joblib.dump(value, stream, protocol=protocol)
        return stream.data

    return write


def _memmap() -> Any:
    return np.zeros(3, "f4").view(np.memmap)


FIELDS = np.dtype([("a", "<i4"), ("b", "<f8", (2,)), ("c", [("x", "S3"), ("y", "<U2")])])
ALIGNED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
STRUCTURED = np.zeros(2, FIELDS)
MASKED = np.ma.array([1.5, 2.5], mask=[True, False], fill_value=7)
ROWS = np.arange(6.0).reshape(2, 3)
COO = torch.eye(4).to_sparse()


def _quantized(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 2, dtype)


def _per_channel() -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)


def _per_channel_of_floats() -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)


def _narrowed() -> torch.Tensor:
    start, length = torch.tensor([0, 1]), torch.tensor([2, 3])
    return torch.nested.narrow(torch.ones(2, 5, 3), 1, start, length, layout=torch.jagged)


def _generators() -> list[Any]:
    kinds = [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]
    return [np.random.Generator(kind(3)) for kind in kinds]


with warnings.catch_warnings(action="ignore"):
    VALUES: dict[str, dict[str, Any]] = {
        "structured": {
            "fields": STRUCTURED, "aligned fields": np.zeros(2, ALIGNED), "a dtype of fields": FIELDS,
            "a record": STRUCTURED[0], "an array of arrays": np.dtype(("<i4", (2, 3))),
            "overlapping fields": np.zeros(2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 1]}),
            "no fields": np.zeros(2, []), "dates": np.array(["2026-01-01"], "M8[D]"), "a date": np.datetime64(1, "s"),
        },
        "subclasses": {
            "records": STRUCTURED.view(np.recarray), "a matrix": np.asmatrix(ROWS), "a map": _memmap(),
            "characters": np.char.array(["a", "bc"]),
        },
        "masked": {
            "a mask": MASKED, "no mask": np.ma.array([1, 2]), "masked itself": np.ma.masked,
            "a masked matrix": np.ma.array(np.asmatrix(ROWS)),
        },
        "random": {"generators": _generators(), "of Python": random.Random(3), "of torch": torch.Generator()},
        "sparse of scipy": {
            form: getattr(scipy.sparse, form)(np.eye(2))
            for form in ("csr_matrix", "csc_array", "coo_matrix", "bsr_array", "dia_matrix")
        },
        "sparse": {
            "coo": COO, "csr": COO.to_sparse_csr(), "csc": COO.to_sparse_csc(), "bsr": COO.to_sparse_bsr(2),
            "bsc": COO.to_sparse_bsc(2), "a parameter": torch.nn.Parameter(COO),
        },
        "quantized": {
            "qint8": _quantized(torch.qint8), "quint8": _quantized(torch.quint8), "by channel": _per_channel(),
            "by channel with floats": _per_channel_of_floats(),
            "a parameter": torch.nn.Parameter(_quantized(torch.qint8), requires_grad=False),
        },
        "nested": {
            "strided": _nested(torch.strided), "jagged": _nested(torch.jagged), "narrowed": _narrowed(),
        },
        "arrays of joblib": {
            "an array": ROWS, "in the order of columns": np.asfortranarray(ROWS), "fields": STRUCTURED,
            "several": {"a": ROWS, "b": [np.arange(3), "text", np.array(["ab"])], "c": 1}, "none": np.zeros((0, 3)),
            "a matrix": np.asmatrix(ROWS), "a map": _memmap(), "a mask": MASKED,
            "a tensor beside it": {"t": torch.ones(2), "a": np.arange(2)}, "a scalar": np.array(3),
            "plain data": collections.OrderedDict(a=1),
        },
        "compressed arrays": {
            "numbers": ROWS, "fields": STRUCTURED, "objects": np.array([{"x": 1}, "text"], dtype=object),
            "nothing": np.zeros((0, 3)), "much": np.zeros(1 << 18),
        },
    }  # fmt: skip
"""What each rule is for, by rule."""


WRITERS: dict[str, dict[str, Write]] = {
    rule: {f"a.pkl of protocol {protocol}": pickled(protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)}
    for rule in ("structured", "subclasses", "masked", "random", "sparse of scipy")
}
WRITERS |= {
    rule: {
        "a.pt": saved,
        "a.pth before torch 1.6": saved_legacy,
        "a.pkl of protocol 2": pickled(2),
        "a.pkl": pickled(5),
    }
    for rule in ("sparse", "quantized", "nested")
}
WRITERS["arrays of joblib"] = {f"a.joblib of protocol {n}": dumped(n) for n in range(pickle.HIGHEST_PROTOCOL + 1)}
WRITERS["arrays of joblib"] |= {f"a.joblib of protocol {n} through a pipe": piped(n) for n in (0, 2, 4, 5)}
WRITERS["compressed arrays"] = {"a.npz": compressed}


def genuine(rule: str) -> Iterator[tuple[str, Files]]:
    """Every value of a rule, by every writer."""
    for writer, write in WRITERS[rule].items():
        for name, value in VALUES[rule].items():
            yield f"{rule}: {name}, {writer}", {writer.split()[0]: write(value)}
    if rule in ("structured", "subclasses"):
        arrays = {name: value for name, value in VALUES[rule].items() if isinstance(value, np.ndarray)}
        arrays.pop("overlapping fields", None)
        yield from ((f"{rule}: {name}, a.npy", {"a.npy": npy(value)}) for name, value in arrays.items())
    if rule == "sparse of scipy":
        yield from ((f"{rule}: {name}, a.npz", {"a.npz": sparse_npz(value)}) for name, value in VALUES[rule].items())


# What is put in


def _bytes(data: bytes) -> bytes:
    return b"B" + len(data).to_bytes(4, "little") + data


PUT_IN = {
    "a call": b"cos\nsystem\n(S'x'\ntR",
    "an object with a hook": b"ccollections\nOrderedDict\n)R}S'__setstate__'\ncos\nsystem\nsb",
    "a name": b"cos\nsystem\n",
    "eval": b"cbuiltins\neval\n",
    "a pickle": _bytes(OWN),
    "a storage": _bytes(INNER),
    "a reader of storages": b"ctorch.storage\n_load_from_bytes\n",
    "getattr": b"cbuiltins\ngetattr\n",
    "an allowed class": b"ctorch.nn.parameter\nParameter\n",
    "a wrapper of joblib": b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n",
    "a dtype of objects": b"cnumpy\ndtype\n(S'O8'\nI00\nI01\ntR",
    "a hook": b"S'__setstate__'\n",
    "a method": b"S'append'\n",
    "minus one": b"J\xff\xff\xff\xff",
    "a million": b"J@B\x0f\x00",
    "None": b"N",
    "a list": b"]",
    "a dict": b"}",
    "a tuple": b")",
}
PUSHES = frozenset({
    "INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "NONE", "NEWTRUE", "NEWFALSE", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "FLOAT", "BINFLOAT", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "GLOBAL", "GET", "BINGET",
    "LONG_BINGET", "BINPERSID",
})  # fmt: skip
"""Opcodes for which something else may stand."""


def opcodes_of(data: bytes) -> tuple[list[tuple[str, bytes]], bytes]:
    """The opcodes up to the first array of joblib, without frames, and what follows them."""
    found: list[tuple[str, int]] = []
    end = len(data)
    try:
        for opcode, _, at in pickletools.genops(data):
            found.append((opcode.name, at or 0))
    except ValueError:
        end = found[-1][1] + 1
    parts = [(name, data[at:stop]) for (name, at), stop in zip(found, [*(at for _, at in found[1:]), end], strict=True)]
    return [part for part in parts if part[0] != "FRAME"], data[end:]


def joined(parts: list[bytes], rest: bytes) -> bytes:
    """The pickle, and the array behind it with its padding."""
    head = b"".join(parts)
    if rest and 1 <= rest[0] <= 16 and rest[1 : 1 + rest[0]] == b"\xff" * rest[0]:
        num_bytes = 16 - (len(head) + 1) % 16
        rest = bytes([num_bytes]) + b"\xff" * num_bytes + rest[1 + rest[0] :]
    return head + rest


def repacked(archive: bytes, name: str, record: bytes) -> bytes:
    """The archive with another record of this name. numpy deflates, and torch does not."""
    is_deflated = b"data.pkl" not in archive
    return zipped({**records_of(archive), name: record}, compress=is_deflated)


HIDDEN = np.frombuffer(OWN.ljust(64, b"0"), np.uint8)
"""An array whose elements are a pickle that calls ``os.system``."""


def _lying(data: bytes, shape: bytes) -> bytes:
    """Another shape of one dim for 64 elements, in protocol 2."""
    return data.replace(b"K@\x85", shape, 1)


def crafted() -> Iterator[tuple[str, Files]]:
    """Files of joblib in which one loader could take for opcodes what another takes for elements."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for named, write in {"": dumped(protocol), " through a pipe": piped(protocol)}.items():
            for name, value in {
                "an array": HIDDEN,
                "a list": [HIDDEN, HIDDEN],
                "a dict": {"a": 1, "b": HIDDEN},
            }.items():
                yield f"{name} of protocol {protocol}{named}", {"a.joblib": write(value)}
                yield f"{name} of protocol {protocol}{named}, as pickle", {"a.pkl": write(value)}
                yield f"{name} of protocol {protocol}{named}, followed", {"a.joblib": write(value) + OWN}
    for num in (0, 1, 16, 32, 63, 65, 80, 200):
        for named, write in {"": dumped(2), " through a pipe": piped(2)}.items():
            shape = b"K" + bytes([num]) + b"\x85"
            yield f"{num} elements instead of 64{named}", {"a.joblib": _lying(write(HIDDEN), shape)}
            yield f"{num} elements instead of 64{named}, twice", {"a.joblib": _lying(write([HIDDEN, HIDDEN]), shape)}
    aligned = dumped(2)(HIDDEN)
    for num in range(0, 256, 5):
        at = aligned.index(OWN[:8])
        start = aligned.rindex(b"b", 0, at) + 1
        yield f"{num} bytes of padding", {"a.joblib": aligned[:start] + bytes([num]) + aligned[start + 1 :]}
        yield f"padding of bytes {num}", {"a.joblib": aligned[: at - 1] + bytes([num]) + aligned[at:]}
    for alignment in (b"K\x08", b"K\x00", b"N", b"J\xff\xff\xff\xff", b"U\x01a"):
        yield f"aligned to {alignment!r}", {"a.joblib": aligned.replace(b"K\x10", alignment, 1)}
