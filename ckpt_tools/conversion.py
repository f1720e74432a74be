"""Any format to any format: wires reader, transforms, writer, plan and execution together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, get_args

from ckpt_tools.core import transforms
from ckpt_tools.core.accounting import check_nothing_lost
from ckpt_tools.core.applicability import check_applicability
from ckpt_tools.core.apply_options import AppliedOptions, apply_options
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.limits import note_rank_states
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey, TensorEntry, count_tensors_by_role
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.notes import Note, Outcome, merge_notes
from ckpt_tools.core.option_names import WrittenFormat, format_option, format_with_aliases
from ckpt_tools.core.options import ConvertOptions, ConvertRequest, ReadOptions, WriteOptions
from ckpt_tools.core.progress import ProgressCallback, ProgressMeter, ignore_progress, log_info
from ckpt_tools.core.quantized import check_companions_selected
from ckpt_tools.core.showing import DisplayableResult
from ckpt_tools.core.trainer_folder import FILE_SLOT
from ckpt_tools.core.transforms import TransformResult, note_casts
from ckpt_tools.core.wording import escape_unprintable, format_count, format_size, join_names
from ckpt_tools.errors import (
    CkptError,
    DestinationExistsError,
    IncompleteError,
    LossError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.formats.applicability import WRITING_RULES
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import get_writable_format
from ckpt_tools.planning.plan import REMOTE_BYTES, CopyLimits, Plan, PlanFigures, estimate_reading_bytes, make_plan
from ckpt_tools.reading.checkpoint import make_option_case, make_read_back_options, make_recipe_step
from ckpt_tools.reading.model_files import (
    ModelFiles,
    add_model_files,
    apply_config_ties,
    find_config,
    find_model_files,
    is_pretrained_folder,
    note_missing_config,
    read_model_config,
)
from ckpt_tools.runs.opening import open_reference_matcher, read_checkpoint, resolve_checkpoint_url
from ckpt_tools.signals import defer_signals
from ckpt_tools.stores.destination import Claim, OutputLocation
from ckpt_tools.stores.marker_files import DIGESTS_SUFFIX
from ckpt_tools.stores.output_form import SingleFileForm
from ckpt_tools.stores.present import NO_FILES, already_exists_error
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.stores.urls import (
    StorageOptions,
    check_destination_suffix,
    check_not_nested,
    check_storage_options,
    find_format_by_suffix,
    is_remote,
    open_output_location,
    open_source,
)
from ckpt_tools.trainers.transformers import ADAPTER_CONFIG_FILE

if TYPE_CHECKING:
    from ckpt_tools.lora.merge import MergeStep
    from ckpt_tools.reading.recipe_step import RecipeStep
    from ckpt_tools.recipes.like import ReferenceMatcher
    from ckpt_tools.recipes.report import UsedRecipe
    from ckpt_tools.transfer.workers import WorkerPool
    from ckpt_tools.verification.digest_files import OutputDigests


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(DisplayableResult):
    """The plan of a conversion. Sizes in bytes: ``num_bytes`` of the tensors that are written, ``file_bytes`` of the
    files that will hold them. ``renamed`` are the names that ``rename`` and ``key_map`` change, by their old ones,
    which are those of ``recipe`` if there is one. ``removed_files`` lie at the destination now and are replaced.
    ``tensors_by_role`` counts the tensors by ``core.manifest.ROLES``; ``tied`` are further names of them, by owner."""

    SHOWN: ClassVar[tuple[str, ...]] = (
        "source_format",
        "target_format",
        "num_tensors",
        "bytes_read",
        "bytes_written",
        "files",
        "peak_memory_bytes",
        "notes",
    )
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("num_tensors", "file_bytes", "removed_bytes")

    source_format: str
    target_format: str
    files: Mapping[str, int]
    tensors_by_role: Mapping[str, int]
    num_tasks: int
    bytes_read: int
    bytes_written: int
    peak_memory_bytes: int
    notes: tuple[Note, ...]
    num_bytes: int
    renamed: Mapping[str, str] = field(default_factory=dict)
    removed_files: Mapping[str, int] = field(default_factory=dict)
    recipe: UsedRecipe | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_tensors(self) -> int:
        return sum(self.tensors_by_role.values())

    @property
    def file_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def removed_bytes(self) -> int:
        return sum(self.removed_files.values())


@dataclass(frozen=True, slots=True, repr=False)
class ConvertReport(DisplayableResult):
    """The result of a conversion. ``bytes_recovered`` were written by an earlier run, and not again; of
    ``bytes_written`` the destination copied ``bytes_copied`` itself; ``digests`` is the path or URL of the digests, if
    they were asked for. ``loading`` is Python code that loads the output by its own framework: it names ``model`` and
    ``optimizer``, and comments say what is not Python."""

    SHOWN: ClassVar[tuple[str, ...]] = (
        "destination",
        "target_format",
        "num_tensors",
        "bytes_written",
        "seconds",
        "notes",
    )

    plan: PlanReport
    destination: str
    bytes_read: int
    bytes_written: int
    bytes_recovered: int
    bytes_copied: int
    seconds: float
    digests: str | None = None
    loading: str = ""

    @property
    def source_format(self) -> str:
        return self.plan.source_format

    @property
    def target_format(self) -> str:
        return self.plan.target_format

    @property
    def files(self) -> Mapping[str, int]:
        """The files of the output with their sizes."""
        return self.plan.files

    @property
    def num_tensors(self) -> int:
        return self.plan.num_tensors

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return self.plan.num_bytes

    @property
    def notes(self) -> tuple[Note, ...]:
        """Outcomes: what was cast, set to a default, kept or dropped."""
        return self.plan.notes


@dataclass(frozen=True, slots=True)
class PreparedConversion:
    """A conversion ready to run."""

    request: ConvertRequest
    store: Store
    plan: Plan
    report: PlanReport
    place: OutputLocation
    output_read_options: ReadOptions = field(default_factory=ReadOptions)
    """Options for reading the output, if it has the tree of a source that was read with them."""
    format_loading_code: Callable[[], str] = str
    """Makes Python code that loads the output."""
    source_manifest: Manifest | None = None
    """The source as it was read, whose copies of weights are compared, and which of them is written."""
    written_copy_text: str = ""


@dataclass(frozen=True, slots=True)
class _Opened:
    """The source as it was read, the adapter that is merged into it, and where and how it is written. ``source`` has
    the adapter's files too, and ``config`` of ``request`` is the model's alone."""

    request: ConvertRequest
    src: str | Path
    source: Source
    manifest: Manifest
    merge: MergeStep | None
    place: OutputLocation
    writer: Format

    @property
    def writes_whole_state(self) -> bool:
        return _is_whole_state_written(self.request, self.writer)

    @property
    def writes_weights_and_masters(self) -> bool:
        """Whether a weight is written beside its fp32 master."""
        return self.writes_whole_state and (self.writer.holds_masters or self.manifest.keeps_masters)

    @property
    def takes_model_files(self) -> bool:
        return is_pretrained_folder(self.writer, self.place.form)


@dataclass(frozen=True, slots=True)
class _Edited:
    """``manifest`` is what the options make of the source, without values that the format cannot hold, and ``source``
    computes what has to be."""

    source: Source
    manifest: Manifest
    applied_options: AppliedOptions
    recipe: RecipeStep | None
    like: ReferenceMatcher | None


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """The files of the output, and the source with all that is copied into them. ``hub_naming_hint`` are the options
    that lead to names which ``from_pretrained`` knows; empty if it knows these."""

    source: Source
    manifest: Manifest
    layout: Layout
    write_options: WriteOptions
    notes: tuple[Note, ...]
    hub_naming_hint: str


def plan_conversion(request: ConvertRequest) -> PlanReport:
    """Plan a conversion; write nothing."""
    return prepare_conversion(request, _choose_worker_pool(request)).report


def run_conversion(request: ConvertRequest) -> ConvertReport:
    """Write the destination: whole, or not at all."""
    pool = _choose_worker_pool(request)
    return write_destination(prepare_conversion(request, pool), pool)


def _choose_worker_pool(request: ConvertRequest) -> WorkerPool:
    from ckpt_tools.transfer.workers import WorkerPool

    urls = (request.src, request.dst, request.config, request.like, request.adapter)
    check_storage_options(request.storage_options, *urls)
    return WorkerPool.choose_for_urls(request.runner, request.address, request.workers, request.src, request.dst)


def prepare_conversion(request: ConvertRequest, pool: WorkerPool) -> PreparedConversion:
    """Everything about a conversion but the moving of bytes; writes nothing.

    Raises:
        CkptError: whatever stands in the way is found here, before the destination is touched.
    """
    opened = _open_source_and_target(request)
    edited = _edit_manifest(opened)
    laid_out = _lay_out_files(opened, edited)
    plan = _plan_tasks(opened, laid_out, pool)
    figures = plan.compute_figures()
    _check_written_tensors(opened, edited, laid_out, select_written_tensors(plan.manifest, figures))
    replaced_sizes = find_replaced_files(opened.place, plan.layout, request)
    source_format, target_format = opened.manifest.format, opened.writer.name
    report = replace(
        build_plan_report(plan, figures, source_format, target_format, replaced_sizes),
        notes=laid_out.notes,
        renamed=edited.applied_options.new_name_by_old,
        recipe=None if edited.recipe is None else edited.recipe.used_recipe,
    )
    _log_plan(report)
    return PreparedConversion(
        request=opened.request,
        store=laid_out.source.store,
        plan=plan,
        report=report,
        place=opened.place,
        output_read_options=make_read_back_options(source_format, target_format, request),
        format_loading_code=partial(_format_loading_code, opened, laid_out),
        source_manifest=opened.manifest,
        written_copy_text=_describe_written_copy(opened),
    )


def _open_source_and_target(request: ConvertRequest) -> _Opened:
    """Read the source, and choose the writer."""
    storage_options = request.storage_options
    src, place = (
        resolve_checkpoint_url(request.src, storage_options),
        open_output_location(request.dst, storage_options),
    )
    writer = _choose_requested_writer(request, place.name)
    reads_weights_only = request.adapter is not None or (
        writer is not None and not _is_whole_state_written(request, writer)
    )
    read_options = replace(request.read_options, state="model" if reads_weights_only else "all")
    source, manifest = read_checkpoint(
        src, read_options, format_name=request.from_, storage_options=storage_options, step_by_name=True
    )
    check_not_nested(src, request.dst, storage_options)
    merge, source, request = _prepare_lora_merge(request, src, source, manifest)
    writer = writer or _choose_source_writer(request, manifest, place.name)
    if (
        manifest.unnamed_optimizer
        and writer.holds_optimizer
        and _is_whole_state_written(request, writer)
        and writer.name != manifest.format
    ):
        # The run that resumes from the output would start with an empty optimizer.
        alternative = (
            ""
            if format_option("state", "model") in manifest.unnamed_optimizer
            else f", or convert with {format_option('state', 'model')}"
        )
        raise UnsupportedError(
            f"{writer.name} keeps an optimizer by the names of its parameters; "
            f"{manifest.unnamed_optimizer}{alternative}"
        )
    return _Opened(request, src, source, manifest, merge, place, writer)


def _is_whole_state_written(options: ConvertOptions, writer: Format) -> bool:
    """Whether all state is written: what the user says, else what the format is for."""
    return writer.holds_optimizer if options.state is None else options.state == "all"


def _choose_requested_writer(request: ConvertRequest, destination_name: str) -> Format | None:
    """The writer of the format that the user names, or that ``destination_name`` implies; with ``like`` that of
    folders for ``from_pretrained``. None if it is the source's own format."""
    is_format_given = request.to is not None or find_format_by_suffix(destination_name) is not None
    if request.keeps_format or (request.adapter is not None and not is_format_given):
        return None
    return _find_writer(
        "safetensors" if request.like is not None and not is_format_given else request.to, destination_name
    )


def _find_writer(to: str | None, destination_name: str) -> Format:
    check_destination_suffix(destination_name, to)
    implied = find_format_by_suffix(destination_name)
    if to is None and implied is None:
        raise UsageError(
            f"choose a format with {format_option('to')}: {format_with_aliases('to', get_args(WrittenFormat))}"
        )
    if to is not None and implied is not None and to != implied:
        raise UsageError(
            f"{destination_name} is a {implied} file, which {format_option('to', to)} contradicts; name a folder or "
            f"drop "
            f"{format_option('to')}"
        )
    return get_writable_format(to or implied or "")


def _choose_source_writer(request: ConvertRequest, manifest: Manifest, destination_name: str) -> Format:
    """The writer of the source's own format: for another world size, or of a base model in safetensors."""
    if not request.keeps_format:
        return _find_writer("safetensors" if manifest.format == "safetensors" else None, destination_name)
    if manifest.world_size is None or manifest.format in ("universal", "zero0"):
        raise UsageError(f"a {manifest.format} checkpoint has no world size to change")
    return _find_writer(manifest.format, destination_name)


def _prepare_lora_merge(
    request: ConvertRequest, src: str | Path, source: Source, manifest: Manifest
) -> tuple[MergeStep | None, Source, ConvertRequest]:
    """The step that merges the adapter, the source that has its files too, and the request, whose ``config`` is that of
    the base model alone."""
    if request.adapter is None:
        return None, source, request
    from ckpt_tools.lora.merge import MergeStep
    from ckpt_tools.reading.adapter import open_adapter
    from ckpt_tools.reading.naming import find_options_to_live_model

    storage_options = request.storage_options
    check_not_nested(request.adapter, request.dst, storage_options)
    opened_adapter = open_adapter(
        request, *read_checkpoint(request.adapter, ReadOptions(), storage_options=storage_options), source.store
    )
    if request.config is not None and read_model_config(open_source(request.config, storage_options)) is None:
        request = replace(request, config=None)
    config = find_config(src, source, manifest, request) or {}
    find_live_naming = partial(find_options_to_live_model, config)
    merge = MergeStep(
        opened_adapter.adapter, opened_adapter.config, config, request.untie, request.allow_missing, find_live_naming
    )
    return merge, replace(source, store=opened_adapter.store), request


def _edit_manifest(opened: _Opened) -> _Edited:
    """Apply the options to the manifest, and refuse those that do not fit it."""
    request, manifest, writer, is_whole = opened.request, opened.manifest, opened.writer, opened.writes_whole_state
    recipe, like = make_recipe_step(opened.src, opened.source, manifest, request), open_reference_matcher(request)
    case = make_option_case(
        manifest,
        writer.name,
        keeps_both=opened.writes_weights_and_masters,
        is_whole_state=is_whole,
        has_recipe=request.needs_config,
    )
    check_applicability(WRITING_RULES, request.values_by_name, case)
    if recipe is None:
        _check_quantized_selection(manifest, request)
    try:
        applied = apply_options(
            manifest,
            request,
            writes_all_state=is_whole,
            holds_masters=writer.holds_masters,
            keeps_tree=writer.name == manifest.format,
            kept_entries=writer.kept_entries,
            recipe=None if recipe is None else partial(_apply_recipe, recipe, request),
            merge=opened.merge,
            like=like,
        )
    except (UsageError, IncompleteError) as error:
        raise _name_options_in_error(error, request) from error
    manifest, source = applied.manifest, opened.source
    can_hold_values = writer.holds_values == "always" or (is_whole and writer.holds_values == "with state")
    if manifest.values and not can_hold_values:
        manifest, notes = transforms.drop_values(manifest, target_name=writer.name)
        manifest = replace(manifest, notes=(*manifest.notes, *notes))
    if recipe is not None or opened.merge is not None or like is not None:
        from ckpt_tools.transfer.computing import add_generated_files

        source = replace(source, store=add_generated_files(source.store, manifest))
    _check_dtypes(manifest, writer)
    return _Edited(source, manifest, applied, recipe, like)


def _name_options_in_error(error: UsageError | IncompleteError, request: ConvertRequest) -> CkptError:
    """The error with the options that names depend on, because what one makes the other may not find."""
    option_fields = ("dequantize", "strip", "recipe", "include", "exclude", "rename", "key_map", "like")
    given_options = [format_option(name) for name in option_fields if getattr(request, name)]
    unnamed_options = [each for each in given_options if each not in error.message]
    if (
        not unnamed_options
        or (len(given_options) < 2 and request.adapter is None)
        or (isinstance(error, IncompleteError) and request.like is None)
    ):
        return error
    return UsageError(f"{error.message} (with {join_names(unnamed_options)})")


def _check_quantized_selection(manifest: Manifest, options: ConvertOptions) -> None:
    """Raises UsageError if a quantized weight is selected without its scales."""
    if options.include or options.exclude:
        check_companions_selected(manifest, lambda fqn: is_selected(fqn, options.include, options.exclude))


def _apply_recipe(recipe: RecipeStep, options: ConvertOptions, manifest: Manifest) -> TransformResult:
    """The step of a recipe, whose names are those that the user selects by."""
    mapped_manifest, notes = recipe(manifest)
    _check_quantized_selection(mapped_manifest, options)
    return mapped_manifest, notes


def _check_dtypes(manifest: Manifest, writer: Format) -> None:
    """Raises UnsupportedError for a tensor that torch has no dtype for, if the format does not keep it."""
    for key, entry in () if writer.keeps_every_dtype else manifest.tensors.items():
        if not entry.dtype.is_torch_dtype:
            alternative = f"write {format_option('to', 'safetensors')}, or exclude it"
            raise UnsupportedError(f"{writer.name} does not support {entry.dtype.value}; {alternative}", key=str(key))


def _lay_out_files(opened: _Opened, edited: _Edited) -> _LaidOut:
    """Lay out the tensors and the files that are copied beside them, and collect all notes.

    Raises:
        LossError: with ``strict``, something would be lost. CkptError: the format cannot hold it.
    """
    request, writer, source, manifest = opened.request, opened.writer, edited.source, edited.manifest
    write_options, model_files = _build_write_options(opened, edited.like), _find_output_model_files(opened, edited)
    tie_notes: tuple[Note, ...] = ()
    if model_files is not None:
        manifest, model_files, tie_notes = apply_config_ties(manifest, model_files, untie=request.untie)
    elif request.untie:
        reason = f"this writes {writer.name}" + (", and finds none" if opened.takes_model_files else "")
        raise UsageError(f"{format_option('untie', True)} is for folders with a config.json; {reason}")
    layout, copied_paths = writer.layout(manifest, write_options), frozenset[str]()
    if model_files is not None:
        source, copied_paths = replace(source, store=model_files.store), model_files.sources
        layout = add_model_files(layout, model_files, manifest)
    elif opened.takes_model_files and (note := note_missing_config(source, manifest)) is not None:
        layout = replace(layout, notes=(*layout.notes, note))
    name_notes, hub_naming_hint = _note_foreign_names(edited, model_files)
    manifest = _add_copied_files(manifest, layout, copied_paths)
    adapter_files = {ADAPTER_CONFIG_FILE} if opened.merge is not None or writer.asks_adapter_config else set()
    merged_notes = merge_notes(
        name_notes
        + manifest.notes
        + tie_notes
        + note_casts(edited.applied_options.uncast_manifest, edited.applied_options.manifest, layout.uncast_buffers)
        + (note_rank_states(manifest, write_options.world_size) if "world_size" in writer.writing_options else ())
        + layout.notes
        + _note_uncopied_companions(
            manifest, copied_paths | adapter_files, layout, takes_model_files=opened.takes_model_files
        )
    )
    notes = tuple(note for note in merged_notes if note.what.rpartition("/")[2] not in adapter_files)
    lost_items = [note.what for note in notes if note.is_loss]
    if request.strict and lost_items:
        raise LossError(
            f"with {format_option('strict', True)} nothing may be lost, and this would lose {join_names(lost_items)}"
        )
    return _LaidOut(source, manifest, layout, write_options, notes, hub_naming_hint)


def _build_write_options(opened: _Opened, like: ReferenceMatcher | None) -> WriteOptions:
    """The keys say where a tree is read where the source is one, and where it is written elsewhere."""
    request, source, manifest, writer = opened.request, opened.source, opened.manifest, opened.writer
    is_tree, adapter_text = manifest.tree is not None, b""
    if writer.asks_adapter_config:
        from ckpt_tools.reading.adapter import read_adapter_config

        adapter_text = read_adapter_config(opened.src, source, manifest, request)
    config = find_config(opened.src, source, manifest, request) if writer.asks_model_type else None
    return WriteOptions(
        file_name=opened.place.form.file_name,
        max_shard_bytes=request.max_shard_bytes,
        world_size=request.world_size or manifest.world_size or 1,
        tag=request.tag,
        model_key=None if is_tree else request.model_key,
        optim_key=None if is_tree else request.optim_key,
        model_config=config or {},
        shard_map={} if like is None else like.reference.files,
        adapter_config=adapter_text,
    )


def _find_output_model_files(opened: _Opened, edited: _Edited) -> ModelFiles | None:
    """The files that say what the model is, for a folder of its weights; None if none is written or there are none."""
    request, like = opened.request, edited.like
    if not opened.takes_model_files:
        if request.config is not None and not (request.needs_config or opened.writer.asks_adapter_config):
            raise UsageError(f"{format_option('config')} is for folders; {opened.place.name} is one file")
        return None
    config_folder, storage_options = request.config if like is None else like.config_folder, request.storage_options
    model_files = find_model_files(
        opened.src, edited.source, edited.manifest, config=config_folder, storage_options=storage_options
    )
    return None if model_files is None else replace(model_files, is_from_reference=like is not None)


def _note_foreign_names(edited: _Edited, model_files: ModelFiles | None) -> tuple[tuple[Note, ...], str]:
    """A note on names that are not the hub's beside a ``config.json``; and if ``from_pretrained`` does not know them,
    how they become the hub's. A folder of safetensors is taken for one of the hub: it costs 20 ms to know."""
    is_mapped = edited.recipe is not None or edited.like is not None
    if model_files is None or is_mapped or edited.manifest.format == "safetensors":
        return (), ""
    from ckpt_tools.reading.naming import detect_naming

    naming = detect_naming(edited.source, edited.manifest, model_files.config)
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
    """A note on the files beside the weights that are not ``copied_paths``, which layouts may have notes on. Whoever
    chooses a format without a place for a model's files asks for that."""
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


def _plan_tasks(opened: _Opened, laid_out: _LaidOut, pool: WorkerPool) -> Plan:
    request, place, layout = opened.request, opened.place, laid_out.layout
    return make_plan(
        laid_out.manifest,
        layout,
        memory_bytes=request.memory_bytes,
        num_workers=pool.workers_per_process,
        is_limit=request.memory is not None,
        required_task_bytes=_choose_task_bytes(place, layout),
        reading_bytes=estimate_reading_bytes(opened.manifest),
        remote_bytes=estimate_client_bytes(opened.src, request.dst, request.adapter or request.dst),
        copy_limits=_find_copy_rules(laid_out.source, place),
    )


def _choose_task_bytes(place: OutputLocation, layout: Layout) -> int:
    """The size of tasks that the place asks for; files made one by one are not made for a place that does not care."""
    if place.part_rules.max_parts is None:
        return place.part_rules.required_task_bytes(0)
    return place.part_rules.required_task_bytes(max((file.size_bytes for file in layout.files), default=0))


def _find_copy_rules(source: Source, place: OutputLocation) -> CopyLimits | None:
    """Rules for cutting files whose ranges the destination's service can copy from the source; None if it cannot."""
    part_rules, store = place.part_rules, source.store
    if part_rules.server_copy_rules is None or part_rules.max_parts is None:
        return None
    source_location = next((store.find_copy_source(path) for path in source.files), None)
    is_same_service = source_location is not None and source_location.service == part_rules.server_copy_rules.service
    return CopyLimits(part_rules.server_copy_rules.min_bytes, part_rules.max_parts) if is_same_service else None


def estimate_client_bytes(*urls: str | Path) -> int:
    """Memory of the clients of stores that are not local."""
    return REMOTE_BYTES if any(map(is_remote, urls)) else 0


def _check_written_tensors(
    opened: _Opened, edited: _Edited, laid_out: _LaidOut, written_tensors: Mapping[StateKey, TensorEntry]
) -> None:
    """Raises UsageError or UnsupportedError where no tensor is written, or no weight though the source has some and the
    user selected no others. Raises CkptError for a tensor that is neither written nor named in a note."""
    has_selection = bool(opened.request.include or opened.request.exclude)
    if not written_tensors and has_selection:
        raise UsageError(
            f"{format_option('include')} and {format_option('exclude')} leave no tensor that could be written"
        )
    if not written_tensors:
        raise UnsupportedError("no tensor would be written: the target format has no place for those of the source")
    if not has_selection and _has_weights(opened.manifest.tensors) and not _has_weights(written_tensors):
        raise UnsupportedError("none of the model's weights would be written")
    is_mapped = any(each is not None for each in (edited.recipe, opened.merge, edited.like))
    check_nothing_lost(
        opened.manifest, edited.applied_options.manifest, written_tensors, laid_out.notes, is_mapped=is_mapped
    )


def _has_weights(tensors: Mapping[StateKey, TensorEntry]) -> bool:
    return any(entry.kind in (Kind.PARAMETER, Kind.BUFFER) for entry in tensors.values())


def _format_loading_code(opened: _Opened, laid_out: _LaidOut) -> str:
    """The code that loads the output, from a local copy if it is in a store."""
    place, layout, naming_hint = opened.place, laid_out.layout, laid_out.hub_naming_hint
    is_in_store = is_remote(place.url)
    code = opened.writer.loading(
        place.name if is_in_store else place.url,
        laid_out.manifest,
        replace(layout, config={}) if naming_hint else layout,
        laid_out.write_options,
    )
    hint_comment = f"# from_pretrained does not know these names: {naming_hint}\n" if naming_hint else ""
    copy_comment = f"\n# {place.name}: a local copy of {escape_unprintable(place.url)}" if is_in_store else ""
    return hint_comment + code + copy_comment


def _describe_written_copy(opened: _Opened) -> str:
    """The copy of a weight that is written, in words for the note on copies that differ."""
    if opened.writes_weights_and_masters:
        return "both are written"
    if opened.request.choose_weight_copy(opened.manifest) == "model":
        return "the model's is written" + (
            ", as ZenFlow updates masters later" if opened.manifest.masters_are_outdated else ""
        )
    return f"the master is written; {format_option('weights', 'model')} writes the model's"


def _log_plan(report: PlanReport) -> None:
    formats = f"{report.source_format} to {report.target_format}"
    log_info(
        "conversion", f"{formats}: {format_size(report.bytes_written)} in {format_count(report.num_tasks, 'task')}"
    )
    for note in report.notes:
        log_info("notes", f"{note.outcome.value}: {note.what} ({note.why})")


def select_written_tensors(manifest: Manifest, figures: PlanFigures) -> Mapping[StateKey, TensorEntry]:
    """The tensors whose elements a layout writes. A weight can be written as its fp32 master alone, and a number
    of an optimizer's state as a value with the tensors of that state."""
    stored_keys = figures.tensors
    state_names = {key.fqn for key in stored_keys if manifest.tensors[key].kind is Kind.STATE}

    def is_written(key: StateKey, entry: TensorEntry) -> bool:
        is_number = entry.kind is Kind.STATE and not entry.shape and key.fqn in state_names
        return (
            key in stored_keys
            or is_number
            or not entry.numel
            or (key.slot == WEIGHT and StateKey(key.fqn, MASTER) in stored_keys)
        )

    return {key: entry for key, entry in manifest.tensors.items() if key.slot != FILE_SLOT and is_written(key, entry)}


def build_plan_report(
    plan: Plan, figures: PlanFigures, source_format: str, target_format: str, replaced_sizes: Mapping[str, int]
) -> PlanReport:
    """The plan in figures, without notes. ``replaced_sizes`` are files that are there now, names and sizes."""
    tensors = select_written_tensors(plan.manifest, figures)
    return PlanReport(
        source_format=source_format,
        target_format=target_format,
        files=figures.files,
        tensors_by_role=count_tensors_by_role(tensors),
        num_bytes=sum(entry.num_bytes for entry in tensors.values()),
        num_tasks=figures.num_tasks,
        bytes_read=figures.bytes_read,
        bytes_written=figures.bytes_written,
        peak_memory_bytes=plan.peak_memory_bytes,
        notes=(),
        removed_files=replaced_sizes,
        tied={alias: owner for alias, owner in plan.manifest.aliases.items() if StateKey(owner) in tensors},
    )


def write_destination(prepared: PreparedConversion, pool: WorkerPool) -> ConvertReport:
    """Write the destination: whole, or not at all.

    Raises:
        DestinationExistsError, StoreError, FormatError: as the stores and the source's bytes say.
        DifferenceError: tensors that become one differ; nothing was written.
    """
    # A plan alone moves nothing, and needs none of these.
    from ckpt_tools.transfer.execute import execute_plan
    from ckpt_tools.transfer.journal import JournalPolicy
    from ckpt_tools.transfer.runners.threads import ThreadRunner

    start_seconds = time.perf_counter()
    plan, report, request = prepared.plan, prepared.report, prepared.request
    is_selection = request.include or request.exclude  # no byte of another tensor is read then
    if (
        not is_selection
        and prepared.source_manifest is not None
        and any(key.slot == MASTER for key in prepared.source_manifest.tensors)
    ):
        from ckpt_tools.transfer.copies import note_differing_copies

        notes = note_differing_copies(
            prepared.source_manifest, prepared.store, prepared.written_copy_text, is_sample=True
        )
        report = replace(report, notes=merge_notes((*report.notes, *notes)))
    if plan.manifest.must_equal:
        from ckpt_tools.transfer.equality import check_required_equal

        check_required_equal(plan.manifest, prepared.store)
    on_progress = request.on_progress or ignore_progress
    journal_policy = JournalPolicy(keeps_output=request.resume)
    claim_context = prepared.place.claim(
        overwrite=request.overwrite, resume=journal_policy.keeps_output, fsync=request.fsync
    )
    with (
        pool.connect_runner(),
        claim_context as claim,
        pool.start_runner(plan, prepared.store, claim.destination) as (runner, board),
    ):
        meter = ProgressMeter(on_progress, report.bytes_written)
        threads = ThreadRunner(plan.num_workers)
        journal = journal_policy.open(claim.log, plan, prepared.store, claim.destination, threads)
        with journal_policy.preserve_output_on_error(journal):
            result = execute_plan(
                plan,
                prepared.store,
                claim.destination,
                runner=runner,
                on_bytes=meter.add_bytes,
                history=journal,
                board=board,
            )
            journal_policy.flush_before_publishing(journal, is_replacing=bool(report.removed_files))
            digests = _open_output_digests(prepared, claim, on_progress) if request.checksum else None
            staged_digest_files = [] if digests is None else digests.write_staged_list()
            with defer_signals():
                claim.publish_files(
                    [*staged_digest_files, *(file.path for file in plan.layout.files)], report.removed_files
                )
        digests_url = None if digests is None else digests.publish_list(staged_digest_files)
    return ConvertReport(
        report,
        prepared.place.url,
        result.bytes_read,
        result.bytes_written,
        journal.bytes_recovered,
        result.bytes_copied,
        time.perf_counter() - start_seconds,
        digests_url,
        prepared.format_loading_code(),
    )


def _open_output_digests(prepared: PreparedConversion, claim: Claim, on_progress: ProgressCallback) -> OutputDigests:
    from ckpt_tools.verification.digest_files import OutputDigests

    return OutputDigests(
        claim,
        prepared.place,
        prepared.report.target_format,
        prepared.output_read_options,
        prepared.plan.num_workers,
        lambda total: ProgressMeter(on_progress, total).add_bytes,
        prepared.request.storage_options,
    )


def find_replaced_files(place: OutputLocation, layout: Layout, request: ConvertRequest) -> Mapping[str, int]:
    """The files at the destination that the output replaces: one checkpoint, and the digests beside it.

    Raises:
        DestinationExistsError: something is there that may not be replaced, or digests of a file that is gone or would
            be replaced.
    """
    digests_url = _find_sibling_digests(place, request.storage_options)
    if not request.overwrite:
        place.check_free(overwrite=False)
        if digests_url is not None:
            raise already_exists_error(digests_url) if request.checksum else _stale_digests_error(digests_url)
        return NO_FILES
    from ckpt_tools.verification.digest_files import check_replaceable_list
    from ckpt_tools.verification.replacing import list_replaced_files

    replaced_sizes = list_replaced_files(place, [file.path for file in layout.files])
    if digests_url is None:
        return replaced_sizes
    if not request.checksum:
        raise _stale_digests_error(digests_url)
    return {**replaced_sizes, **check_replaceable_list(open_output_location(digests_url, request.storage_options))}


def _find_sibling_digests(place: OutputLocation, storage_options: StorageOptions) -> str | None:
    """URL of the list of digests beside a destination that is one file, if there is one: it describes the old file."""
    url = place.url + DIGESTS_SUFFIX
    exists = (
        isinstance(place.form, SingleFileForm)
        and open_output_location(url, storage_options).as_single_file().list_contents() is not None
    )
    return url if exists else None


def _stale_digests_error(url: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{url} describes the file being replaced; remove it, or replace it with {format_option('checksum', True)}"
    )
