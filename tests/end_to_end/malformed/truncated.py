"""Files that end early, at every boundary of their structure and one byte off; files that are missing or empty."""

from __future__ import annotations

import json
import pickletools
import struct
from collections.abc import Iterator

from ckpt_tools.errors import FormatError, SourceNotFoundError
from tests.end_to_end.fuzzing.seeds import SEEDS
from tests.end_to_end.malformed.case import Case, family_of, seed

MAX_CUTS = 60
"""Of one file, spread evenly over its boundaries."""

COMPANIONS = ("scheduler.pt", "trainer_state.json")
"""Files beside a checkpoint, whose damage is noted."""


def cases() -> Iterator[Case]:
    for name in SEEDS:
        yield from _truncated(name)
        yield from _missing(name)


def _truncated(name: str) -> Iterator[Case]:
    for path, data in seed(name).items():
        fails = path not in (*COMPANIONS, "latest", "latest_universal")
        cuts = sorted({cut for at in boundaries(data) for cut in (at - 1, at, at + 1) if 0 <= cut < len(data)})
        for cut in cuts[:: -(-len(cuts) // MAX_CUTS)]:
            files = {**seed(name), path: data[:cut]}
            yield Case(family_of(name), "truncated", f"{name} {path} at {cut}", files, must_fail=fails)


def _missing(name: str) -> Iterator[Case]:
    errors = (FormatError, SourceNotFoundError)
    for path in seed(name):
        rest = {other: data for other, data in seed(name).items() if other != path}
        yield Case(family_of(name), "missing", f"{name} {path}", rest, errors, must_fail=False)
    yield Case(family_of(name), "missing", f"{name}: everything", {}, errors)


def boundaries(data: bytes) -> set[int]:
    """Where the parts of a file begin."""
    found = {0, len(data)}
    for magic in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08"):
        at = data.find(magic)
        while at >= 0:
            found |= {at, at + 4, at + 22, at + 30, at + 46}
            at = data.find(magic, at + 1)
    if data[:1] == b"\x80":
        found |= {at for _, _, at in pickletools.genops(data) if at is not None}
    if data[:1] == b"{":
        found |= {at for at, byte in enumerate(data) if byte in b'{}[]:,"'}
    if data[8:9] == b"{":
        found |= _of_safetensors(data)
    return found


def _of_safetensors(data: bytes) -> set[int]:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {8, 9, 8 + length} | {8 + length + at for info in header.values() for at in info["data_offsets"]}
