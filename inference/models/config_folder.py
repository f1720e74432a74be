"""Files beside weights that describe the model: ``config.json``, tokenizer, image preprocessing.

They are read from a local folder. Those of a remote checkpoint are copied into a temporary one first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blake3 import blake3

from ckpt_tools.errors import FormatError, StoreError

from ..common.errors import one_line
from ..common.urls import file_system

CONFIG = "config.json"
PLACES = ("", "huggingface", "..")
"""Folders to look in, relative to the folder of the weights; verl uses ``huggingface``."""

SUFFIXES = (".json", ".txt", ".model", ".jinja")
MAX_BYTES = 64 * 2**20  # limit of one file; the largest tokenizers have some 35 MB


@contextmanager
def config_folder(url: str | Path, options: Mapping[str, Any] | None) -> Iterator[Path | None]:
    """A local folder with ``config.json`` and its companions, within the block; None if there is none. Raises
    StoreError if a remote one cannot be read. FormatError if ``config.json`` is a huge file."""
    if "://" not in str(url):
        yield _local(Path(url))
        return
    with TemporaryDirectory(prefix="ckpt-tools-config-") as temporary:
        yield Path(temporary) if _copy(str(url), options or {}, Path(temporary)) else None


def _local(path: Path) -> Path | None:
    base = path if path.is_dir() else path.parent
    # The folder above a single file's own says nothing of it.
    places = PLACES if path.is_dir() else PLACES[:-1]
    return next((folder for folder in (base / place for place in places) if (folder / CONFIG).is_file()), None)


def _copy(url: str, options: Mapping[str, Any], into: Path) -> bool:
    fs, path = file_system(url, options)
    try:
        for folder in _remote_folders(fs, path):
            if fs.isfile(f"{folder}/{CONFIG}"):
                _copy_small(fs, folder, into)
                return True
    except OSError as error:
        raise StoreError(f"{url}: the files beside the weights cannot be read ({error})") from error
    return False


def _remote_folders(fs: Any, path: str) -> Iterator[str]:
    is_file = fs.isfile(path)
    base = path.rpartition("/")[0] if is_file else path
    for place in PLACES[:-1] if is_file else PLACES:
        yield base.rpartition("/")[0] if place == ".." else f"{base}/{place}".rstrip("/")


def _copy_small(fs: Any, folder: str, into: Path) -> None:
    for entry in fs.ls(folder, detail=True):
        name = entry["name"].rstrip("/").rpartition("/")[2]
        if entry["type"] == "file" and name.endswith(SUFFIXES) and entry["size"] <= MAX_BYTES:
            (into / name).write_bytes(fs.cat_file(entry["name"]))


def read_config(folder: Path | None) -> dict[str, Any]:
    """``config.json`` in ``folder``, empty if there is none. Raises FormatError."""
    if folder is None or not (folder / CONFIG).is_file():
        return {}
    try:
        found = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise FormatError(f"{folder / CONFIG} cannot be read ({one_line(error)})") from error
    if not isinstance(found, dict):
        raise FormatError(f"{folder / CONFIG} is not a JSON object")
    return found


def digest_of_config(url: str | Path, options: Mapping[str, Any] | None = None) -> str | None:
    """BLAKE3 of the files beside weights, which decide how inputs are prepared. None if there are none."""
    with config_folder(url, options) as folder:
        if folder is None:
            return None
        found = blake3()
        for file in sorted(folder.iterdir()):
            if file.suffix in SUFFIXES and file.is_file() and file.stat().st_size <= MAX_BYTES:
                found.update(f"{file.name}\0{blake3(file.read_bytes()).hexdigest()}\0".encode())
        return f"blake3:{found.hexdigest()}"
