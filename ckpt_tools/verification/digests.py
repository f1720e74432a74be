"""Digests of logical tensors, and the file that lists them.

A digest is over the elements of a whole tensor, row-major, as the little-endian bytes of its dtype. It does not depend
on the format, on how many ranks wrote the tensor or on how it was cut, so that the digests of a checkpoint are those
of everything converted from it without a cast. XXH3-128 is there for speed (25 GB/s a core; it finds any accident),
BLAKE3 against intent (4 GB/s a core; no other bytes with the same digest can be found).

The list is JSON, sorted by name, and is made by reading back what was written: it tells what is there, not what was
meant. A folder holds it as ``ckpt-tools.digests.json``, in the folder of the tag where there are tags; beside a
single file it is ``<file>.digests.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType, from_torch
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest, StateKey, TensorEntry
from ckpt_tools.errors import FormatError, MalformedError, UnsupportedError
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.local.direct import bypass_cache_if_large
from ckpt_tools.stores.output_names import DIGESTS_NAME
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.trainers.accelerate import find_numbered_model
from ckpt_tools.transfer.buffers import allocate_page_aligned
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.tensor_reader import TensorReader
from ckpt_tools.verification.compare import map_named_tensors
from ckpt_tools.verification.report import Aspect, Difference

LIST_FORMAT = "ckpt-tools digests"
LIST_VERSION = 1

BLOCK_BYTES = 1 << 20
"""Read and hashed at a time. BLAKE3 of 256 MB by two threads: 5.6 GB/s by 256 KiB, 7.5 by 1 MiB, 8.3 by 4 MiB; a block
of 1 MiB is still in the cache for the second digest, and fits the smallest memory budget."""

MAX_LIST_BYTES = 512 << 20
"""A million tensors at 350 bytes; no list is larger."""

_HEX_FORMS = {"xxh3_128": re.compile("[0-9a-f]{32}"), "blake3": re.compile("[0-9a-f]{64}")}
"""In a list: the big-endian canonical form of an XXH3-128, and the first 32 bytes of a BLAKE3."""


@dataclass(frozen=True, slots=True)
class Digest:
    """Description of a tensor and the digests of its bytes in hexadecimal.

    Raises:
        ValueError: a digest is not of its form.
    """

    dtype: DType
    shape: Shape
    xxh3_128: str
    blake3: str

    def __post_init__(self) -> None:
        for name, form in _HEX_FORMS.items():
            if not form.fullmatch(getattr(self, name)):
                raise ValueError(f"{getattr(self, name)!r} is not a valid {name}")


Digests = Mapping[StateKey, Digest]
OnBytes = Callable[[int], None]


def compute_digests(
    store: Store, manifest: Manifest, *, num_workers: int, on_bytes: OnBytes, compares_records: bool = True
) -> dict[StateKey, Digest]:
    """The digests of every tensor, weights and masters by every name they have. A tensor is hashed from start to
    end by one thread, ``num_workers`` tensors at once, each in blocks of 1 MiB.

    Raises:
        CkptError: a tensor cannot be read, or has a wrong CRC-32 and ``compares_records``.
    """
    by_key: dict[StateKey, Digest] = {}
    bypass_cache_if_large(store, sum(entry.num_bytes for entry in manifest.tensors.values()))
    reader = TensorReader(store, BLOCK_BYTES, compares_records)

    def hash_tensor(key: StateKey) -> tuple[StateKey, Digest]:
        return key, _hash_tensor(reader, manifest.tensors[key])

    for key, digest in ThreadRunner(num_workers).run(hash_tensor, list(manifest.tensors)):
        by_key[key] = digest
        on_bytes(manifest.tensors[key].num_bytes)
    reader.check_remaining_records()
    by_entry = {id(entry): by_key[key] for key, entry in manifest.tensors.items()}
    digests_by_key = {key: by_entry[id(entry)] for key, entry in map_named_tensors(manifest).items()}
    master_digests = {
        StateKey(alias, MASTER): digests_by_key.get(StateKey(owner, MASTER))
        for alias, owner in manifest.aliases.items()
    }
    return digests_by_key | {key: digest for key, digest in master_digests.items() if digest is not None}


def count_hashed_bytes(manifest: Manifest) -> int:
    """Number of bytes to hash."""
    return sum(entry.num_bytes for entry in manifest.tensors.values())


def _hash_tensor(tensor_reader: TensorReader, entry: TensorEntry) -> Digest:
    from blake3 import blake3
    from xxhash import xxh3_128

    xxh3_hasher, blake3_hasher = xxh3_128(), blake3()
    for block in _read_blocks(tensor_reader, entry):
        xxh3_hasher.update(block)
        blake3_hasher.update(block)
    return Digest(entry.dtype, entry.shape, xxh3_hasher.hexdigest(), blake3_hasher.hexdigest())


def _read_blocks(tensor_reader: TensorReader, entry: TensorEntry) -> Iterator[memoryview]:
    """The elements in order. A block is overwritten by the next."""
    item_bytes = entry.dtype.item_bytes
    block_numel = BLOCK_BYTES // item_bytes
    buffer = allocate_page_aligned(min(entry.num_bytes, block_numel * item_bytes)).data
    for start in range(0, entry.numel, block_numel):
        stop = min(start + block_numel, entry.numel)
        block = buffer[: (stop - start) * item_bytes]
        tensor_reader.read(entry, Box.whole(entry.shape), entry.shape, start, stop, block)
        yield block


def compare_digests(expected: Digests, actual: Digests) -> Iterator[Difference]:
    """The differences between the digests of a checkpoint and a recorded list."""
    for key, expected_digest in expected.items():
        if key not in actual:
            yield Difference(key, Aspect.MISSING, "it is in the list of digests but not in the checkpoint")
        elif (mismatch := _find_mismatch(expected_digest, actual[key])) is not None:
            yield Difference(key, *mismatch)
    for key in actual:
        if key not in expected:
            yield Difference(key, Aspect.UNEXPECTED, "it is not in the list of digests")


def select_one_copy(digests: Digests, *, weights: str) -> dict[StateKey, Digest]:
    """The list of the same checkpoint with one copy of each weight, as ``keep_one_copy`` chooses it."""
    kept = {key: digest for key, digest in digests.items() if key.slot != MASTER}
    if weights == "model":
        return kept
    return {key: digests.get(key._replace(slot=MASTER), d) if key.slot == WEIGHT else d for key, d in kept.items()}


def _find_mismatch(expected: Digest, actual: Digest) -> tuple[Aspect, str] | None:
    if expected.shape != actual.shape:
        return Aspect.SHAPE, f"shape {list(actual.shape)}; the list of digests has {list(expected.shape)}"
    if expected.dtype is not actual.dtype:
        return Aspect.DTYPE, f"{actual.dtype.value}; the list of digests has {expected.dtype.value}"
    mismatched_hashes = [name for name in _HEX_FORMS if getattr(expected, name) != getattr(actual, name)]
    return (
        (Aspect.DIGEST, f"its elements do not match the recorded {' and '.join(mismatched_hashes)}")
        if mismatched_hashes
        else None
    )


def format_digest_list(digests: Digests) -> bytes:
    """The list as JSON, the same bytes for the same tensors."""
    row_lines = ",\n".join(json.dumps(row) for row in build_digest_rows(digests))
    header = f'{{"format": {json.dumps(LIST_FORMAT)}, "version": {LIST_VERSION}, "tensors": [\n'
    return f"{header}{row_lines}\n]}}\n".encode()


def build_digest_rows(digests: Digests) -> list[dict[str, Any]]:
    """The entries of the list, in its order."""
    return [
        {"name": key.fqn, "slot": key.slot, "dtype": digest.dtype.value, "shape": list(digest.shape)}
        | {name: getattr(digest, name) for name in _HEX_FORMS}
        for key, digest in sorted(digests.items())
    ]


def parse_digest_list(data: bytes, path: str) -> dict[StateKey, Digest]:
    """The list of digests in ``data``.

    Raises:
        MalformedError: it is not a list of digests, or names a tensor twice. UnsupportedError: its version is later.
    """
    document = parse_json(data, path)
    if (
        not isinstance(document, dict)
        or document.get("format") != LIST_FORMAT
        or not isinstance(document.get("tensors"), list)
    ):
        raise MalformedError("it is not a list of digests", path=path)
    if document.get("version") != LIST_VERSION:
        raise UnsupportedError(
            f"it is version {document.get('version')!r} of its format; only version {LIST_VERSION} is supported",
            path=path,
        )
    digests: dict[StateKey, Digest] = {}
    for row in document["tensors"]:
        key, digest = _parse_row(row, path)
        if key in digests:
            raise MalformedError("it has two digests", path=path, key=str(key))
        digests[key] = digest
    return digests


def _parse_row(row: Any, path: str) -> tuple[StateKey, Digest]:
    text_fields = ("name", "slot", "dtype", *_HEX_FORMS)
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in text_fields):
        raise MalformedError("an entry has no name, slot, dtype or digests", path=path)
    key, dtype, shape = StateKey(row["name"], row["slot"]), from_torch(row["dtype"]), row.get("shape")
    if dtype is None or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise MalformedError(f"there is no tensor of {row['dtype']} and shape {shape}", path=path, key=str(key))
    try:
        return key, Digest(dtype, tuple(shape), row["xxh3_128"], row["blake3"])
    except ValueError as error:
        raise MalformedError(str(error), path=path, key=str(key)) from error


def is_digest_list(source: Source, path: str) -> bool:
    """True if a file is a list of digests, of this or a later version. Raises StoreError."""
    try:
        read_digest_list(source, path)
    except UnsupportedError:
        return True
    except FormatError:
        return False
    return True


def locate_digest_list(manifest: Manifest) -> str:
    """The name that the list has in the folder of a checkpoint: in the folder of the tag, where all tensors are in one,
    and in that of the model, where it is not the first of several.

    ``zero`` is not a tag: it holds the tensors of a universal checkpoint whose tag folder was opened.
    """
    top_folders = {
        table.files[number].rpartition("/")[0].partition("/")[0]
        for table in (entry.shards for entry in manifest.tensors.values())
        for number in np.unique(table.file_ids).tolist()
        if table.files[number] not in manifest.literals
    }
    (top_folder,) = top_folders if len(top_folders) == 1 else {find_numbered_model(top_folders)}
    return f"{top_folder}/{DIGESTS_NAME}" if top_folder not in ("", "zero") else DIGESTS_NAME


def read_digest_list(source: Source, path: str) -> dict[StateKey, Digest]:
    """The list in a file of ``source``. Raises as ``parse_digest_list``, and IncompleteError if it is missing."""
    return parse_digest_list(source.read_all(path, limit_bytes=MAX_LIST_BYTES), path)
