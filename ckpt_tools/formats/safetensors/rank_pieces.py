"""safetensors of torch's DCP, in which each rank wrote a file of its own pieces.

``HuggingFaceStorageWriter(save_distributed=True)`` (torch 2.15.0, distributed/checkpoint/hf_storage.py) names files
``shard-<rank + 1>-model-<i>-of-<n>.safetensors`` and states in each header's metadata where its pieces begin:
``DCP_SHARDING_INFO`` is JSON, ``{name: {"saved_offsets": [...]}}``. There is no index, and no file has the whole shape
of a tensor: it ends with its last piece, as torch's own reader takes it. A lost last file can therefore not be
told from a smaller model; a lost one before it is a gap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable, check_exact_cover
from ckpt_tools.core.values import are_naturals
from ckpt_tools.errors import CkptError, IncompleteError, MalformedError
from ckpt_tools.serialization.strict_json import parse_json

OFFSETS_KEY = "DCP_SHARDING_INFO"
VERSION_KEY = "DCP_VERSION"

_FILE_NAME = re.compile(r"shard-(\d{1,9})-model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class RankPiece:
    """A box of a tensor, starting at ``start``, as one file holds it."""

    dtype: DType
    start: tuple[int, ...]
    extents: tuple[int, ...]
    byte_range: ByteRange

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.extents, strict=True))


def is_rank_shard_name(path: str) -> bool:
    return _FILE_NAME.fullmatch(path) is not None


def check_all_ranks_present(paths: Iterable[str]) -> None:
    """Every rank up to the last has its file. Raises IncompleteError."""
    numbers = {int(match[1]): path for path in paths if (match := _FILE_NAME.fullmatch(path))}
    for number in range(1, max(numbers, default=0)):
        if number not in numbers:
            missing = re.sub(r"shard-\d+", f"shard-{number:05d}", numbers[max(numbers)])
            raise IncompleteError("the shard of this rank is missing", path=missing)


def parse_offsets(metadata: Mapping[str, str], path: str) -> Mapping[str, tuple[int, ...]]:
    """Starts of the pieces of a file, by name. Raises MalformedError."""
    if OFFSETS_KEY not in metadata:
        raise MalformedError(f"a shard of a rank needs {OFFSETS_KEY} in its metadata", path=path)
    sharding_info = parse_json(metadata[OFFSETS_KEY].encode(), path)
    pieces = sharding_info.items() if isinstance(sharding_info, dict) else ()
    offsets = {name: piece.get("saved_offsets") if isinstance(piece, dict) else None for name, piece in pieces}
    are_valid = all(isinstance(each, list) and are_naturals(each, None) for each in offsets.values())
    if not isinstance(sharding_info, dict) or not are_valid:
        raise MalformedError(f"its {OFFSETS_KEY} does not map names to saved_offsets", path=path)
    return {name: tuple(offset) for name, offset in offsets.items() if offset is not None}


def make_rank_piece(
    name: str, dtype: DType, extents: tuple[int, ...], byte_range: ByteRange, offsets: Mapping[str, tuple[int, ...]]
) -> RankPiece:
    """The piece that a tensor of a file is. Raises MalformedError if ``offsets`` do not have its start."""
    start = offsets.get(name)
    if start is None or len(start) != len(extents):
        raise MalformedError(f"its {OFFSETS_KEY} has no offsets for this tensor", path=byte_range.file, key=name)
    return RankPiece(dtype, start, extents, byte_range)


def join_pieces(name: str, pieces: list[RankPiece]) -> ShardTable:
    """One tensor from its pieces; empty ones, which all begin where another ends, count for its shape alone.

    Raises:
        MalformedError: they are of different types or dims, or one overlaps another. IncompleteError: one is missing.
    """
    first = pieces[0]
    if any((piece.dtype, len(piece.start)) != (first.dtype, len(first.start)) for piece in pieces):
        raise MalformedError(
            "its pieces in the ranks' files differ in dtype or dims", path=first.byte_range.file, key=name
        )
    shape = tuple(max(ends) for ends in zip(*(piece.stop for piece in pieces), strict=True))
    shards = [Shard(Box(piece.start, piece.stop), piece.byte_range) for piece in pieces if 0 not in piece.extents]
    try:
        table = ShardTable.build(shape, first.dtype, shards)
        check_exact_cover(table)
    except MalformedError as error:
        why = f"{error.message}; files of an earlier save by more ranks may be among them, which torch does not remove"
        raise MalformedError(why, path=pieces[-1].byte_range.file, key=name) from error
    except CkptError as error:
        raise type(error)(error.message, path=error.path, key=name) from error
    return table
