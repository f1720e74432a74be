"""From what a user types to a store: paths and URLs, files and folders, sources and destinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ckpt_tools.core.applicability import Case, check
from ckpt_tools.core.manifest import MASTER, Kind, Manifest
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.core.wording import newest, without_secrets
from ckpt_tools.errors import (
    FormatError,
    SeveralCheckpointsError,
    UnsafeError,
)
from ckpt_tools.formats.applicability import READING
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import find_format, hint_of_plugins, known, read_format, read_manifest
from ckpt_tools.reading.calls import with_calls_noted
from ckpt_tools.reading.trainer_files import with_trainer_files
from ckpt_tools.stores.overlay import Overlay
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import optimizer_of, refuse_several
from ckpt_tools.trainers.names import OPTIMIZER_HALF

if TYPE_CHECKING:
    from ckpt_tools.formats.state_dict.parse import Leaves


CHOOSING = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
"""Files of a run that say which of its checkpoints is meant: DeepSpeed's and Megatron's."""


def read_source(source: Source, options: ReadOptions, *, format_name: str | None = None) -> tuple[Source, Manifest]:
    """As ``read_checkpoint``, of a source that is open."""
    prefix = _prefix_of_halves(source) if format_name in (None, "dcp") else None
    own: frozenset[str] = frozenset()
    optimizer = optimizer_of(source.files)
    reader: Format | None = None
    try:
        refuse_several(source, options.tag)
        if prefix is None:
            reader = find_format(source, format_name)
            if optimizer is None:
                manifest = read_manifest(reader, source, options)
            else:
                manifest, is_joined = _read_both(reader, source, optimizer, options)
                own = frozenset([optimizer] if is_joined else [])
        else:
            from ckpt_tools.reading.halves import read_halves

            reader, models = read_format("dcp"), read_format("safetensors")
            manifest = read_halves(source, prefix, options, dcp=reader, safetensors=models)
        _refuse_others(source, manifest, options)
    except SeveralCheckpointsError as error:
        from ckpt_tools.core.run_folders import proposal

        raise SeveralCheckpointsError(error.message + proposal(source.files, source.store.url)) from error
    except (FormatError, UnsafeError) as error:
        error.path = error.path or known_by(source)
        if format_name is None and reader is not None:
            error.message += hint_of_plugins(source, reader)
        raise
    own = own | reader.own_files(source, manifest)
    source = reader.served(source, manifest)
    manifest = with_calls_noted(with_trainer_files(manifest, source, own))
    return replace(source, store=Overlay(source.store, manifest.literals)), manifest


def _refuse_others(source: Source, manifest: Manifest, options: ReadOptions) -> None:
    """Raises SeveralCheckpointsError if the folder of one step was read, another step has a folder of another format,
    and neither a tag nor a file of the run chooses: each reader sees the folders of its own format alone."""
    used = manifest.files & source.files.keys()
    is_chosen = options.tag is not None or any(name in source.files for name in CHOOSING)
    if is_chosen or not used or any("/" not in file for file in used):
        return
    from ckpt_tools.core.run_folders import others_of

    others = [each.name for each in others_of(source.files, used) if each.is_finished]
    if others:
        names = newest([*others, min(used).rpartition("/")[0]])
        raise SeveralCheckpointsError(f"there are several checkpoints here ({names}); name the folder of one")


def known_by(source: Source) -> str:
    """The one file of ``source``, or the folder: what an error about all of it names."""
    return next(iter(source.files)) if len(source.files) == 1 else without_secrets(source.store.url)


def _prefix_of_halves(source: Source) -> str | None:
    """As ``halves_prefix``, which is imported if there is such a file at all."""
    if not any(path.endswith(OPTIMIZER_HALF) for path in source.files):
        return None
    from ckpt_tools.reading.halves import halves_prefix

    return halves_prefix(source)


def _read_both(reader: Format, source: Source, optimizer: str, options: ReadOptions) -> tuple[Manifest, bool]:
    from ckpt_tools.formats.torch.files import read_tree
    from ckpt_tools.reading.optimizer_file import read_both

    def read_file(source: Source, file: str) -> tuple[Leaves, Mapping[str, str]]:
        tree = read_tree(source, file)
        return tree.leaves, tree.ties

    return read_both(reader, source, optimizer, read_file, options)


def own_keys(source: str, target: str, options: ConvertOptions) -> ReadOptions:
    """The options with which a checkpoint in the format ``target`` is read that was made of one in ``source``: a DCP
    keeps the tree of a DCP, and with it the keys."""
    is_kept = source == target == "dcp"
    return ReadOptions(model_key=options.model_key, optim_key=options.optim_key) if is_kept else ReadOptions()


def case_of(manifest: Manifest, target: str, *, keeps_both: bool, whole: bool) -> Case:
    """What options are checked against if ``manifest`` is read and ``target`` written."""
    reader, writer = known(manifest.format), known(target) if target else None
    return Case(
        source=manifest.format,
        target=target,
        reads=() if reader is None else reader.reading_options_of(manifest),
        writes=() if writer is None else writer.writing_options,
        is_weights_alone=writer is not None and writer.is_weights_alone,
        has_masters=any(key.slot == MASTER for key in manifest.tensors),
        keeps_both=keeps_both,
        has_state=whole and bool(manifest.groups or manifest.of_kind(Kind.STATE)),
    )


def check_reading(manifest: Manifest, options: ReadOptions) -> None:
    """Raises UsageError where an option says how to read and ``manifest`` is of a format that does not have it."""
    check(READING, asdict(options), case_of(manifest, "", keeps_both=False, whole=False))
