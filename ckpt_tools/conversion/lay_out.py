"""The files of a conversion's output: tensors, the files of the model beside them, and what is lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt_tools.arguments import is_remote
from ckpt_tools.conversion.edit import EditedCheckpoint
from ckpt_tools.conversion.target import ConversionTarget
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.limits import note_rank_states
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import collect_name_shapes
from ckpt_tools.core.notes import Note, Outcome, merge_notes
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertRequest, WriteOptions
from ckpt_tools.core.transforms import note_casts
from ckpt_tools.errors import LossError, UsageError
from ckpt_tools.messages.wording import escape_unprintable, join_names
from ckpt_tools.reading.model_files import (
    ModelFiles,
    add_model_files,
    apply_config_ties,
    note_missing_config,
)
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.transformers import ADAPTER_CONFIG_FILE


@dataclass(frozen=True, slots=True)
class LaidOutCheckpoint:
    """The files of the output, and the source with all that is copied into them: ``manifest`` has these files as
    tensors of bytes, so that they are moved and counted like tensors. ``hub_naming_hint`` are the options that lead to
    names which ``from_pretrained`` knows; empty if it knows these."""

    source: Source
    manifest: Manifest
    layout: Layout
    write_options: WriteOptions
    notes: tuple[Note, ...]
    hub_naming_hint: str

    def format_loading_code(self, target: ConversionTarget) -> str:
        """Python code that loads the output, from a local copy if it is in a store."""
        place, naming_hint = target.place, self.hub_naming_hint
        is_in_store = is_remote(place.url)
        code = target.writer.loading(
            place.name if is_in_store else place.url,
            self.manifest,
            replace(self.layout, config={}) if naming_hint else self.layout,
            self.write_options,
        )
        hint_comment = f"# from_pretrained does not know these names: {naming_hint}\n" if naming_hint else ""
        copy_comment = f"\n# {place.name}: a local copy of {escape_unprintable(place.url)}" if is_in_store else ""
        return hint_comment + code + copy_comment


def lay_out_checkpoint(
    opened: OpenedCheckpoint, edited: EditedCheckpoint, target: ConversionTarget, request: ConvertRequest
) -> LaidOutCheckpoint:
    """Lay out the tensors and the files that are copied beside them, and collect all notes.

    Raises:
        LossError: with ``strict``, something would be lost. CkptError: the format cannot hold it.
    """
    writer, source, manifest = target.writer, edited.source, edited.manifest
    write_options = _build_write_options(opened, edited, target, request)
    model_files = _find_output_model_files(opened, edited, target, request)
    tie_notes: tuple[Note, ...] = ()
    if model_files is not None:
        manifest, model_files, tie_notes = apply_config_ties(manifest, model_files, untie=request.untie)
    elif request.untie:
        reason = f"this writes {writer.name}" + (", and finds none" if target.takes_model_files else "")
        raise UsageError(f"{format_option('untie', True)} is for folders with a config.json; {reason}")
    layout, copied_paths = writer.layout(manifest, write_options), frozenset[str]()
    if model_files is not None:
        source, copied_paths = replace(source, store=model_files.join_to(source.store)), model_files.sources
        layout = add_model_files(layout, model_files, manifest)
    elif target.takes_model_files and (note := note_missing_config(source, manifest)) is not None:
        layout = replace(layout, notes=(*layout.notes, note))
    name_notes, hub_naming_hint = _note_foreign_names(edited, model_files)
    manifest = _add_copied_files(manifest, layout, copied_paths)
    # The adapter's settings were read for the merge or are written anew: no file that is left behind.
    adapter_files = {ADAPTER_CONFIG_FILE} if edited.merge is not None or writer.asks_adapter_config else set()
    merged_notes = merge_notes(
        name_notes
        + manifest.notes
        + tie_notes
        + note_casts(edited.applied_options.uncast_manifest, edited.applied_options.manifest, layout.uncast_buffers)
        + (note_rank_states(manifest, write_options.world_size) if "world_size" in writer.writing_options else ())
        + layout.notes
        + _note_uncopied_companions(
            manifest, copied_paths | adapter_files, layout, takes_model_files=target.takes_model_files
        )
    )
    notes = tuple(note for note in merged_notes if note.what.rpartition("/")[2] not in adapter_files)
    lost_items = [note.what for note in notes if note.is_loss]
    if request.strict and lost_items:
        raise LossError(
            f"with {format_option('strict', True)} nothing may be lost, and this would lose {join_names(lost_items)}"
        )
    return LaidOutCheckpoint(source, manifest, layout, write_options, notes, hub_naming_hint)


def _build_write_options(
    opened: OpenedCheckpoint, edited: EditedCheckpoint, target: ConversionTarget, request: ConvertRequest
) -> WriteOptions:
    """The keys say where a tree is read where the source is one, and where it is written elsewhere."""
    manifest, writer = opened.manifest, target.writer
    is_tree, adapter_text = manifest.tree is not None, b""
    if writer.asks_adapter_config:
        adapter_text = opened.read_adapter_config()
    config = opened.find_config() if writer.asks_model_type else None
    return WriteOptions(
        file_name=target.place.form.file_name,
        max_shard_bytes=request.max_shard_bytes,
        world_size=request.world_size or manifest.world_size or 1,
        tag=request.tag,
        model_key=None if is_tree else request.model_key,
        optim_key=None if is_tree else request.optim_key,
        model_config=config or {},
        shard_map={} if edited.like is None else edited.like.reference.files,
        adapter_config=adapter_text,
    )


def _find_output_model_files(
    opened: OpenedCheckpoint, edited: EditedCheckpoint, target: ConversionTarget, request: ConvertRequest
) -> ModelFiles | None:
    """The files that say what the model is, for a folder of its weights; None if none is written or there are none."""
    if not target.takes_model_files:
        if request.quantize is not None:
            quantize = format_option("quantize", request.quantize)
            raise UsageError(f"{quantize} writes a folder with config.json; {target.place.name} is one file")
        if opened.config_folder is not None and not (request.needs_config or target.writer.asks_adapter_config):
            raise UsageError(f"{format_option('config')} is for folders; {target.place.name} is one file")
        return None
    like = edited.like
    if like is None:
        return opened.find_model_files(edited.manifest)
    files = replace(opened, config_folder=like.config_folder).find_model_files(edited.manifest)
    return None if files is None else replace(files, is_from_reference=True)


def _note_foreign_names(edited: EditedCheckpoint, model_files: ModelFiles | None) -> tuple[tuple[Note, ...], str]:
    """A note on names that are not the hub's beside a ``config.json``; and if ``from_pretrained`` does not know them,
    how they become the hub's. A folder of safetensors is taken for one of the hub: it costs 20 ms to know."""
    is_mapped = edited.recipe is not None or edited.like is not None
    if model_files is None or is_mapped or edited.manifest.format == "safetensors":
        return (), ""
    from ckpt_tools.reading.naming import detect_naming

    naming = detect_naming(edited.source, edited.manifest, collect_name_shapes(edited.manifest), model_files.config)
    if naming is None or not naming.recipes_to_hub:
        return (), ""
    unable_loaders = "other loaders do" if naming.is_live else "from_pretrained does"
    note = Note(
        Outcome.KEPT,
        "names of tensors",
        f"those of {naming.name}, which {unable_loaders} not know; {naming.reference_advice}",
    )
    return (note,), "" if naming.is_live else naming.recipe_advice


def _add_copied_files(manifest: Manifest, layout: Layout, copied_paths: frozenset[str]) -> Manifest:
    """The manifest with the files that the layout copies as they are, without the notes on what a reader made of them:
    the layout says what becomes of each."""
    if layout.copied_files is None:
        return manifest
    noted_paths = manifest.trainer.sources if manifest.trainer is not None and not copied_paths else copied_paths
    notes = tuple(note for note in manifest.notes if note.what not in noted_paths)
    return replace(manifest, tensors={**manifest.tensors, **layout.copied_files}, notes=notes)


def _note_uncopied_companions(
    manifest: Manifest, copied_paths: frozenset[str], layout: Layout, *, takes_model_files: bool
) -> tuple[Note, ...]:
    """A note on the files beside the weights that are not ``copied_paths``, which layouts may have notes on. It is
    no loss where the chosen format has no place for a model's files."""
    accounted_paths = copied_paths.union((note.what for note in layout.notes), (file.path for file in layout.files))
    uncopied_paths = [path for path in manifest.unread_files if path not in accounted_paths]
    reason = (
        "not known to be the model's" if layout.config else "a model's files are copied if its config.json is there"
    )
    reason = reason if takes_model_files else "the output has no place for a model's files"
    return (
        (Note(Outcome.DROPPED, join_names(uncopied_paths), reason, len(uncopied_paths), asked=not takes_model_files),)
        if uncopied_paths
        else ()
    )
