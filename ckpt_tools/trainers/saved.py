"""A checkpoint in its run, for the rules that judge it by the names of its files and a few header reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_tools.core.run_folders import Member
    from ckpt_tools.stores.source import Source

MAX_JSON_BYTES = 256 << 20
MAX_NAME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint ``member`` of ``run``. ``files`` are its files by their paths below ``root``, a folder of the
    run."""

    run: Source
    member: Member
    root: str
    files: Mapping[str, int]
    is_remote: bool

    @classmethod
    def of(cls, run: Source, member: Member, *, is_remote: bool) -> Saved:
        root = member.folder
        files = {path[len(root) + 1 :] if root else path: size for path, size in member.files.items()}
        return cls(run, member, root, files, is_remote)

    @property
    def title(self) -> str:
        return self.member.title

    @property
    def step(self) -> int | None:
        return self.member.step

    @property
    def names(self) -> frozenset[str]:
        """Names of its files without their folders."""
        return frozenset(path.rpartition("/")[2] for path in self.files)

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
        folder = self.member.name.rpartition("/")[0]
        path = f"{folder}/{name}" if folder else name
        return path if path in self.run.files and not self.member.is_run else None

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
