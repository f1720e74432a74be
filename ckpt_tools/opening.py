"""From what a user types to a store: paths and URLs, files and folders, sources and destinations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from ckpt_tools.companions import with_companions
from ckpt_tools.errors import SourceNotFoundError, UnsupportedError
from ckpt_tools.format.base import ReadOptions
from ckpt_tools.format.registry import reader_for
from ckpt_tools.manifest import Manifest
from ckpt_tools.stores.base import Place, Source
from ckpt_tools.stores.local import LocalStore
from ckpt_tools.stores.overlay import Overlay
from ckpt_tools.stores.staging import LocalPlace

FILE_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
"""Destinations that are one file, and the format each implies."""

_MARKERS = (".metadata", "latest", "latest_universal")
"""Files that stand for the folder they lie in."""


def local_path(url: str | Path) -> Path:
    """The path of a path or ``file://`` URL. Raises UnsupportedError for any other scheme."""
    parts = urlsplit(str(url))
    if len(parts.scheme) > 1 and "://" in str(url):
        if parts.scheme != "file":
            raise UnsupportedError(f"{url}: only local paths and file:// URLs can be opened")
        return Path(unquote(parts.path))
    return Path(url).expanduser()


def open_source(url: str | Path) -> Source:
    """What is at ``url``: a folder, or one file, as a store of that file alone.

    An index stands for its shards, and ``.metadata`` or ``latest`` for the folder.

    Raises:
        SourceNotFoundError: nothing is there.
    """
    path = local_path(url)
    if not path.exists():
        raise SourceNotFoundError(f"there is no file or folder {path}")
    if path.is_dir() or path.name in _MARKERS:
        return Source.open(LocalStore(path if path.is_dir() else path.parent))
    if path.name.endswith(".index.json"):
        folder = Source.open(LocalStore(path.parent))
        return replace(folder, files={name: size for name, size in folder.files.items() if _beside(name, path.name)})
    return Source.open(LocalStore(path.parent, only=path.name))


def _beside(name: str, index: str) -> bool:
    return name == index or not name.endswith(".index.json")


def read_checkpoint(
    url: str | Path, options: ReadOptions, *, format_name: str | None = None
) -> tuple[Source, Manifest]:
    """The manifest of what is at ``url``, with the source whose files its shards name.

    Raises:
        CkptError: as ``open_source``, ``reader_for`` and the reader say.
    """
    return read_source(open_source(url), options, format_name=format_name)


def read_source(source: Source, options: ReadOptions, *, format_name: str | None = None) -> tuple[Source, Manifest]:
    """As ``read_checkpoint``, of a source that is open."""
    reader = reader_for(source, format_name)
    manifest = with_companions(reader.read_manifest(source, options), source)
    return replace(source, store=Overlay(source.store, manifest.literals)), manifest


def open_place(url: str | Path) -> Place:
    """Where an output is to be; nothing is touched. Raises UnsupportedError where nothing can be written there."""
    return LocalPlace(local_path(url))


def implied_format(name: str) -> str | None:
    """The format that a destination's name implies, where it is one file."""
    return FILE_SUFFIXES.get(PurePosixPath(name).suffix)
