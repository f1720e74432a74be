"""Items of a DCP that equal a proven one, except for elements of tensors, torch's id of the file, and their checksums.

A DCP has as many items as tensors, and most of them differ in nothing else, so that comparing bytes takes the place of
a proof. Conditions on the bytes that differ are checked again: elements do not begin as an array of numpy, the id is
digits, and the two places of a checksum agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.serialization.zip_archive import CENTRAL, DESCRIPTOR_FOLLOWS, LOCAL, ZipDirectory
from ckpt_tools.verification.scan.strict_zip import ARRAY_MAGIC

MAX_TEMPLATES = 16
"""Proven items of one size that others are compared with."""

_LOCAL_CHECKSUM, _CENTRAL_CHECKSUM, _DESCRIPTOR_CHECKSUM = 14, 16, 4
"""Offsets of a checksum, in bytes from the start of a header or descriptor."""


@dataclass(frozen=True, slots=True)
class _ItemTemplate:
    """``fixed_parts`` are the bytes that must be the same, by their position; ``element_starts`` are starts of
    storages, ``id_ranges`` ranges of ids, and ``checksum_pairs`` pairs of positions of the same checksum."""

    directory_start: int
    fixed_parts: tuple[tuple[int, bytes], ...]
    element_starts: tuple[int, ...]
    id_ranges: tuple[tuple[int, int], ...]
    checksum_pairs: tuple[tuple[int, int], ...]

    def does_match(self, data: bytes) -> bool:
        return (
            all(data.startswith(part, at) for at, part in self.fixed_parts)
            and all(data[one : one + 4] == data[other : other + 4] for one, other in self.checksum_pairs)
            and all(data[start:stop].isdigit() for start, stop in self.id_ranges)
            and not any(data.startswith(ARRAY_MAGIC, at) for at in self.element_starts)
        )


class ProvenItems:
    """Proven items, by their size."""

    def __init__(self) -> None:
        self._templates: defaultdict[int, list[_ItemTemplate]] = defaultdict(list)

    def find_directory(self, data: bytes) -> int | None:
        """Start of the directory of an item that is like a proven one; None if it has to be proved."""
        return next(
            (each.directory_start for each in self._templates.get(len(data), ()) if each.does_match(data)), None
        )

    def add_item(self, data: bytes, directory: ZipDirectory, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Keep a proven item; ``ranges`` are those of its records."""
        templates = self._templates[len(data)]
        if len(templates) == MAX_TEMPLATES:
            return
        # Elements of storages, torch's id of the file, and the checksums of both vary, and all bytes between are fixed.
        # A checksum stands with its record and in the directory:
        #     | fixed | elements | checksum | fixed | id | checksum | fixed | checksum | fixed | checksum | fixed |
        storage_ranges = {name: span for name, span in ranges.items() if "/data/" in name}
        id_ranges = {name: span for name, span in ranges.items() if name.endswith("/.data/serialization_id")}
        variable_ranges = storage_ranges | id_ranges
        pairs = [pair for name, pair in _iter_checksum_positions(data, directory, ranges) if name in variable_ranges]
        variable_spans = sorted([*variable_ranges.values(), *((at, at + 4) for pair in pairs for at in pair)])
        starts = [0, *(stop for _, stop in variable_spans)]
        stops = [*(start for start, _ in variable_spans), len(data)]
        fixed_parts = tuple((at, data[at:stop]) for at, stop in zip(starts, stops, strict=True))
        element_starts = tuple(start for start, _ in storage_ranges.values())
        templates.append(
            _ItemTemplate(directory.start, fixed_parts, element_starts, tuple(id_ranges.values()), tuple(pairs))
        )


def _iter_checksum_positions(
    data: bytes, directory: ZipDirectory, ranges: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Positions of the checksum of each record, behind or before its bytes and in the directory."""
    entry_start = directory.start
    for _ in directory.records:
        *_, name_bytes, extra_bytes, comment_bytes, _, _, _, _ = CENTRAL.unpack_from(data, entry_start)
        name = data[entry_start + CENTRAL.size : entry_start + CENTRAL.size + name_bytes].decode()
        header_start = directory.records[name].header_offset
        has_descriptor = LOCAL.unpack_from(data, header_start)[2] & DESCRIPTOR_FOLLOWS
        record_checksum = ranges[name][1] + _DESCRIPTOR_CHECKSUM if has_descriptor else header_start + _LOCAL_CHECKSUM
        yield name, (record_checksum, entry_start + _CENTRAL_CHECKSUM)
        entry_start += CENTRAL.size + name_bytes + extra_bytes + comment_bytes
