"""Bytes that a loader would take for a file of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt_tools.serialization.zip_archive import ReadRange


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a part of one: ``place`` says where it is in ``file``, and ``start`` at which byte; None for data that
    came out of compressed bytes."""

    file: str
    place: str
    size: int
    read: ReadRange
    start: int | None = 0

    def part(self, start: int, stop: int, place: str) -> Piece:
        read = self.read
        inner = self._inner(place, stop - start)
        at = None if self.start is None else self.start + start
        return replace(inner, read=lambda first, last: read(start + first, start + last), start=at)

    def holding(self, data: bytes, place: str) -> Piece:
        """``data``, which came out of this."""
        inner = self._inner(place, len(data))
        return replace(inner, read=lambda start, stop: data[start:stop], start=None)

    def held(self) -> Piece:
        """The same, read at once."""
        data = self.whole()
        return replace(self, read=lambda start, stop: data[start:stop])

    def within(self, place: str) -> str:
        """Position of ``place`` in the file."""
        return ", ".join(filter(None, (self.place, place)))

    @property
    def region(self) -> tuple[int, int] | None:
        """Its first byte in the file and its size, where that is known."""
        return None if self.start is None else (self.start, self.size)

    def head(self, num_bytes: int) -> bytes:
        return self.read(0, min(num_bytes, self.size))

    def whole(self) -> bytes:
        return self.read(0, self.size)

    def _inner(self, place: str, size: int) -> Piece:
        return replace(self, place=self.within(place), size=size)
