"""Names of the files of an output: those with a meaning of their own (markers, digests, signatures, unfinished output),
and those that follow from its form, one file or a folder, which is decided where a location is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PARTIAL_FOLDER_NAME = ".ckpt-tools-partial"
"""Folder of unfinished output in an object store: inside a destination that is a folder, beside a file."""

MARKER_NAMES = (".metadata", "latest", "latest_universal")
"""Marker files, as is ``*.index.json``: a folder without its marker is not a checkpoint."""

DIGESTS_NAME = "ckpt-tools.digests.json"
"""The list of digests in a folder."""

DIGESTS_SUFFIX = ".digests.json"
"""Suffix of the file of digests beside a file."""

SIGNATURE_NAME = "model.sig"
"""The signature of a folder, in it; model-signing's own name."""

SHARED_TOKEN_NAME = "seen"
"""A file beside staged output, by which other machines see that they share the folder. It is never in the output, so
that no later run publishes it."""


def is_marker(path: str) -> bool:
    """True if a folder without the file is not a checkpoint."""
    name = path.rpartition("/")[2]
    return name in MARKER_NAMES or name.endswith(".index.json")


def is_visible_file(path: str) -> bool:
    """True if the relative name is a file of a checkpoint: not in a hidden folder, and not an empty object that stands
    for a folder."""
    *folders, name = path.split("/")
    return bool(name) and not any(folder.startswith(".") for folder in folders)


def split_visible_objects(sizes: Mapping[str, int], only_file: str | None) -> tuple[dict[str, int], dict[str, int]]:
    """The objects that are files of a checkpoint, ``only_file`` in any case, and the others, without the empty ones
    that stand for folders."""
    visible = {path: size for path, size in sizes.items() if is_visible_file(path) or path == only_file}
    hidden = {path: size for path, size in sizes.items() if path not in visible and (size or not path.endswith("/"))}
    return visible, hidden


OutputKind = Literal["file", "folder"]


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Whether an output is a folder, or the one file ``file_name`` with others beside it, named after it."""

    file_name: str | None = None

    @property
    def kind(self) -> OutputKind:
        return "folder" if self.file_name is None else "file"

    @property
    def partial_name(self) -> str:
        """Folder of unfinished output in an object store: inside a destination that is a folder, beside a file."""
        return PARTIAL_FOLDER_NAME if self.file_name is None else f".{self.file_name}{PARTIAL_FOLDER_NAME}"

    def root_folder_of(self, path: str) -> str:
        """The folder in which the files of an output at ``path`` are named."""
        return path if self.file_name is None else path.rpartition("/")[0]

    def digests_path(self, name_in_folder: str) -> str:
        """The name of the list of digests, which a format places at ``name_in_folder`` in a folder."""
        return name_in_folder if self.file_name is None else self.file_name + DIGESTS_SUFFIX

    def file_url(self, url: str, path: str) -> str:
        """The URL of the file ``path`` of an output at ``url``."""
        return f"{url}/{path}" if self.file_name is None else url.removesuffix(self.file_name) + path
