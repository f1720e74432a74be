"""What pickles say of tensors and storages: every number and every kind, wrong; and pickles that are bombs."""

import io
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckpt_tools.errors import CkptError
from tests.end_to_end.fuzzing import seeds
from tests.end_to_end.fuzzing.mutations import zipped
from tests.end_to_end.malformed.case import NUMBERS, ODDITIES, Case, family_of, seed

Place = tuple[str, Callable[[bytes], Mapping[str, bytes]], str]
"""A family, a checkpoint of it with a pickle of ours in one place, and the place's name."""


class Called:
    """Pickles as a call of ``function(*args)``."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


class Storage:
    """Stands for a persistent id."""

    def __init__(self, pid: Any) -> None:
        self.pid = pid


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Storage) else None


def pickled(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 2).dump(value)
    return out.getvalue()


def tensor(
    *, pid: Any = None, offset: Any = 0, shape: Any = (2, 3), strides: Any = (3, 1), grad: Any = False, rest: Any = ()
) -> Called:
    """A tensor as torch pickles it, of a storage of six floats; any part of it as told."""
    storage = Storage(("storage", torch.FloatStorage, "0", "cpu", 6) if pid is None else pid)
    return Called(torch._utils._rebuild_tensor_v2, (storage, offset, shape, strides, grad, {}, *rest))


def archive(pickle_bytes: bytes) -> bytes:
    """A torch file of one storage of six floats."""
    storage = struct.pack("<6f", *range(6))
    records = {"data.pkl": pickle_bytes, "byteorder": b"little", "data/0": storage, "version": b"3\n"}
    return zipped([(f"archive/{name}", content) for name, content in records.items()])


def cases() -> Iterator[Case]:
    for rule, name, value in [*_views(), *_storages()]:
        files = {"model.pt": archive(pickled({"w": value}))}
        yield Case("torch", rule, name, files, (CkptError,), must_fail=False)
    for family, within, place in places():
        for name, data in bombs().items():
            fails = name not in HARMLESS or place not in VALUES
            yield Case(family_of(family), "pickle bomb", f"{name} in {place}", within(data), (CkptError,), fails)
        for name, data in odd_values().items():
            name = f"{name} in {place}"
            yield Case(family_of(family), "another value", name, within(data), (CkptError,), must_fail=False)


Made = Iterator[tuple[str, str, Called]]


def _views() -> Made:
    for number in (*NUMBERS, 5, 6, 7):
        yield "offset out of the storage", str(number)[:30], tensor(offset=number)
        for shape in ((number, 3), (2, number), (number, number), (0, number), (number,)):
            yield "shape out of the storage", str(shape)[:60], tensor(shape=shape, strides=(3, 1)[: len(shape)])
        for strides in ((number, 1), (3, number), (number, number)):
            yield "strides out of the storage", str(strides)[:60], tensor(strides=strides)
    for oddity in ODDITIES:
        for part in ("offset", "shape", "strides", "grad"):
            yield f"{part} of the wrong kind", repr(oddity), tensor(**{part: oddity})
        yield "shape of the wrong kind", f"({oddity!r}, 3)", tensor(shape=(oddity, 3))
        yield "strides of the wrong kind", f"({oddity!r}, 1)", tensor(strides=(oddity, 1))
        yield "flags", repr(oddity), tensor(rest=(oddity,))
    for dims in (0, 1, 3, 64, 65, 1000):
        yield "dims", str(dims), tensor(shape=(1,) * dims, strides=(1,) * dims)
        yield "dims that differ", str(dims), tensor(shape=(1,) * dims, strides=(1,) * (dims + 1))
    yield "expanded", "2 ** 40 times", tensor(shape=(2**40,), strides=(0,))
    yield "expanded", "2 ** 62 times", tensor(shape=(2**62,), strides=(0,))
    yield "overlapping", "rows", tensor(shape=(3, 3), strides=(1, 1))
    yield "arguments", "too few", Called(torch._utils._rebuild_tensor_v2, (1, 2))
    yield "arguments", "too many", tensor(rest=(None, 1, 2, 3, 4))


def _storages() -> Made:
    kind = torch.FloatStorage
    for number in (*NUMBERS, 0, 5, 7):
        yield "storage size", str(number)[:30], tensor(pid=("storage", kind, "0", "cpu", number))
    for oddity in ODDITIES:
        for at in range(5):
            pid = ["storage", kind, "0", "cpu", 6]
            pid[at] = oddity
            yield "storage of the wrong kind", f"part {at} = {oddity!r}", tensor(pid=tuple(pid))
        yield "storage of the wrong kind", repr(oddity), tensor(pid=oddity if oddity is not None else ("x",))
    for key in ("1", "00", "../0", "0/..", "/0", "", "\0", "0\0", "data.pkl", "../data.pkl", "x" * 10**5):
        yield "storage key", repr(key)[:30], tensor(pid=("storage", kind, key, "cpu", 6))
    for location in ("", "cuda:0", "meta", "xla:99", "\0", "x" * 10**5):
        yield "storage location", repr(location)[:30], tensor(pid=("storage", kind, "0", location, 6))
    for other in (torch.DoubleStorage, torch.HalfStorage, torch.UntypedStorage, torch.QInt8Storage, torch.Tensor, dict):
        for numel in (3, 6, 12, 24):
            yield "storage type", f"{other.__name__} of {numel}", tensor(pid=("storage", other, "0", "cpu", numel))


# Pickles that are hostile wherever they stand


def bombs() -> dict[str, bytes]:
    """Small pickles that would take much memory, much time, or the stack."""
    deep, wide = 5_000, b"]" + b"".join(b"q%c(h%ch%ce]" % (n, n, n) for n in range(60))
    return {
        "a huge memo index": b"\x80\x02Nr\xff\xff\xff\xff.",
        "deep lists": b"\x80\x02" + b"]" * deep + b"a" * (deep - 1) + b".",
        "deep keys": b"\x80\x02})" + b"\x85" * 200 + b"Ns.",
        "deep calls": b"\x80\x02" + b"cx\ny\n" + b")R" * deep + b".",
        "doubled lists": doubled(b"]", b"e", 60),
        "doubled keys": b"\x80\x02})" + b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(40)) + b"Ns.",
        "a list in itself": b"\x80\x02]q\0h\0a.",
        "a long string": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fabc.",
        "a long integer": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
        "marks": b"\x80\x02" + b"(" * deep + b".",
        "many dicts": b"\x80\x02]" + b"}a" * 20_000 + b".",
        "bytes of a size": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        "nothing": b"",
        "only a stop": b"\x80\x02.",
        "no stop": b"\x80\x02N",
        "two pickles": b"\x80\x02N.\x80\x02N.",
        "protocol 6": b"\x80\x06N.",
        "the extension registry": b"\x80\x02\x82\x01.",
        "a buffer": b"\x80\x05\x97.",
        "os.system": b"\x80\x02cos\nsystem\nX\x05\0\0\0false\x85R.",
        "collisions": pickle.dumps({(n * (2**61 - 1), 0): None for n in range(1, 1000)}, 2),
        "wide": b"\x80\x02" + wide + b".",
    }


HARMLESS = ("many dicts", "bytes of a size", "os.system", "wide")
"""Those that become values which are never made live, where a checkpoint may hold any value."""

VALUES = ("an object of a DCP",)


def doubled(make: bytes, extend: bytes, levels: int) -> bytes:
    """A list of two of a list of two of ..."""
    inner = b"]q\0" + b"".join(b"](h%ch%c%sq%c" % (n, n, extend, n + 1) for n in range(levels))
    return b"\x80\x02" + inner + b"."


def odd_values() -> dict[str, bytes]:
    """Whole pickles of something else than what belongs there."""
    nested = ({"x": float("inf")}, {1: {2: [3, {}]}}, [{}, [1]])
    made: dict[str, Any] = {"a size": torch.Size([2]), "a dtype": torch.float32, "an object": Called(list, ())}
    made |= {repr(value)[:40]: value for value in (*ODDITIES, *NUMBERS, *nested)}
    return {name: pickled(value) for name, value in made.items()}


def places() -> Iterator[Place]:
    """Everywhere that a checkpoint has a pickle."""
    yield "torch", lambda data: {"model.pt": archive(data)}, "model.pt"
    yield "torch", lambda data: _instead("torch_sharded", 0, archive(data)), "a shard"
    yield "dcp", lambda data: {**seed("dcp"), ".metadata": data}, ".metadata"
    yield "dcp", _object_of_a_dcp, "an object of a DCP"
    for name in ("zero1", "zero3", "universal"):
        for path in [path for path in seed(name) if path.endswith(".pt")][:2]:
            yield name, (lambda data, name=name, path=path: {**seed(name), path: archive(data)}), path


def _instead(name: str, number: int, data: bytes) -> dict[str, bytes]:
    files = dict(seed(name))
    return {**files, [path for path in files if path.endswith(".bin")][number]: data}


def _object_of_a_dcp(data: bytes) -> dict[str, bytes]:
    folder = seeds.dcp_folder()
    folder.add_raw(("user",), archive(data))
    return folder.saved()
