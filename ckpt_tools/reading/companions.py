"""The place of a companion file: beside a checkpoint and not a part of it, such as ``config.json``. One rule for all.

In the folder that the user names; around the weights, also in a folder ``huggingface`` there; beside a single file;
above a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ckpt_tools.arguments import is_remote
from ckpt_tools.core.manifest import WEIGHT, Manifest
from ckpt_tools.errors import SourceNotFoundError, StoreError
from ckpt_tools.stores.output_names import MARKER_NAMES
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, open_source
from ckpt_tools.trainers.verl import HUGGING_FACE_FOLDER

MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Companion:
    """A file that belongs to a checkpoint: ``name`` in the folder ``prefix`` of ``source``.

    ``place`` is ``named`` by the user, ``around`` the weights in the same source, ``beside`` a single file or
    ``above`` a folder. ``open_sibling`` opens other files of the last two by name, if they exist.
    """

    place: str
    source: Source
    name: str
    prefix: str = ""
    open_sibling: Callable[[str], Source | None] | None = None

    def read(self) -> bytes:
        return self.source.read_all(self.prefix + self.name, limit_bytes=MAX_CONFIG_BYTES)


def iter_companions(
    url: str | Path,
    source: Source,
    weight_files: Collection[str],
    name: str,
    config_folder: str | Path | None,
    storage_options: StorageOptions,
) -> Iterator[Companion]:
    """The files called ``name`` that may belong to the checkpoint ``source`` at ``url``, the likeliest first. Those
    beside or above it are asked for by name, because that folder may be large."""
    if config_folder is not None:
        named_source = open_source(config_folder, storage_options)
        if name in named_source.files:
            yield Companion("named", named_source, name)
    for prefix in iter_folders_around(weight_files):
        if prefix + name in source.files:
            yield Companion("around", source, name, prefix)
    folder_url, is_above = _find_nearby_folder(url, source)

    def open_nearby(file_name: str) -> Source | None:
        with suppress(SourceNotFoundError, StoreError):
            file_source = open_source(f"{folder_url}/{file_name}", storage_options)
            return file_source if file_name in file_source.files else None
        return None

    if folder_url is not None and (file_source := open_nearby(name)) is not None:
        yield Companion("above" if is_above else "beside", file_source, name, open_sibling=open_nearby)


def list_weight_files(manifest: Manifest) -> frozenset[str]:
    """Files of the store that hold weights; if these are computed, or there are none, those of all tensors."""
    weights = (entry for key, entry in manifest.tensors.items() if key.slot == WEIGHT)
    weight_files = {file for each in weights for file in each.shards.files}
    return frozenset(manifest.stored_files & weight_files or manifest.stored_files)


def iter_folders_around(files: Iterable[str]) -> Iterator[str]:
    """The folder that holds all the files, and those above it, the nearest first; of each also ``huggingface``."""
    depths = zip(*(path.split("/")[:-1] for path in files), strict=False)
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, depths)]
    for depth in range(len(common), -1, -1):
        base = "".join(f"{part}/" for part in common[:depth])
        yield base
        yield f"{base}{HUGGING_FACE_FOLDER}/"


def _find_nearby_folder(url: str | Path, source: Source) -> tuple[str | None, bool]:
    """The folder, and whether it is the one above a folder."""
    text = str(url).rstrip("/") if is_remote(url) else str(Path(url).expanduser().absolute())
    folder_url, _, name = text.rpartition("/")
    if not folder_url or folder_url.endswith(":/"):
        return None, False
    is_file = set(source.files) == {name} or name.endswith(".index.json")
    if name in MARKER_NAMES and not is_file:
        folder_url = folder_url.rpartition("/")[0]
    return folder_url, not is_file
