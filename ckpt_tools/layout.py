"""What an output is: files, each an ordered list of segments.

A writer says what every byte of its files will be without touching one. A ``Literal`` is known now, a ``Payload`` is a
region of a logical tensor, ``Padding`` is zeros, and a ``Crc32`` is four bytes that are known only once the range it
covers was written. Offsets follow from the order, so a layout cannot contradict itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ckpt_tools.boxes import Box, Shape
from ckpt_tools.dtypes import DType
from ckpt_tools.ledger import Note
from ckpt_tools.manifest import StateKey


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes known when the layout is made."""

    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Padding:
    """Zeros."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Payload:
    """The elements of ``box``, row-major, as ``dtype``.

    ``shape`` is the geometry of the box: the tensor's own shape, or its flattening ``(numel,)``.
    """

    key: StateKey
    box: Box
    shape: Shape
    dtype: DType

    def __post_init__(self) -> None:
        if not self.box.within(self.shape):
            raise ValueError(f"{self.key} of shape {self.shape} does not hold {self.box}")

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.dtype.item_bytes


@dataclass(frozen=True, slots=True)
class Crc32:
    """The little-endian CRC-32 of the bytes ``[start, stop)`` of the same file, which lie before it.

    Several may stand for the same range; different ranges do not overlap, and none holds a checksum.
    """

    start: int
    stop: int
    num_bytes: int = field(default=4, init=False)


Segment = Literal | Padding | Payload | Crc32


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One output file: ``path`` relative to the destination, and its segments in order."""

    path: str
    segments: tuple[Segment, ...]
    offsets: tuple[int, ...] = field(init=False)
    """Where each segment starts, and at last the size of the file."""

    def __post_init__(self) -> None:
        offsets = tuple(accumulate((segment.num_bytes for segment in self.segments), initial=0))
        object.__setattr__(self, "offsets", offsets)
        _check_checksums([(at, s) for at, s in zip(offsets, self.segments, strict=False) if isinstance(s, Crc32)])

    @property
    def size_bytes(self) -> int:
        return self.offsets[-1]


def _check_checksums(placed: Sequence[tuple[int, Crc32]]) -> None:
    """Every checksum can be computed from parts of its range as they are written."""
    assert all(0 <= crc.start <= crc.stop <= at for at, crc in placed), "a checksum lies after what it covers"
    known_late = [(at, at + crc.num_bytes) for at, crc in placed]
    covered = {(crc.start, crc.stop) for _, crc in placed if crc.start < crc.stop}
    ranges = sorted([*covered, *known_late])
    assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "a checksum covers another, or a part of another's range"


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of an output, in the order in which they become visible.

    The last is the one that makes the checkpoint valid (an index, ``.metadata``, ``latest``). ``notes`` say what the
    writer could not carry or had to make up.
    """

    files: Sequence[FileLayout]
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        assert len({file.path for file in self.files}) == len(self.files), "two files of one name"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)
