"""An opened torch file, a zip or from before torch 1.6, and the storages that its pickle describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ckpt_tools.core.dtypes import from_torch_storage
from ckpt_tools.core.values import GlobalRef, StorageRef, Value
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.serialization.zip_archive import ZipRecord

MAX_PICKLE_BYTES: Final = 1 << 32
"""The pickle of a model of a million tensors takes 200 MB."""

_RANK_NUMBER: Final = re.compile(r"(?<![A-Za-z])(?:rank|layer|expert|model|consolidated|pp|tp|dp|exp)[_.-]?(\d{1,18})")


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """An opened torch file.

    ``value`` is the saved value, ``records`` are the zip's records by their name below the root folder, ``storages``
    the pickle's description of each storage. ``archive_name`` is the name of the zip's folder: torch takes that of the
    file that it writes, or ``archive``. A file before torch 1.6 is not a zip, and has neither records nor that name.
    """

    path: str
    value: Value = field(repr=False)
    records: Mapping[str, ZipRecord] = field(repr=False)
    storages: Mapping[str, StorageRef] = field(repr=False)
    _locate: LocateStorages = field(repr=False)
    archive_name: str = ""
    _ranges: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    def locate_storage(self, key: str) -> tuple[int, int]:
        """The bytes ``[start, stop)`` of the file that hold storage ``key``. Raises MalformedError."""
        if key not in self.locate_storages():
            raise MalformedError(f"storage {key!r} has no record", path=self.path)
        return self._ranges[key]

    def locate_storages(self) -> Mapping[str, tuple[int, int]]:
        """The bytes of every storage, by key. The first call reads their headers. Raises MalformedError."""
        if not self._ranges:
            self._ranges.update(self._locate())
        return self._ranges

    def check_rank(self) -> None:
        """Raises MalformedError where the file is another rank's: torch names an archive after the file that it writes,
        and often nothing else in a rank's file tells its rank."""
        ranks = _RANK_NUMBER.findall(self.path.rpartition("/")[2])
        archive_ranks = _RANK_NUMBER.findall(self.archive_name)
        if len(ranks) == len(archive_ranks) and list(map(int, ranks)) != list(map(int, archive_ranks)):
            why = f"it was saved as {self.archive_name}, so it is another rank's; give it its name back"
            raise MalformedError(why, path=self.path)


LocateStorages = Callable[[], Mapping[str, tuple[int, int]]]
"""Finds the bytes of every storage."""


_QUANTIZED_ITEM_BYTES: Final = {
    GlobalRef("torch", f"{name}Storage"): size
    for name, size in (("QInt8", 1), ("QUInt8", 1), ("QInt32", 4), ("QUInt4x2", 1), ("QUInt2x4", 1))
}
"""Storages of quantized tensors, with the bytes of an element: opened, so that messages can name the tensor."""


def register_storage(storage_by_key: dict[str, StorageRef], storage: StorageRef) -> StorageRef:
    """The storage of this key. Raises MalformedError if it was described in another way before."""
    if storage_by_key.setdefault(storage.key, storage) != storage:
        raise MalformedError(f"storage {storage.key!r} is described in two ways")
    return storage_by_key[storage.key]


def parse_storage_id(pid: Value) -> StorageRef:
    """``("storage", class, key, location, numel)``; torch < 1.6 had a sixth item, for views of storages."""
    if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or type(pid[1]) is not GlobalRef:
        raise MalformedError("a storage is not described in torch's way")
    _, storage_class, key, location, numel = pid[:5]
    if storage_class.name == "UntypedStorage":
        return StorageRef(key, None, numel, location)
    if storage_class in _QUANTIZED_ITEM_BYTES:
        return StorageRef(key, None, numel * _QUANTIZED_ITEM_BYTES[storage_class], location)
    dtype = from_torch_storage(storage_class.name)
    if dtype is None or storage_class.module not in ("torch", "torch.storage", "torch.cuda"):
        raise UnsupportedError(f"a storage is a {storage_class}, which is not supported")
    return StorageRef(key, dtype, numel, location)
