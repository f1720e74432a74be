"""DCP: an index that contradicts itself, its files, or geometry. Made with torch's own classes, then pickled."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_tools.errors import CkptError, FormatError, UnsafeError
from tests.end_to_end.fuzzing.seeds import DcpFolder, dcp_folder, torch_bytes
from tests.end_to_end.malformed.case import HOSTILE_NAMES, NUMBERS, ODDITIES, Case

NAME = "model.a.weight"
"""A matrix of 4 rows and 3 columns in two chunks."""

Change = Callable[[DcpFolder], object]


def changed(change: Change) -> dict[str, bytes]:
    folder = dcp_folder()
    change(folder)
    return folder.saved()


def cases() -> Iterator[Case]:
    yield from _chunks()
    yield from _items()
    yield from _paths()
    yield from _fields()
    yield from _payloads()


def _made(rule: str, name: str, change: Change, *errors: type[CkptError], must_fail: bool = True) -> Case:
    return Case("dcp", rule, name, changed(change), errors or (FormatError,), must_fail)


def _entry(folder: DcpFolder, name: str = NAME) -> Any:
    return folder.metadata.state_dict_metadata[name]


def _chunk(offsets: tuple[Any, ...], sizes: tuple[Any, ...]) -> Change:
    """The second chunk lies elsewhere, and its item with it."""

    def change(folder: DcpFolder) -> None:
        stored = folder.metadata.storage_data
        info = stored.pop(MetadataIndex(NAME, torch.Size([2, 0])))
        stored[MetadataIndex(NAME, torch.Size(offsets), 1)] = info
        _entry(folder).chunks[1] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    return change


def _chunks() -> Iterator[Case]:
    for offsets in ((-1, 0), (0, 0), (1, 0), (2, 1), (3, 0), (4, 0), (2, -1), (2**62, 0), (2**63 - 1, 0), (0, 2**62)):
        for sizes in ((2, 3), (1, 3), (2, 2), (3, 3), (2**31, 3), (2**62, 4), (-2, 3), (-2, -3), (2**63 - 1, 1), (2,)):
            yield _made("chunk box", f"{sizes} at {offsets}", _chunk(offsets, sizes))
    for dims in ((), (2,), (2, 3, 1), (1,) * 65):
        yield _made("chunk of other dims", str(len(dims)), _chunk((0,) * len(dims), dims))
    for size in ((4, 4), (3, 3), (8, 3), (2**31, 3), (2**62, 2**62), (-4, -3), (), (12,), (0, 3), (2**63 - 1, 1)):
        yield _made("size", str(size), lambda folder, size=size: setattr(_entry(folder), "size", torch.Size(size)))
    yield _made("chunks", "none", lambda folder: _entry(folder).chunks.clear())
    yield _made("chunks", "one missing", lambda folder: _entry(folder).chunks.pop())
    yield _made("chunks", "one twice", lambda folder: _entry(folder).chunks.append(_entry(folder).chunks[0]))
    many = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))] * 5000
    yield _made("chunks", "one 5,000 times", lambda folder: _entry(folder).chunks.extend(many))


def _info(**values: Any) -> Change:
    def change(folder: DcpFolder) -> None:
        index = MetadataIndex(NAME, torch.Size([2, 0]))
        old = folder.metadata.storage_data[index]
        named = {"relative_path": old.relative_path, "offset": old.offset, "length": old.length} | values
        folder.metadata.storage_data[index] = _StorageInfo(**named)

    return change


def _items() -> Iterator[Case]:
    for number in (*NUMBERS, 0, 1, 64):
        yield _made("item offset", str(number)[:30], _info(offset=number), must_fail=number != 0)
        yield _made("item length", str(number)[:30], _info(length=number), must_fail=number != 10**400)
        yield _made("item offset and length", str(number)[:30], _info(offset=number, length=number))
    for oddity in ODDITIES:
        yield _made(
            "item of the wrong kind", f"offset = {oddity!r}", _info(offset=oddity), CkptError, must_fail=oddity != 0
        )
        yield _made("item of the wrong kind", f"length = {oddity!r}", _info(length=oddity), CkptError)
        yield _made("item of the wrong kind", f"path = {oddity!r}", _info(relative_path=oddity), CkptError)
        fails = oddity not in (None, [], ()) and oddity != {} and oddity != ""
        transforms = _info(transform_descriptors=oddity)
        yield _made("item of the wrong kind", f"transforms = {oddity!r}", transforms, CkptError, must_fail=fails)
    for name in (NAME, "client", "optim.param_groups.0.lr"):
        index = MetadataIndex(name, torch.Size([2, 0]) if name == NAME else None)
        yield _made("item missing", name, lambda folder, index=index: folder.metadata.storage_data.pop(index))
    for other in ("model.a.bias", "client", "optim.state.a.weight.exp_avg"):
        yield _made("item of another entry", other, _swapped(other))


def _swapped(other: str) -> Change:
    def change(folder: DcpFolder) -> None:
        stored = folder.metadata.storage_data
        found = next(info for index, info in stored.items() if index.fqn == other)
        stored[MetadataIndex(NAME, torch.Size([2, 0]))] = found

    return change


def _paths() -> Iterator[Case]:
    for hostile in HOSTILE_NAMES:
        yield _made("path out of the checkpoint", repr(hostile), _info(relative_path=hostile), UnsafeError)
    for name in ("", ".", "missing", "\ud800", "x" * 100_000, "__9_0.distcp", ".metadata"):
        change = _info(relative_path=name)
        yield _made("no such file", repr(name)[:30], change, UnsafeError, FormatError)


def _fields() -> Iterator[Case]:
    for field in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"):
        for oddity in (*ODDITIES, *NUMBERS[-2:]):
            change = _setting(lambda folder: folder.metadata, field, oddity)
            yield _made("field of the wrong kind", f"{field} = {oddity!r:.40}", change, must_fail=False)
    for field in ("properties", "size", "chunks"):
        for oddity in ODDITIES:
            change = _setting(_entry, field, oddity)
            yield _made("field of the wrong kind", f"tensor {field} = {oddity!r}", change)
    for oddity in ODDITIES:
        yield _made("entry of the wrong kind", repr(oddity), _setting_item("state_dict_metadata", NAME, oddity))
        yield _made("name of the wrong kind", repr(oddity), _renamed(oddity), must_fail=oddity == oddity)
        for path in (oddity, (oddity,)):
            change = _setting_item("planner_data", NAME, path)
            yield _made("path of the wrong kind", repr(path), change, must_fail=False)
    for path in ((), ("a",) * 101, ("a",) * 100_000, (10**400,), ("\ud800",), ("model", "a.bias"), ("client", "epoch"),
                 ("optim", "param_groups", "x", "params"), ("optim", "state", "7", "exp_avg"), ("optim",),
                 ("optim", "state", "9" * 5000, "x"), ("model", "a.weight", "x"), (0,), ("x", 2**62)):  # fmt: skip
        yield _made("path", repr(path)[:50], _setting_item("planner_data", NAME, path), must_fail=False)
    for dtype in (torch.float16, torch.float64, torch.int8, torch.complex128, torch.qint8, "float32", None):
        properties = TensorProperties()
        properties.dtype = dtype
        yield _made("dtype", str(dtype), lambda folder, p=properties: setattr(_entry(folder), "properties", p))
    yield _made("class", "another one", lambda folder: setattr(folder, "metadata", {"state_dict_metadata": {}}))
    yield _made("class", "an empty one", lambda folder: setattr(folder, "metadata", Metadata.__new__(Metadata)))
    bare = TensorStorageMetadata.__new__(TensorStorageMetadata)
    yield _made("class", "an empty tensor", _setting_item("state_dict_metadata", NAME, bare))


def _setting(owner: Callable[[DcpFolder], Any], field: str, value: Any) -> Change:
    return lambda folder: object.__setattr__(owner(folder), field, value)


def _setting_item(field: str, key: str, value: Any) -> Change:
    return lambda folder: getattr(folder.metadata, field).__setitem__(key, value)


def _renamed(name: Any) -> Change:
    key = tuple(name) if isinstance(name, list) else repr(name) if isinstance(name, dict) else name

    def change(folder: DcpFolder) -> None:
        found = folder.metadata.state_dict_metadata
        found[key if not isinstance(key, tuple) or not key or not isinstance(key[0], list) else ()] = found.pop(NAME)

    return change


def _payloads() -> Iterator[Case]:
    """Items that are no item, or of another tensor than the index says; found when their elements are read."""
    right = torch.arange(6.0, 12.0).reshape(2, 3)
    for name, item in {
        "another dtype": torch_bytes(right.double()),
        "another count": torch_bytes(right[:1]),
        "a number": torch_bytes(3.5),
        "two tensors": torch_bytes([right, right]),
        "a dict": torch_bytes({"w": right}),
        "a meta tensor": torch_bytes(right.to("meta")),
        "nothing": b"",
        "text": b"x" * 2000,
        "a pickle": pickle.dumps(right),
        "legacy": torch_bytes(right, _use_new_zipfile_serialization=False),
        "half an item": torch_bytes(right)[:600],
        "an item and more": torch_bytes(right) + bytes(100),
    }.items():
        yield _made("item content", name, _stored(item))
    columns, larger = right.t().contiguous().t(), torch.arange(12.0)[6:].reshape(2, 3)
    for name, item in {"columns": torch_bytes(columns), "in a larger storage": torch_bytes(larger)}.items():
        yield _made("item content", name, _stored(item), must_fail=False)


def _stored(item: bytes) -> Change:
    def change(folder: DcpFolder) -> None:
        file = folder.files["__1_0.distcp"]
        info = _StorageInfo("__1_0.distcp", len(file), len(item))
        folder.metadata.storage_data[MetadataIndex(NAME, torch.Size([2, 0]))] = info
        file += item

    return change
