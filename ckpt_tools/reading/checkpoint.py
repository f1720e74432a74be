"""From an open source to a manifest, in three steps: choose the format, read, and add what the trainer's files say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ckpt_tools.core.applicability import OptionContext, check_applicability
from ckpt_tools.core.manifest import MASTER, Kind, Manifest
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.core.quantized import get_quantization_config, may_be_quantized
from ckpt_tools.errors import FormatError, SeveralCheckpointsError, UnsafeError, UsageError
from ckpt_tools.formats.applicability import READING_RULES
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.deepspeed.names import LATEST, LATEST_UNIVERSAL
from ckpt_tools.formats.index import (
    find_format,
    get_readable_format,
    lookup_format,
    read_manifest,
    refuse_foreign_content,
    suggest_plugin,
)
from ckpt_tools.messages.wording import join_newest
from ckpt_tools.reading.enrich import enrich_manifest
from ckpt_tools.reading.steps import add_step_doubts
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import overlay_literals
from ckpt_tools.trainers.accelerate import refuse_several_models
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.megatron_lm import TRACKER_FILE
from ckpt_tools.trainers.names import find_optimizer_file

if TYPE_CHECKING:
    from ckpt_tools.reading.opened import OpenedCheckpoint
    from ckpt_tools.reading.recipe_step import RecipeStep
    from ckpt_tools.recipes.quantize import QuantizeStep

LATEST_FILES = (LATEST, LATEST_UNIVERSAL, TRACKER_FILE)
"""Files of a run that say which of its checkpoints is meant: DeepSpeed's and Megatron's."""


def read_source(source: Source, options: ReadOptions, *, format_name: str | None = None) -> tuple[Source, Manifest]:
    """The manifest of ``source``, and the source whose files its shards name.

    Raises:
        CkptError: as ``find_format`` and ``Format.read``.
    """
    stored_bytes = sum(source.files.values())
    with _explain_errors(source):
        refuse_several_models(source, options.tag)
        found_halves = (each.find_halves(source, format_name) for each in TRAINERS if each.find_halves is not None)
        halves = next((each for each in found_halves if each is not None), None)
        reader = find_format(source, format_name) if halves is None else get_readable_format(halves.format)
    with _explain_errors(source, reader if halves is None and format_name is None else None):
        if halves is None:
            manifest, tensorless_files = _read_with_optimizer(reader, source, options)
        else:
            from ckpt_tools.reading.halves import read_halves

            manifest, tensorless_files = read_halves(source, halves, options)
        _refuse_other_steps(source, manifest, options)
    if halves is None:
        tensorless_files |= reader.own_files(source, manifest)
    source = reader.served(source, manifest)
    manifest = add_step_doubts(
        replace(enrich_manifest(manifest, source, tensorless_files), stored_bytes=stored_bytes), source
    )
    if may_be_quantized(manifest):
        from ckpt_tools.reading.model_files import read_nearest_config

        is_quantized = get_quantization_config(read_nearest_config(source, manifest)) is not None
        manifest = replace(manifest, is_quantized=is_quantized)
    return replace(source, store=overlay_literals(source.store, manifest.literals)), manifest


def _read_with_optimizer(reader: Format, source: Source, options: ReadOptions) -> tuple[Manifest, frozenset[str]]:
    """The manifest of a model, joined with an optimizer in a file beside it, and that file."""
    optimizer_path = find_optimizer_file(source.files)
    if optimizer_path is None:
        return read_manifest(reader, source, options), frozenset()
    from ckpt_tools.reading.optimizer_file import read_model_and_optimizer

    manifest, is_joined = read_model_and_optimizer(reader, source, optimizer_path, options)
    if options.optimizer_file is not None and not is_joined:
        raise UsageError(
            f"{format_option('optimizer_file')} is for a model alone in safetensors or a torch file; here is more"
        )
    return manifest, frozenset([optimizer_path] if is_joined else [])


@contextmanager
def _explain_errors(source: Source, detected_format: Format | None = None) -> Iterator[None]:
    """Adds to errors: the file or folder, how to name one of several checkpoints, and the plug-in that recognises what
    ``detected_format``, a format that the user did not name, cannot read."""
    try:
        yield
    except SeveralCheckpointsError as error:
        from ckpt_tools.trainers.run_folders import suggest_checkpoint

        raise SeveralCheckpointsError(error.message + suggest_checkpoint(source)) from error
    except (FormatError, UnsafeError) as error:
        error.path = error.path or get_error_path(source)
        refuse_foreign_content(source, error.path)
        if detected_format is not None:
            error.message += suggest_plugin(source, detected_format)
        raise


def _refuse_other_steps(source: Source, manifest: Manifest, options: ReadOptions) -> None:
    """Raises SeveralCheckpointsError if the folder of one step was read, another step has a folder of another format,
    and neither a tag nor a file of the run chooses: each reader sees the folders of its own format alone."""
    used_files = manifest.files & source.files.keys()
    is_chosen = options.tag is not None or any(name in source.files for name in LATEST_FILES)
    if is_chosen or not used_files or any("/" not in file for file in used_files):
        return
    from ckpt_tools.trainers.run_folders import find_other_checkpoints

    other_names = [each.name for each in find_other_checkpoints(source, used_files) if each.is_finished]
    if other_names:
        names = join_newest([*other_names, min(used_files).rpartition("/")[0]])
        raise SeveralCheckpointsError.of(names)


def get_error_path(source: Source) -> str:
    """The one file of ``source``, or the folder, for an error about all of it."""
    return next(iter(source.files)) if len(source.files) == 1 else source.store.url


def make_read_back_options(source: str, target: str, options: ConvertOptions) -> ReadOptions:
    """Options for reading what was converted from the format ``source`` to ``target``: a DCP keeps the tree of a DCP,
    a file of torch that of one, and with it the keys."""
    is_kept = source == target and source in ("dcp", "torch")
    return ReadOptions(model_key=options.model_key, optim_key=options.optim_key) if is_kept else ReadOptions()


def make_recipe_step(opened: OpenedCheckpoint, options: ConvertOptions) -> RecipeStep | None:
    """The step of the recipe and the prefix that ``options`` name, and of dequantizing; None if they ask for none.
    Raises CkptError if the recipe or ``config.json`` cannot be read."""
    if not options.needs_config and options.strip is None:
        return None
    from ckpt_tools.reading.recipe_step import RecipeStep

    return RecipeStep.of(opened, options)


def make_quantize_step(opened: OpenedCheckpoint, options: ConvertOptions) -> QuantizeStep | None:
    """The step that quantizes as ``options`` ask for; None if they do not. Raises CkptError if there is no
    ``config.json`` of the model, or it cannot be read."""
    if options.quantize is None:
        return None
    from ckpt_tools.recipes.quantize import QuantizeStep

    config = opened.find_config()
    if config is None or "model_type" not in config:
        raise UsageError(
            f"{format_option('quantize', options.quantize)} needs the model's config.json with its model_type, where "
            f"loaders find how weights are quantized; name its folder with {format_option('config')}"
        )
    return QuantizeStep(options.quantize, options.keep, config)


def make_option_case(
    manifest: Manifest, target: str, *, keeps_both: bool, is_whole_state: bool, has_recipe: bool = False
) -> OptionContext:
    """The case that options are checked against when ``manifest`` is read and ``target`` written."""
    reader, writer = lookup_format(manifest.format), lookup_format(target) if target else None
    return OptionContext(
        source_format=manifest.format,
        target_format=target,
        reader_options=() if reader is None else reader.reading_options_of(manifest),
        writer_options=() if writer is None else writer.writing_options,
        is_weights_alone=writer is not None and writer.is_weights_alone,
        has_masters=any(key.slot == MASTER for key in manifest.tensors),
        keeps_both_copies=keeps_both,
        has_state=is_whole_state and bool(manifest.groups or manifest.select_kinds(Kind.STATE)),
        has_recipe=has_recipe,
    )


def check_reading_options(manifest: Manifest, options: ReadOptions) -> None:
    """Raises UsageError if a reading option does not apply to the format of ``manifest``."""
    check_applicability(
        READING_RULES, asdict(options), make_option_case(manifest, "", keeps_both=False, is_whole_state=False)
    )
