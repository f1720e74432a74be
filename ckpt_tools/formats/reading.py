"""From what a user types to a store: paths and URLs, files and folders, sources and destinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.core.applicability import READING, Case, check
from ckpt_tools.core.manifest import MASTER, Kind, Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.wording import without_secrets
from ckpt_tools.errors import FormatError, SeveralCheckpointsError, UnsafeError
from ckpt_tools.formats.base import Reader, Serving
from ckpt_tools.formats.calls_beside import with_calls_noted
from ckpt_tools.formats.registry import plugin_reading_options, plugin_writing_options, reader_for, readers
from ckpt_tools.formats.trainer_files import with_trainer_files
from ckpt_tools.formats.trainer_names import OPTIMIZER_HALF, OPTIMIZERS
from ckpt_tools.stores.overlay import Overlay
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, open_source

if TYPE_CHECKING:
    from ckpt_tools.formats.state_dict.parse import Leaves


def read_checkpoint(
    url: str | Path,
    options: ReadOptions,
    *,
    format_name: str | None = None,
    storage_options: StorageOptions = None,
) -> tuple[Source, Manifest]:
    """The manifest of what is at ``url``, with the source whose files its shards name.

    Raises:
        CkptError: as ``open_source``, ``reader_for`` and the reader say.
    """
    return read_source(open_source(named(url, storage_options), storage_options), options, format_name=format_name)


def named(url: str | Path, storage_options: StorageOptions = None) -> str | Path:
    """``url``; or the checkpoint of a run that it means, as ``formats.runs`` says: ``RUN@latest``.

    Raises:
        SourceNotFoundError: the run holds no such checkpoint. StoreError: it cannot be reached.
    """
    if "@" not in str(url):
        return url
    from ckpt_tools.formats.runs import resolved

    return resolved(url, lambda each: open_source(each, storage_options))


def read_source(source: Source, options: ReadOptions, *, format_name: str | None = None) -> tuple[Source, Manifest]:
    """As ``read_checkpoint``, of a source that is open."""
    prefix = _prefix_of_halves(source) if format_name in (None, "dcp") else None
    own: frozenset[str] = frozenset()
    optimizer = next((name for name in OPTIMIZERS if name in source.files and len(source.files) > 1), None)
    try:
        if prefix is None:
            reader = reader_for(source, format_name)
            if optimizer is None:
                manifest = reader.read_manifest(source, options)
            else:
                manifest, is_joined = _read_both(reader, source, optimizer, options)
                own = frozenset([optimizer] if is_joined else [])
        else:
            from ckpt_tools.formats.halves import read_halves

            reader, models = readers()["dcp"], readers()["safetensors"]
            manifest = read_halves(source, prefix, options, dcp=reader, safetensors=models)
    except SeveralCheckpointsError as error:
        from ckpt_tools.formats.runs import proposal

        raise SeveralCheckpointsError(error.message + proposal(source)) from error
    except (FormatError, UnsafeError) as error:
        error.path = error.path or _known_by(source)
        raise
    own = own | reader.own_files(source, manifest)
    if isinstance(reader, Serving):
        source = reader.served(source, manifest)
    manifest = with_calls_noted(with_trainer_files(manifest, source, own))
    return replace(source, store=Overlay(source.store, manifest.literals)), manifest


def _known_by(source: Source) -> str:
    """The one file of ``source``, or the folder: what an error about all of it names."""
    return next(iter(source.files)) if len(source.files) == 1 else without_secrets(source.store.url)


def _prefix_of_halves(source: Source) -> str | None:
    """As ``halves_prefix``, which is imported if there is such a file at all."""
    if not any(path.endswith(OPTIMIZER_HALF) for path in source.files):
        return None
    from ckpt_tools.formats.halves import halves_prefix

    return halves_prefix(source)


def _read_both(reader: Reader, source: Source, optimizer: str, options: ReadOptions) -> tuple[Manifest, bool]:
    from ckpt_tools.formats.huggingface.optimizer_file import read_both
    from ckpt_tools.formats.torch_save import read_tree

    def read_file(source: Source, file: str) -> tuple[Leaves, Mapping[str, str]]:
        tree = read_tree(source, file)
        return tree.leaves, tree.ties

    return read_both(reader, source, optimizer, read_file, options)


def case_of(manifest: Manifest, target: str, *, keeps_both: bool, whole: bool) -> Case:
    """What options are checked against if ``manifest`` is read and ``target`` written."""
    return Case(
        source=manifest.format,
        target=target,
        is_tree=manifest.tree is not None,
        has_masters=any(key.slot == MASTER for key in manifest.tensors),
        keeps_both=keeps_both,
        has_state=whole and bool(manifest.groups or manifest.of_kind(Kind.STATE)),
        reader_takes=plugin_reading_options(manifest.format),
        writer_takes=plugin_writing_options(target),
    )


def check_reading(manifest: Manifest, options: ReadOptions) -> None:
    """Raises UsageError where an option says how to read and ``manifest`` is of a format that does not have it."""
    check(READING, asdict(options), case_of(manifest, "", keeps_both=False, whole=False))
