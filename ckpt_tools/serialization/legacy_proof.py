"""Files of torch before 1.6, read strictly: five pickles, then each storage's number of elements and its bytes.

Facts from torch/serialization.py ``_legacy_save``. Storages that are pickled outside of torch.save are such files too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ckpt_tools.core.values import StorageRef, Value
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.serialization.pickle.machine import PersistentLoad
from ckpt_tools.serialization.pickle.proof import Proof, UnfinishedError, prove
from ckpt_tools.serialization.torch_zip import MAX_PICKLE_BYTES, described_storage
from ckpt_tools.serialization.zip_archive import ReadRange

MAGIC_NUMBER, PROTOCOL_VERSION = 0x1950A86A20F9469CFC6C, 1001
"""torch/serialization.py MAGIC_NUMBER: the first of the five pickles."""

_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAGIC_ENDS = 32

FIRST_READ_BYTES = 1 << 16
"""Most pickles are smaller: one read. Others take a read of eight times as much until they fit."""


def is_legacy(head: bytes) -> bool:
    """Whether a file that starts so starts with the magic number, in whatever protocol."""
    return _MAGIC in head[:_MAGIC_ENDS]


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """What was saved, and the proofs of the five pickles."""

    value: Value
    proofs: tuple[Proof, ...]


def read_legacy(read: ReadRange, size: int, path: str, *, allowed: Collection[str] = ()) -> LegacyFile:
    """The legacy file of ``size`` bytes, of which every byte is accounted for.

    Raises:
        FormatError: it is none, damaged, or not as torch writes it.
    """
    storages: dict[str, StorageRef] = {}

    def resolve(pid: Value) -> StorageRef:
        if type(pid) is not tuple or len(pid) != 6 or pid[5] is not None:
            raise UnsupportedError("a storage is a view of another, as torch before 0.4 wrote them")
        storage = described_storage(pid)
        if storages.setdefault(storage.key, storage) != storage:
            raise MalformedError(f"storage {storage.key!r} is described in two ways")
        return storage

    at, proofs = 0, list[Proof]()
    for number in range(5):
        proof = first_pickle(read, at, size, path, resolve if number == 3 else None, allowed)
        at += proof.stop
        proofs.append(proof)
    magic, protocol, system, value, keys = (proof.value for proof in proofs)
    _check_head(magic, protocol, system, path)
    _check_storages(read, at, size, keys, storages, path)
    return LegacyFile(value, tuple(proofs))


def first_pickle(
    read: ReadRange,
    at: int,
    size: int,
    path: str,
    persistent_load: PersistentLoad | None = None,
    allowed: Collection[str] = (),
) -> Proof:
    """The pickle at byte ``at`` of several. Raises FormatError."""
    num_bytes = FIRST_READ_BYTES
    while True:
        data = read(at, min(at + num_bytes, size))
        try:
            return prove(data, path=path, persistent_load=persistent_load, allowed=allowed, is_prefix=True)
        except MalformedError as error:
            if at + num_bytes >= size or num_bytes > MAX_PICKLE_BYTES or not _may_be_cut(error):
                raise
        num_bytes *= 8


def _may_be_cut(error: MalformedError) -> bool:
    return isinstance(error, UnfinishedError) or error.message.endswith(
        ("ends early", "longer than the data", "not end")
    )


def _check_head(magic: Value, protocol: Value, system: Value, path: str) -> None:
    if magic != MAGIC_NUMBER or protocol != PROTOCOL_VERSION or type(system) is not dict:
        raise MalformedError("it is not a file of torch.save", path=path)
    if system.get("little_endian") is False:
        raise UnsupportedError("it was written on a big-endian machine", path=path)
    if system.get("little_endian") is not True or system.get("protocol_version") != PROTOCOL_VERSION:
        raise MalformedError("it is not a file of torch.save", path=path)


def _check_storages(
    read: ReadRange, at: int, size: int, keys: Value, storages: dict[str, StorageRef], path: str
) -> None:
    if type(keys) is not list or sorted(map(str, keys)) != sorted(storages):
        raise MalformedError("its list of storages is not that of its tensors", path=path)
    for key in keys:
        storage = storages[key]
        item_bytes = storage.dtype.item_bytes if storage.dtype else 1
        stated = int.from_bytes(read(at, min(at + 8, size)), "little")
        at += 8 + storage.num_bytes
        if stated * item_bytes != storage.num_bytes or at > size:
            raise MalformedError(f"storage {key!r} does not have the size that its tensors state", path=path)
    if at != size:
        raise MalformedError(f"{size - at:,} bytes follow its last storage", path=path)


def inner_storage(data: bytes, path: str) -> StorageRef:
    """The storage that ``torch.storage._load_from_bytes`` would make of ``data``. Raises FormatError."""
    found = read_legacy(lambda start, stop: data[start:stop], len(data), path)
    refusals = [refusal for proof in found.proofs for refusal in proof.refusals]
    if refusals or type(found.value) is not StorageRef:
        raise MalformedError(f"bytes that should hold a storage hold something else: {refusals[0].what}" if refusals
                             else "bytes that should hold a storage hold something else", path=path)  # fmt: skip
    return found.value
