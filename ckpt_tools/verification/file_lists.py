"""Lists of files with their digests, as other tools write them, parsed. Pure.

- ``sha256sum``, ``b2sum``, ``md5sum`` and their relatives (coreutils' ``src/digest.c``): ``HEX  NAME`` or ``HEX *NAME``
  a line, or ``ALGORITHM (NAME) = HEX`` with ``--tag``. A backslash before the line says that ``\\\\``, ``\\n`` and
  ``\\r`` in the name are escapes.
- ``integrity.json`` of Megatron-Core (``dist_checkpointing/validation.py``): ``{"algorithm": "sha256", "files":
  {NAME: HEX}}``, of the files in its own folder.
- ``NAME.metadata`` of ``hf download --local-dir`` (huggingface_hub's ``_local_folder.py``): three lines, with commit,
  etag and time. The etag is the SHA-256 of a large file, and git's SHA-1 of a small one; so are the names of the blobs
  in the hub's cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ckpt_tools.errors import MalformedError, UnsafeError, UnsupportedError
from ckpt_tools.stores.source import check_file_name

INTEGRITY_NAME = "integrity.json"
HUB_FOLDER = ".cache/huggingface/download"
HUB_SUFFIX = ".metadata"

SUMS_NAME = re.compile(r"(md5|sha1|sha224|sha256|sha384|sha512|b2|b3)sums?(\.txt)?", re.I)
"""Names that lists in the folder of what they list have by convention."""

SUMS_SUFFIXES = tuple(
    f".{name}" for name in ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "b2", "b3", "sha256sum")
)
"""Suffixes of the list of one file, beside it."""

GIT_BLOB_SHA1 = "git"
"""git's SHA-1 of a blob: of ``blob SIZE``, a NUL, and the bytes."""

_ALGORITHMS_BY_LENGTH = {
    32: ("md5",),
    40: ("sha1",),
    56: ("sha224",),
    64: ("sha256",),
    96: ("sha384",),
    128: ("sha512", "blake2b-512"),
}
"""Algorithms by the digits of a digest whose list does not say which. sha512sum and b2sum write the same form."""

_PLAIN_LINE = re.compile(r"([0-9a-fA-F]+) [ *](.+)", re.S)
_TAGGED_LINE = re.compile(r"([A-Za-z0-9-]+) ?\((.+)\) ?= ?([0-9a-fA-F]+)", re.S)
_BARE_DIGEST = re.compile(r"[0-9a-fA-F]+")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@dataclass(frozen=True, slots=True)
class StatedDigest:
    """The digest that a list states, in lowercase hexadecimal digits, and the algorithms it can be of."""

    digest: str
    algorithms: tuple[str, ...]

    def __str__(self) -> str:
        return " or ".join(name.upper() if name != GIT_BLOB_SHA1 else "git's SHA-1" for name in self.algorithms)


@dataclass(frozen=True, slots=True)
class FileList:
    """The list ``name``: the digests of files by their names in the store. ``covers`` is the folder whose files the
    list is meant to name, without those in folders below it if ``is_flat``."""

    name: str
    files: Mapping[str, StatedDigest]
    covers: str = ""
    is_flat: bool = False

    def does_cover(self, path: str) -> bool:
        """True if the list would name the file ``path`` if it had been there."""
        relative_path = path.removeprefix(f"{self.covers}/") if self.covers else path
        return (not self.covers or relative_path != path) and not (self.is_flat and "/" in relative_path)


def parse_sums(data: bytes, path: str) -> dict[str, StatedDigest]:
    """The files of a list of coreutils' form. A file of one digest alone is about the file whose name it adds a suffix
    to.

    Raises:
        MalformedError: a line is none of the forms, or a file has two digests. UnsafeError: a name leads out.
    """
    lines = os.fsdecode(data).split("\n")
    files: dict[str, StatedDigest] = {}
    for number, line in enumerate(lines, 1):
        text = line.removesuffix("\r")
        if not text.strip() or text.startswith("#"):
            continue
        name, stated_digest = _parse_line(text, path, number)
        _add_digest(files, name, stated_digest, path)
    if not files:
        raise MalformedError("it is a list of no files", path=path)
    return files


def _parse_line(text: str, path: str, number: int) -> tuple[str, StatedDigest]:
    line = text.removeprefix("\\")
    plain_match, tagged_match = _PLAIN_LINE.fullmatch(line), _TAGGED_LINE.fullmatch(line)
    if plain_match is not None:
        digest, name = plain_match[1].lower(), plain_match[2]
        algorithms = _guess_algorithms(path, len(digest))
    elif tagged_match is not None:
        digest, name = tagged_match[3].lower(), tagged_match[2]
        algorithms = _parse_tag(tagged_match[1], len(digest))
    elif number == 1 and _BARE_DIGEST.fullmatch(line) and path.lower().endswith(SUMS_SUFFIXES):
        digest, name = line.lower(), PurePosixPath(path).stem
        algorithms = _guess_algorithms(path, len(digest))
    else:
        raise MalformedError(f"line {number:,} is not DIGEST  FILE, as sha256sum writes it", path=path)
    if not algorithms:
        raise MalformedError(f"line {number:,} has a digest of no known algorithm", path=path)
    if line != text:
        if re.fullmatch(r"(?:[^\\]|\\[\\nr])*", name, re.S) is None:
            raise MalformedError(f"line {number:,} has an unknown escape", path=path)
        name = re.sub(r"\\[\\nr]", lambda found: _ESCAPES[found[0]], name)
    return name, StatedDigest(digest, algorithms)


def _guess_algorithms(path: str, num_digits: int) -> tuple[str, ...]:
    name = PurePosixPath(path).name.lower()
    if re.search(r"b2|blake2", name) and num_digits % 2 == 0 and num_digits <= 128:
        return (f"blake2b-{4 * num_digits}",)
    if re.search(r"b3|blake3", name) and num_digits == 64:
        return ("blake3",)
    return _ALGORITHMS_BY_LENGTH.get(num_digits, ())


def _parse_tag(tag: str, num_digits: int) -> tuple[str, ...]:
    algorithm = tag.lower()
    if re.fullmatch(r"blake2b(-\d+)?", algorithm):
        bits = int(algorithm.partition("-")[2] or 512)
        return (f"blake2b-{bits}",) if bits == 4 * num_digits and bits % 8 == 0 and 8 <= bits <= 512 else ()
    if algorithm == "blake3":
        return ("blake3",) if num_digits == 64 else ()
    return (algorithm,) if (algorithm,) == _ALGORITHMS_BY_LENGTH.get(num_digits, ())[:1] else ()


def _add_digest(digests: dict[str, StatedDigest], name: str, stated_digest: StatedDigest, path: str) -> None:
    checked_path = _check_inside(name, path)
    if digests.setdefault(checked_path, stated_digest).digest != stated_digest.digest:
        raise MalformedError("it has two digests", path=path, key=checked_path)


def _check_inside(name: str, path: str) -> str:
    try:
        return PurePosixPath(check_file_name(name)).as_posix()
    except UnsafeError:
        raise UnsafeError(
            f"the list names the file {name!r} outside of its folder; it was not opened", path=path
        ) from None


def parse_integrity(document: Any, path: str) -> dict[str, StatedDigest]:
    """The files of Megatron-Core's ``integrity.json``.

    Raises:
        MalformedError: it has another form. UnsupportedError: another algorithm. UnsafeError: a name leads out.
    """
    hex_digests = document.get("files") if isinstance(document, dict) else None
    if not isinstance(hex_digests, dict) or not hex_digests:
        raise MalformedError("it is not a list of files, as Megatron-Core or checksum write it", path=path)
    algorithm = document.get("algorithm", "sha256")
    if algorithm != "sha256":
        raise UnsupportedError(f"its digests are of {algorithm!r}; only sha256 is supported", path=path)
    files: dict[str, StatedDigest] = {}
    for name, digest in hex_digests.items():
        if not isinstance(digest, str) or re.fullmatch(r"[0-9a-fA-F]{64}", digest) is None:
            raise MalformedError("its digest is not a SHA-256", path=path, key=name)
        _add_digest(files, name, StatedDigest(digest.lower(), ("sha256",)), path)
    return files


def parse_hub_metadata(data: bytes, path: str) -> StatedDigest | None:
    """The digest in a file of metadata of ``hf download``; None if its etag is not one.

    Raises:
        MalformedError: it is not three lines that begin with a commit.
    """
    lines = data.decode("latin-1").split("\n")
    if len(lines) < 3 or re.fullmatch(r"[0-9a-f]{40}", lines[0]) is None:
        raise MalformedError("it is not metadata of hf download", path=path)
    return parse_hub_digest(lines[1])


def parse_hub_digest(etag: str) -> StatedDigest | None:
    """The digest that an etag of the hub, or the name of a blob in its cache, is; None if it is none."""
    if re.fullmatch(r"[0-9a-f]{64}", etag):
        return StatedDigest(etag, ("sha256",))
    return StatedDigest(etag, (GIT_BLOB_SHA1,)) if re.fullmatch(r"[0-9a-f]{40}", etag) else None
