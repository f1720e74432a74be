"""The files of an output, each an ordered list of segments.

A writer says what every byte of its files will be without touching one. A ``Literal`` is known now, a ``Payload`` is a
region of a logical tensor, ``Padding`` is zeros, and a ``Crc32`` is four bytes that are known only once the range it
covers was written. Offsets follow from the order, so a layout cannot contradict itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, ClassVar, Protocol

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, StateKey, StateTree, TensorEntry
from ckpt_tools.core.notes import Note
from ckpt_tools.core.trainer_folder import FILE_SLOT, CompanionFile


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
        if not self.box.is_within(self.shape):
            raise ValueError(f"{self.key} of shape {self.shape} does not hold {self.box}")

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.dtype.item_bytes

    @property
    def is_whole(self) -> bool:
        return self.box.stop == self.shape and not any(self.box.start)


@dataclass(frozen=True, slots=True)
class Crc32:
    """The little-endian CRC-32 of the bytes ``[start, stop)`` of the same file, which lie before it.

    Several may stand for the same range; different ranges do not overlap, and none holds a checksum.
    """

    num_bytes: ClassVar[int] = 4
    start: int
    stop: int


Segment = Literal | Padding | Payload | Crc32


def merge_literals(segments: Iterable[Segment]) -> list[Segment]:
    """Segments of the same bytes, with neighbouring literals merged: a template is repeated a million times."""
    merged_segments: list[Segment] = []
    for segment in segments:
        if isinstance(segment, Literal) and merged_segments and isinstance(merged_segments[-1], Literal):
            merged_segments[-1] = Literal(merged_segments[-1].data + segment.data)
        else:
            merged_segments.append(segment)
    return merged_segments


class FileSpec(Protocol):
    """One output file of a known name and size, whose segments are made when they are needed."""

    @property
    def path(self) -> str:
        """Relative to the destination."""

    @property
    def size_bytes(self) -> int:
        """Known without its segments."""

    def load_layout(self) -> FileLayout:
        """The file with its segments."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file as its segments in order. ``path`` is relative to the destination."""

    path: str
    segments: tuple[Segment, ...]
    offsets: tuple[int, ...] = field(init=False)
    """Where each segment starts, and at last the size of the file."""

    def __post_init__(self) -> None:
        offsets = tuple(accumulate((segment.num_bytes for segment in self.segments), initial=0))
        object.__setattr__(self, "offsets", offsets)
        _check_checksum_ranges([(at, s) for at, s in zip(offsets, self.segments, strict=False) if isinstance(s, Crc32)])

    @property
    def size_bytes(self) -> int:
        return self.offsets[-1]

    def load_layout(self) -> FileLayout:
        return self


MAX_CACHED_LAYOUTS = 16
"""Files made on demand that are kept: more than are ever being written at once. One of a thousand tensors takes 1 MB
to 5 MB."""


class FileLayoutCache:
    """Makes the files of an output by number when they are needed, and keeps the latest of them."""

    def __init__(self, make: Callable[[int], FileLayout]) -> None:
        self._make_layout = make
        self._layouts: OrderedDict[int, FileLayout] = OrderedDict()
        self._lock = Lock()

    def get_layout(self, number: int) -> FileLayout:
        with self._lock:
            layout = self._layouts.pop(number, None) or self._make_layout(number)
            self._layouts[number] = layout
            if len(self._layouts) > MAX_CACHED_LAYOUTS:
                self._layouts.popitem(last=False)
            return layout

    def __reduce__(self) -> tuple[object, ...]:
        return FileLayoutCache, (self._make_layout,)


@dataclass(frozen=True, slots=True)
class LazyFile:
    """File number ``number`` of a cache, which makes its segments when they are needed."""

    path: str
    size_bytes: int
    number: int
    cache: FileLayoutCache = field(repr=False)

    def load_layout(self) -> FileLayout:
        return self.cache.get_layout(self.number)


def _check_checksum_ranges(positioned_crcs: Sequence[tuple[int, Crc32]]) -> None:
    """Check that every checksum can be computed from parts of its range as they are written."""
    assert all(0 <= crc.start <= crc.stop <= at for at, crc in positioned_crcs), (
        "a checksum comes after the bytes that it covers"
    )
    crc_ranges = [(at, at + crc.num_bytes) for at, crc in positioned_crcs]
    covered_ranges = {(crc.start, crc.stop) for _, crc in positioned_crcs if crc.start < crc.stop}
    ranges = sorted([*covered_ranges, *crc_ranges])
    assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "a checksum covers another, or a part of another's range"


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of an output, in the order in which they become visible.

    The last file makes the checkpoint valid: an index, ``.metadata``, ``latest``.
    """

    files: Sequence[FileSpec]
    notes: tuple[Note, ...] = ()
    """What the writer could not carry or had to make up."""
    copied_files: Mapping[StateKey, TensorEntry] | None = None
    """Small files of a trainer's folder as tensors of their bytes, by the keys of their payloads; None if no trainer's
    folder is written."""
    uncast_buffers: Collection[str] = ()
    """Names of buffers among the weights that are written in the dtype of the source."""
    tree: StateTree | None = None
    """The places of model and optimizer in the output, if it is a tree."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The content of ``config.json`` among the files."""

    def __post_init__(self) -> None:
        assert len({file.path for file in self.files}) == len(self.files), "two files have the same name"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def make_file_key(name: str) -> StateKey:
    """Key of the tensor that holds the bytes of the file that is copied as ``name``."""
    return StateKey(name, FILE_SLOT)


def make_file_entry(file: CompanionFile) -> TensorEntry:
    """A file that is copied as it is, as a tensor of its bytes."""
    return TensorEntry((file.num_bytes,), DType.UINT8, Kind.EXTRA, file.make_table())


def make_file_copy(name: str, file: CompanionFile) -> FileLayout:
    """The output file ``name`` with the bytes of ``file``."""
    shape = (file.num_bytes,)
    return FileLayout(name, (Payload(make_file_key(name), Box.whole(shape), shape, DType.UINT8),))
