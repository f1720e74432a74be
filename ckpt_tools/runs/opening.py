"""Opens the checkpoint that a path or URL means: a folder, one file, or a checkpoint of a run (``RUN@latest``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.errors import SourceNotFoundError, StoreError, UnsupportedError
from ckpt_tools.reading.checkpoint import known_by, read_source
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, is_remote, local_path, open_source
from ckpt_tools.trainers.accelerate import OPTIMIZER, with_file, with_optimizer
from ckpt_tools.trainers.saved import ITSELF

if TYPE_CHECKING:
    from ckpt_tools.recipes.like import Like


def read_checkpoint(
    url: str | Path,
    options: ReadOptions,
    *,
    format_name: str | None = None,
    storage_options: StorageOptions = None,
    may_be_empty: bool = False,
    step_by_name: bool = False,
) -> tuple[Source, Manifest]:
    """The manifest of what is at ``url``, with the source whose files its shards name. With ``step_by_name`` its step,
    if it says none, is that of the folder's name, as ``ls`` shows it.

    Raises:
        CkptError: as ``open_source``, ``find_format`` and the reader say. UnsupportedError: ``url`` is one file of a
        checkpoint, or it holds no tensor and may not be empty.
    """
    url = named(url, storage_options)

    def look(each: str | Path) -> Source:
        return open_source(each, storage_options)

    def exists(each: str) -> bool:
        try:
            return bool(look(each).files)
        except (SourceNotFoundError, StoreError):
            return False

    source, place = look(url), str(url) if is_remote(url) else str(local_path(url).absolute())
    notes = None
    if len(source.files) == 1:
        from ckpt_tools.reading.one_file import folder_of_one_file, refuse_one_file

        folder = folder_of_one_file(place, source, exists)
        notes = None if folder is None else refuse_one_file(folder, source, format_name)
    if options.optimizer_file is not None:
        source, notes = with_file(source, look(options.optimizer_file), OPTIMIZER), notes or ()
    elif notes is None:
        source, notes = with_optimizer(place, source, look)
    source, manifest = read_source(source, options, format_name=format_name)
    if not manifest.tensors and not may_be_empty:
        raise UnsupportedError("it holds no tensors", path=known_by(source))
    name = place.rstrip("/").rpartition("/")[2]
    if step_by_name and manifest.step is None and any(map(str.isdigit, name)):
        from ckpt_tools.trainers.run_folders import Member

        files = {path: source.files[path] for path in manifest.stored_files & source.files.keys()}
        manifest = replace(manifest, step=Member(ITSELF, files, known_as=name).step)
    return source, replace(manifest, notes=(*manifest.notes, *notes)) if notes else manifest


def likeness(options: ConvertOptions) -> Like | None:
    """The steps that make a manifest like the reference of ``options``; None if there is none. Raises CkptError if the
    reference cannot be read."""
    if options.like is None:
        return None
    from ckpt_tools.reading.reference import like_reference

    return like_reference(options.like, options)


def named(url: str | Path, storage_options: StorageOptions = None) -> str | Path:
    """``url``; or the checkpoint of a run that it means, ``RUN@latest``.

    Raises:
        SourceNotFoundError: the run holds no such checkpoint. StoreError: it cannot be reached.
    """
    if "@" not in str(url):
        return url
    from ckpt_tools.runs.naming import resolved

    return resolved(url, lambda each: open_source(each, storage_options))
