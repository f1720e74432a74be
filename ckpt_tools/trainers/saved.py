"""A checkpoint in its run, for the rules that judge it by the names of its files and a few header reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source

RUN_ITSELF = "."
"""The name of the run if it is itself one checkpoint."""

MAX_JSON_BYTES = 256 << 20
MAX_NAME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint of ``run``; ``name`` is its path there, ``base_name`` the last part of it. ``files`` are its files
    by their paths below ``root``, a folder of the run."""

    run: Source
    name: str
    base_name: str
    step: int | None
    is_finished: bool
    root: str
    files: Mapping[str, int]

    @property
    def file_names(self) -> frozenset[str]:
        """Names of its files without their folders."""
        return frozenset(path.rpartition("/")[2] for path in self.files)

    @property
    def source(self) -> Source:
        """Its files alone."""
        from ckpt_tools.stores.wrappers import open_subfolder

        return open_subfolder(self.run, self.root, self.files)

    def path_in_run(self, inner_path: str) -> str:
        return f"{self.root}/{inner_path}" if self.root else inner_path

    def read_file(self, inner_path: str, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
        return self.run.read_all(self.path_in_run(inner_path), limit_bytes=limit_bytes)

    def get_archive_arguments(self, inner_path: str) -> tuple[Callable[[int, int], bytes], int, str]:
        """Arguments for ``open_archive`` and ``read_directory``."""
        path = self.path_in_run(inner_path)
        return (lambda start, stop: self.run.read(path, start, stop)), self.files[inner_path], inner_path

    def find_sibling(self, name: str) -> str | None:
        """Path in the run of a file next to the checkpoint, if it exists."""
        folder = self.name.rpartition("/")[0]
        path = f"{folder}/{name}" if folder else name
        return path if path in self.run.files and self.name != RUN_ITSELF else None

    def read_run_file(self, path: str) -> bytes:
        """The content of a JSON file of the run, of at most ``MAX_JSON_BYTES``."""
        return self.run.read_all(path, limit_bytes=MAX_JSON_BYTES)

    def read_json_object(self, path: str) -> Mapping[str, Any]:
        """The JSON object of a file of the run; empty if it is another value. Raises FormatError."""
        from ckpt_tools.serialization.strict_json import parse_json

        content = parse_json(self.read_run_file(path), path)
        return content if isinstance(content, dict) else {}

    def read_sibling_line(self, name: str) -> str | None:
        """The one line of a small file next to the checkpoint, if it exists."""
        path = self.find_sibling(name)
        return None if path is None else read_name_line(self.run, path)


def read_name_line(run: Source, path: str) -> str:
    """The name of a checkpoint in a file, without spaces and slashes around it."""
    return run.read_all(path, limit_bytes=MAX_NAME_BYTES).decode(errors="replace").strip().strip("/")
