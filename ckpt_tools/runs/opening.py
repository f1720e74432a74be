"""Opens the checkpoint that a path or URL means: a folder, one file, or a checkpoint of a run (``RUN@latest``)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.arguments import is_remote
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.errors import SourceNotFoundError, StoreError, UnsupportedError
from ckpt_tools.formats.base import DeltaFolderError
from ckpt_tools.process.collector import pause_collector
from ckpt_tools.reading.checkpoint import check_reading_options, get_error_path, read_source
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, local_path, open_source
from ckpt_tools.trainers.accelerate import OPTIMIZER, join_file, join_optimizer
from ckpt_tools.trainers.saved import RUN_ITSELF, SavedCheckpoint

if TYPE_CHECKING:
    from ckpt_tools.recipes.like import ReferenceMatcher


@pause_collector()
def open_checkpoint(
    url: str | Path,
    options: ReadOptions,
    *,
    format_name: str | None = None,
    storage_options: StorageOptions = None,
    config_folder: str | Path | None = None,
    may_be_empty: bool = False,
    step_by_name: bool = False,
    checks_options: bool = False,
) -> OpenedCheckpoint:
    """Read the headers of what is at ``url``.

    If ``step_by_name``, a checkpoint that states no step has the one in the name of its folder, as ``ls`` shows it. If
    ``checks_options``, an option that its format does not take is refused. ``config_folder`` is that of
    ``OpenedCheckpoint``.

    Raises:
        CkptError: as ``open_source``, ``find_format`` and the reader say. UnsupportedError: ``url`` is one file of a
        checkpoint, or it holds no tensor and may not be empty. UsageError: an option does not apply.
    """
    url = resolve_checkpoint_url(url, storage_options)

    def open_url(each: str | Path) -> Source:
        return open_source(each, storage_options)

    def url_exists(each: str) -> bool:
        try:
            return bool(open_url(each).files)
        except (SourceNotFoundError, StoreError):
            return False

    source, absolute_url = open_url(url), str(url) if is_remote(url) else str(local_path(url).absolute())
    notes = None
    if len(source.files) == 1:
        from ckpt_tools.reading.one_file import find_folder_of_file, refuse_one_file

        folder = find_folder_of_file(absolute_url, source, url_exists)
        notes = None if folder is None else refuse_one_file(folder, source, format_name)
    if options.optimizer_file is not None:
        source, notes = join_file(source, open_url(options.optimizer_file), OPTIMIZER), notes or ()
    elif notes is None:
        source, notes = join_optimizer(absolute_url, source, open_url)
    try:
        source, manifest = read_source(source, options, format_name=format_name)
    except DeltaFolderError:
        if options.optimizer_file is not None:  # nothing says which version of the model it belongs to
            raise
        from ckpt_tools.reading.deltas import open_patched_model

        open_model = partial(open_checkpoint, options=replace(options, state="model"), storage_options=storage_options)
        source, manifest = open_patched_model(absolute_url, source, open_url, open_model)
    if not manifest.tensors and not may_be_empty:
        raise UnsupportedError("it holds no tensors", path=get_error_path(source))
    base_name = absolute_url.rstrip("/").rpartition("/")[2]
    if step_by_name and manifest.step is None and any(map(str.isdigit, base_name)):
        files = {path: source.files[path] for path in manifest.stored_files & source.files.keys()}
        manifest = replace(manifest, step=SavedCheckpoint(source, RUN_ITSELF, files, folder_name=base_name).step)
    if checks_options:
        check_reading_options(manifest, options)
    manifest = replace(manifest, notes=(*manifest.notes, *notes)) if notes else manifest
    return OpenedCheckpoint(url, source, manifest, storage_options, config_folder)


def open_reference_matcher(options: ConvertOptions) -> ReferenceMatcher | None:
    """The steps that make a manifest like the reference of ``options``; None if there is none. Raises CkptError if the
    reference cannot be read."""
    if options.like is None:
        return None
    from ckpt_tools.reading.reference import make_reference_matcher

    return make_reference_matcher(options.like, options)


def resolve_checkpoint_url(url: str | Path, storage_options: StorageOptions = None) -> str | Path:
    """``url``; or the checkpoint of a run that it means, ``RUN@latest``.

    Raises:
        SourceNotFoundError: the run holds no such checkpoint. StoreError: it cannot be reached.
    """
    if "@" not in str(url):
        return url
    from ckpt_tools.runs.naming import resolve_in_run

    return resolve_in_run(url, lambda each: open_source(each, storage_options))
