"""Form of an output, one file or a folder, decided where a place is opened, and the names that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ckpt_tools.stores.marker_files import DIGESTS_SUFFIX, PARTIAL_FOLDER_NAME

OutputKind = Literal["file", "folder"]


@dataclass(frozen=True, slots=True)
class FolderForm:
    """The output is a folder; the names of its files are relative to it."""

    kind: ClassVar[OutputKind] = "folder"
    file_name: ClassVar[None] = None
    partial_name: ClassVar[str] = PARTIAL_FOLDER_NAME
    """Folder of unfinished output in an object store, inside the destination."""

    def root_folder_of(self, path: str) -> str:
        """The folder in which the files of an output at ``path`` are named."""
        return path

    def digests_path(self, name_in_folder: str) -> str:
        """The name of the list of digests, which a format places at ``name_in_folder`` in a folder."""
        return name_in_folder

    def file_url(self, url: str, path: str) -> str:
        """The URL of the file ``path`` of an output at ``url``."""
        return f"{url}/{path}"


@dataclass(frozen=True, slots=True)
class SingleFileForm:
    """The output is the file ``name``; other files are written beside it, under names derived from its name."""

    kind: ClassVar[OutputKind] = "file"
    name: str

    @property
    def file_name(self) -> str:
        return self.name

    @property
    def partial_name(self) -> str:
        """Folder of unfinished output in an object store, beside the file."""
        return f".{self.name}{PARTIAL_FOLDER_NAME}"

    def root_folder_of(self, path: str) -> str:
        """The folder in which the file lies."""
        return path.rpartition("/")[0]

    def digests_path(self, name_in_folder: str) -> str:
        """The file of digests beside the file, whatever its name in a folder would be."""
        return self.name + DIGESTS_SUFFIX

    def file_url(self, url: str, path: str) -> str:
        """The URL of ``path``, beside the file at ``url``."""
        return url.removesuffix(self.name) + path


OutputForm = FolderForm | SingleFileForm
