"""Files of torch before 1.6: torch itself writes them, and says what is in them."""

import io
import pickle
import struct
from functools import partial
from typing import Any

import pytest
import torch

from ckpt_tools.core.values import GlobalRef, Opaque
from ckpt_tools.errors import CkptError, IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.serialization.torch_archive import TorchArchive
from tests.serialization.archives import opened, saved_legacy, zipped
from tests.support.refusals import refusal_test

MAGIC = 0x1950A86A20F9469CFC6C
MACHINE = {"protocol_version": 1001, "little_endian": True}


def stored(data: bytes, archive: TorchArchive, name: str = "a") -> bytes:
    """The bytes of the storage of a tensor."""
    return data[slice(*archive.locate_storage(archive.value[name].storage.key))]


def test_opening_reads_the_pickles_alone():
    data = saved_legacy({"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)})
    reads: list[tuple[int, int]] = []
    archive = opened(data, reads)
    archive.locate_storage(archive.value["b"].storage.key)
    assert sum(stop - start for start, stop in reads) < 1 << 18


def test_a_pickle_of_many_reads_is_followed_to_its_end():
    many = {f"{'long' * 30}.{number}": torch.tensor(number) for number in range(3000)}
    data = saved_legacy(many)
    archive = opened(data)
    assert len(data) > 8 << 16
    assert all(stored(data, archive, name) == tensor.numpy().tobytes() for name, tensor in many.items())


def test_a_file_whose_end_looks_like_a_zip_is_still_what_torch_takes_it_for():
    tail = zipped({"a/data.pkl": b"\x80\x02N."})
    padded = tail + bytes(-len(tail) % 4)
    for disguise in (tail, padded):
        bytes_tensor = torch.frombuffer(bytearray(disguise), dtype=torch.uint8)
        data = saved_legacy({"a": bytes_tensor})
        archive = opened(data)
        assert stored(data, archive) == disguise


def test_a_module_is_an_object_of_which_nothing_is_imported():
    data = saved_legacy(torch.nn.Linear(2, 3))
    value = opened(data).value
    assert isinstance(value, Opaque)
    assert value.ref == GlobalRef("torch.nn.modules.linear", "Linear")


class _Storage:
    """A storage in a pickle by hand, as torch before 0.4 described views of storages."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, _Storage) else None


class _Tensor:
    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor, self.args


def by_hand(value: Any, keys: list[str], storages: bytes, **changed: Any) -> bytes:
    head = {"magic": MAGIC, "version": 1001, "machine": MACHINE, **changed}
    stream = io.BytesIO()
    for part in head.values():
        pickle.dump(part, stream, protocol=2)
    _Pickler(stream, protocol=2).dump(value)
    pickle.dump(keys, stream, protocol=2)
    return stream.getvalue() + storages


def storage(*numbers: float) -> bytes:
    return struct.pack(f"<q{len(numbers)}f", len(numbers), *numbers)


def one(key: str = "k", numel: int = 3, view: Any = None) -> dict[str, Any]:
    of = _Storage("storage", torch.FloatStorage, key, "cpu", numel, view)
    size = view[2] if isinstance(view, tuple) and len(view) == 3 else numel
    return {"a": _Tensor(of, 0, (size,), (1,))}


def test_a_view_of_a_storage_is_read_as_torch_reads_it():
    data = by_hand(one(view=("v", 1, 2)), ["k"], storage(1, 2, 3))
    archive = opened(data)
    truth = torch.load(io.BytesIO(data), weights_only=False)["a"]
    assert truth.tolist() == [2, 3]
    start = archive.value["a"].storage_offset
    assert struct.unpack(f"<{len(stored(data, archive)) // 4}f", stored(data, archive))[start : start + 2] == (2, 3)


THREE = storage(1, 2, 3)
BIG_ENDIAN = {**MACHINE, "little_endian": False}
DAMAGED: list[tuple[str, bytes, type[CkptError], str]] = [
    ("cut", by_hand(one(), ["k"], storage(1, 2)), IncompleteError, "truncated"),
    ("data behind it", by_hand(one(), ["k"], storage(1, 2, 3, 4)), MalformedError, "after the last storage"),
    ("no keys", by_hand(one(), [], b""), IncompleteError, "not in the list"),
    ("one key more", by_hand(one(), ["k", "other"], THREE * 2), MalformedError, "no tensor is a view"),
    ("a key twice", by_hand(one(), ["k", "k"], THREE * 2), MalformedError, "no tensor is a view"),
    ("a text of keys", by_hand(one(), "k", THREE), IncompleteError, "list of storages"),  # type: ignore[arg-type]
    ("keys in lists", by_hand(one(), [["k"]], THREE), MalformedError, "listed"),  # type: ignore[list-item]
    ("another version", by_hand(one(), ["k"], THREE, version=1002), MalformedError, "version"),
    ("no machine", by_hand(one(), ["k"], THREE, machine={}), MalformedError, "machine"),
    ("half a machine", by_hand(one(), ["k"], THREE, machine={"little_endian": True}), MalformedError, "which version"),
    ("big-endian", by_hand(one(), ["k"], THREE, machine=BIG_ENDIAN), UnsupportedError, "big-endian"),
    ("a view behind the end", by_hand(one(view=("v", 2, 2)), ["k"], THREE), MalformedError, "leaves it"),
    ("a view before the start", by_hand(one(view=("v", -1, 2)), ["k"], THREE), MalformedError, "leaves it"),
    ("a view from a text", by_hand(one(view=("v", "1", 2)), ["k"], THREE), MalformedError, "not described"),
    ("a view of a number", by_hand(one(view=(7, 0, 2)), ["k"], THREE), MalformedError, "described"),
    ("a negative storage", by_hand(one(numel=-3), ["k"], b""), MalformedError, "storage"),
]
test_what_is_damaged_is_named = refusal_test(
    *((name, partial(lambda data, _: opened(data), data), error, words) for name, data, error, words in DAMAGED)
)


def test_a_storage_of_another_count_is_named():
    data = by_hand(one(), ["k"], struct.pack("<q3f", 2, 1, 2, 3))
    archive = opened(data)
    with pytest.raises(MalformedError, match="2 elements instead of 3"):
        archive.locate_storage("k")


def test_a_file_cut_anywhere_is_an_error():
    data = saved_legacy({"a": torch.ones(40), "b": torch.zeros(3).half(), "count": 2**60})
    for stop in [*range(120), *range(120, len(data), 37), len(data) - 1]:
        with pytest.raises(CkptError):
            opened(data[:stop])
