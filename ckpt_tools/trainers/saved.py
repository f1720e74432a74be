"""A checkpoint in its run, for the rules that judge it by the names of its files and a few header reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source

ITSELF = "."
"""The name of the run if it is itself one checkpoint."""

MAX_JSON_BYTES = 256 << 20
MAX_NAME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of ``run``; ``name`` is its path there, ``title`` the last part of it. ``files`` are its files by
    their paths below ``root``, a folder of the run."""

    run: Source
    name: str
    title: str
    step: int | None
    is_finished: bool
    root: str
    files: Mapping[str, int]

    @property
    def names(self) -> frozenset[str]:
        """Names of its files without their folders."""
        return frozenset(path.rpartition("/")[2] for path in self.files)

    @property
    def source(self) -> Source:
        """Its files alone."""
        from ckpt_tools.stores.wrappers import open_subfolder

        return open_subfolder(self.run, self.root, self.files)

    def path(self, inside: str) -> str:
        return f"{self.root}/{inside}" if self.root else inside

    def read(self, inside: str, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
        return self.run.read_all(self.path(inside), limit_bytes=limit_bytes)

    def part(self, inside: str) -> tuple[Callable[[int, int], bytes], int, str]:
        """Arguments for ``open_archive`` and ``read_directory``."""
        path = self.path(inside)
        return (lambda start, stop: self.run.read(path, start, stop)), self.files[inside], inside

    def beside(self, name: str) -> str | None:
        """Path in the run of a file next to the checkpoint, if it exists."""
        folder = self.name.rpartition("/")[0]
        path = f"{folder}/{name}" if folder else name
        return path if path in self.run.files and self.name != ITSELF else None

    def text(self, path: str) -> bytes:
        """A JSON file of the run."""
        return self.run.read_all(path, limit_bytes=MAX_JSON_BYTES)

    def object_at(self, path: str) -> Mapping[str, Any]:
        """The JSON object of a file of the run; empty if it is another value. Raises FormatError."""
        from ckpt_tools.serialization.strict_json import parse_json

        found = parse_json(self.text(path), path)
        return found if isinstance(found, dict) else {}

    def text_beside(self, name: str) -> str | None:
        """The one line of a small file next to the checkpoint, if it exists."""
        path = self.beside(name)
        return None if path is None else line_of(self.run, path)


def line_of(run: Source, path: str) -> str:
    """A file that names a checkpoint, without spaces and slashes around the name."""
    return run.read_all(path, limit_bytes=MAX_NAME_BYTES).decode(errors="replace").strip().strip("/")
