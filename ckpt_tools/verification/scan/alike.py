"""Items of a DCP that equal a proven one, except for elements of tensors, torch's id of the file, and their checksums.

A DCP has as many items as tensors, and most of them differ in nothing else, so that comparing bytes takes the place of
a proof. Conditions on the bytes that differ are checked again: elements do not begin as an array of numpy, the id is
digits, and the two places of a checksum agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.serialization.zip_archive import CENTRAL, DESCRIPTOR_FOLLOWS, LOCAL, Directory
from ckpt_tools.verification.scan.strict_zip import ARRAY_MAGIC

MAX_TEMPLATES = 16
"""Proven items of one size that others are compared with."""

_LOCAL_CHECKSUM, _CENTRAL_CHECKSUM, _DESCRIPTOR_CHECKSUM = 14, 16, 4
"""Offsets of a checksum, in bytes from the start of a header or descriptor."""


@dataclass(frozen=True, slots=True)
class _Template:
    """``fixed`` are the bytes that must be the same, by their position; ``elements`` are starts of storages, ``ids``
    ranges of ids, and ``checksums`` pairs of positions of the same checksum."""

    directory: int
    fixed: tuple[tuple[int, bytes], ...]
    elements: tuple[int, ...]
    ids: tuple[tuple[int, int], ...]
    checksums: tuple[tuple[int, int], ...]

    def fits(self, data: bytes) -> bool:
        return (
            all(data.startswith(part, at) for at, part in self.fixed)
            and all(data[one : one + 4] == data[other : other + 4] for one, other in self.checksums)
            and all(data[start:stop].isdigit() for start, stop in self.ids)
            and not any(data.startswith(ARRAY_MAGIC, at) for at in self.elements)
        )


class ProvenItems:
    """Proven items, by their size."""

    def __init__(self) -> None:
        self._templates: defaultdict[int, list[_Template]] = defaultdict(list)

    def directory_of(self, data: bytes) -> int | None:
        """Start of the directory of an item that is like a proven one; None if it has to be proved."""
        return next((each.directory for each in self._templates.get(len(data), ()) if each.fits(data)), None)

    def add(self, data: bytes, directory: Directory, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Keep a proven item; ``ranges`` are those of its records."""
        known = self._templates[len(data)]
        if len(known) == MAX_TEMPLATES:
            return
        storages = {name: span for name, span in ranges.items() if "/data/" in name}
        ids = {name: span for name, span in ranges.items() if name.endswith("/.data/serialization_id")}
        free = storages | ids
        pairs = [pair for name, pair in _checksums(data, directory, ranges) if name in free]
        holes = sorted([*free.values(), *((at, at + 4) for pair in pairs for at in pair)])
        starts = [0, *(stop for _, stop in holes)]
        stops = [*(start for start, _ in holes), len(data)]
        fixed = tuple((at, data[at:stop]) for at, stop in zip(starts, stops, strict=True))
        elements = tuple(start for start, _ in storages.values())
        known.append(_Template(directory.start, fixed, elements, tuple(ids.values()), tuple(pairs)))


def _checksums(
    data: bytes, directory: Directory, ranges: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Positions of the checksum of each record, behind or before its bytes and in the directory."""
    at = directory.start
    for _ in directory.records:
        *_, name_bytes, extra_bytes, comment_bytes, _, _, _, _ = CENTRAL.unpack_from(data, at)
        name = data[at + CENTRAL.size : at + CENTRAL.size + name_bytes].decode()
        header = directory.records[name].header_offset
        has_descriptor = LOCAL.unpack_from(data, header)[2] & DESCRIPTOR_FOLLOWS
        own = ranges[name][1] + _DESCRIPTOR_CHECKSUM if has_descriptor else header + _LOCAL_CHECKSUM
        yield name, (own, at + _CENTRAL_CHECKSUM)
        at += CENTRAL.size + name_bytes + extra_bytes + comment_bytes
