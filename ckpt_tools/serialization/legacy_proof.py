"""Proof that loading a file of torch before 1.6 runs no code: five pickles are proven, and no byte is left over.

Storages that are pickled outside of torch.save are such files too.
"""

from __future__ import annotations

from collections.abc import Collection

from ckpt_tools.core.values import StorageRef
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.serialization.pickle.machine import PersistentLoad
from ckpt_tools.serialization.pickle.proof import Proof, prove_pickle
from ckpt_tools.serialization.torch_legacy import read_legacy
from ckpt_tools.serialization.zip_archive import ReadRange


def prove_legacy(read: ReadRange, size: int, path: str, *, allowed: Collection[str] = ()) -> list[Proof]:
    """The proofs of the five pickles of the legacy file of ``size`` bytes; the fourth is that of its value.

    Raises:
        FormatError: it is not a legacy file, is damaged, or not as torch writes it since 0.4.
    """
    proofs: list[Proof] = []

    def prove_first_pickle(data: bytes, persistent_load: PersistentLoad | None) -> Proof:
        proofs.append(prove_pickle(data, path=path, persistent_load=persistent_load, allowed=allowed, is_prefix=True))
        return proofs[-1]

    _, storages = read_legacy(read, size, path, prove_first_pickle)
    if storages.has_views:
        raise UnsupportedError("a storage is a view of another, as torch before 0.4 wrote them", path=path)
    if storages.has_sources:
        raise UnsupportedError("it holds an object with the source of its class, not data alone", path=path)
    storages.locate_roots(read, path)
    return proofs


def prove_inner_storage(data: bytes, path: str) -> StorageRef:
    """The storage that ``torch.storage._load_from_bytes`` would make of ``data``. Raises FormatError."""
    proofs = prove_legacy(lambda start, stop: data[start:stop], len(data), path)
    refusals = [refusal for proof in proofs for refusal in proof.refusals]
    if refusals:
        raise MalformedError(f"bytes that should hold a storage hold something else: {refusals[0].reason}", path=path)
    if type(proofs[3].value) is not StorageRef:
        raise MalformedError("bytes that should hold a storage hold something else", path=path)
    return proofs[3].value
