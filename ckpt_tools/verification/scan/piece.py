"""Bytes that a loader would take for a file of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt_tools.serialization.zip_archive import ReadRange


@dataclass(frozen=True, slots=True)
class FileView:
    """A file, or a part of one: ``place`` says where it is in ``file``, and ``start`` at which byte; None for data that
    came out of compressed bytes."""

    file: str
    place: str
    size: int
    read: ReadRange
    start: int | None = 0

    def slice_range(self, start: int, stop: int, place: str) -> FileView:
        """A view of the bytes from ``start`` to ``stop``."""
        read_file = self.read
        subview = self._make_subview(place, stop - start)
        absolute_start = None if self.start is None else self.start + start
        return replace(subview, read=lambda first, last: read_file(start + first, start + last), start=absolute_start)

    def wrap_data(self, data: bytes, place: str) -> FileView:
        """A view of ``data``, which was decompressed from this."""
        subview = self._make_subview(place, len(data))
        return replace(subview, read=lambda start, stop: data[start:stop], start=None)

    def load_into_memory(self) -> FileView:
        """The same view, whose bytes are read at once."""
        content = self.read_all()
        return replace(self, read=lambda start, stop: content[start:stop])

    def join_place(self, place: str) -> str:
        """Position of ``place`` in the file."""
        return ", ".join(filter(None, (self.place, place)))

    @property
    def region(self) -> tuple[int, int] | None:
        """The first byte of a part in its file, and its size; None for a whole file, and where they are not known."""
        return (self.start, self.size) if self.start is not None and self.place else None

    def read_head(self, num_bytes: int) -> bytes:
        return self.read(0, min(num_bytes, self.size))

    def read_all(self) -> bytes:
        return self.read(0, self.size)

    def _make_subview(self, place: str, size: int) -> FileView:
        return replace(self, place=self.join_place(place), size=size)
