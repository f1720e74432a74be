"""Any format to any format: wires reader, transforms, writer, plan and execution together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, get_args

from ckpt_tools.core import transforms
from ckpt_tools.core.accounting import check_account
from ckpt_tools.core.applicability import check
from ckpt_tools.core.apply_options import Applied, apply_options
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey, TensorEntry, tensors_by_role
from ckpt_tools.core.matching import is_chosen
from ckpt_tools.core.notes import Note, Outcome, merged
from ckpt_tools.core.option_names import WrittenFormat, option, with_aliases
from ckpt_tools.core.options import ConvertOptions, ReadOptions, Request, WriteOptions
from ckpt_tools.core.progress import Meter, Progress, inform, silent
from ckpt_tools.core.quantized import check_together
from ckpt_tools.core.rank_limits import rank_notes
from ckpt_tools.core.showing import Shown
from ckpt_tools.core.trainer_folder import FILE
from ckpt_tools.core.transforms import Transformed, cast_notes
from ckpt_tools.core.wording import count, listed, printable, size
from ckpt_tools.errors import (
    CkptError,
    DestinationExistsError,
    IncompleteError,
    LossError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.formats.applicability import WRITING
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import written_format
from ckpt_tools.planning.plan import REMOTE_BYTES, CopyRules, Figures, Plan, make_plan, reading_bytes
from ckpt_tools.reading.checkpoint import case_of, own_keys, recipe_step
from ckpt_tools.reading.model_files import (
    ModelFiles,
    config_in,
    find_config,
    find_model_files,
    missing_note,
    takes_model_files,
    with_model_files,
    with_stated_ties,
)
from ckpt_tools.runs.opening import likeness, named, read_checkpoint
from ckpt_tools.signals import held_back
from ckpt_tools.stores.destination import Claim, Place
from ckpt_tools.stores.marker_files import DIGESTS_SUFFIX
from ckpt_tools.stores.output_form import SingleFile
from ckpt_tools.stores.present import NOTHING, already_exists
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.stores.urls import (
    StorageOptions,
    check_apart,
    check_ending,
    check_storage_options,
    implied_format,
    is_remote,
    open_place,
    open_source,
)
from ckpt_tools.trainers.transformers import ADAPTER

if TYPE_CHECKING:
    from ckpt_tools.lora.merge import MergeStep
    from ckpt_tools.reading.recipe_step import RecipeStep
    from ckpt_tools.recipes.like import Like
    from ckpt_tools.recipes.report import UsedRecipe
    from ckpt_tools.transfer.workers import WorkerPool
    from ckpt_tools.verification.digest_files import OutputDigests


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(Shown):
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
class ConvertReport(Shown):
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
class Prepared:
    """A conversion ready to run."""

    request: Request
    store: Store
    plan: Plan
    report: PlanReport
    place: Place
    keys: ReadOptions = field(default_factory=ReadOptions)
    """Options for reading the output, if it has the tree of a source that was read with them."""
    loading: Callable[[], str] = str
    """Makes Python code that loads the output."""
    original: Manifest | None = None
    """The source as it was read, whose copies of weights are compared, and which of them is written."""
    copy_written: str = ""


@dataclass(frozen=True, slots=True)
class _Opened:
    """The source as it was read, the adapter that is merged into it, and where and how it is written. ``source`` has
    the adapter's files too, and ``config`` of ``request`` is the model's alone."""

    request: Request
    src: str | Path
    source: Source
    manifest: Manifest
    merge: MergeStep | None
    place: Place
    writer: Format

    @property
    def is_whole(self) -> bool:
        return _is_whole(self.request, self.writer)

    @property
    def keeps_both(self) -> bool:
        """Whether a weight is written beside its fp32 master."""
        return self.is_whole and (self.writer.holds_masters or self.manifest.keeps_masters)

    @property
    def takes_model_files(self) -> bool:
        return takes_model_files(self.writer, self.place.form)


@dataclass(frozen=True, slots=True)
class _Edited:
    """``manifest`` is what the options make of the source, without values that the format cannot hold, and ``source``
    computes what has to be."""

    source: Source
    manifest: Manifest
    applied: Applied
    recipe: RecipeStep | None
    like: Like | None


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """The files of the output, and the source with all that is copied into them. ``way_to_hub`` are the options that
    lead to names which ``from_pretrained`` knows; empty if it knows these."""

    source: Source
    manifest: Manifest
    layout: Layout
    writing: WriteOptions
    notes: tuple[Note, ...]
    way_to_hub: str


def plan_conversion(request: Request) -> PlanReport:
    """Plan a conversion; write nothing."""
    return prepare(request, _pool(request)).report


def run_conversion(request: Request) -> ConvertReport:
    """Write the destination: whole, or not at all."""
    pool = _pool(request)
    return run(prepare(request, pool), pool)


def _pool(request: Request) -> WorkerPool:
    from ckpt_tools.transfer.workers import WorkerPool

    urls = (request.src, request.dst, request.config, request.like, request.adapter)
    check_storage_options(request.storage_options, *urls)
    return WorkerPool.choose(request.runner, request.address, request.workers, request.src, request.dst)


def prepare(request: Request, pool: WorkerPool) -> Prepared:
    """Everything about a conversion but the moving of bytes; writes nothing.

    Raises:
        CkptError: whatever stands in the way is found here, before the destination is touched.
    """
    opened = _open(request)
    edited = _edit(opened)
    laid_out = _lay_out(opened, edited)
    plan = _plan(opened, laid_out, pool)
    figures = plan.figures()
    _check_written(opened, edited, laid_out, written_tensors(plan.manifest, figures))
    removed = removed_at(opened.place, plan.layout, request)
    source_format, target_format = opened.manifest.format, opened.writer.name
    report = replace(
        plan_report(plan, figures, source_format, target_format, removed),
        notes=laid_out.notes,
        renamed=edited.applied.renamed,
        recipe=None if edited.recipe is None else edited.recipe.used,
    )
    _log(report)
    return Prepared(
        request=opened.request,
        store=laid_out.source.store,
        plan=plan,
        report=report,
        place=opened.place,
        keys=own_keys(source_format, target_format, request),
        loading=partial(_loading, opened, laid_out),
        original=opened.manifest,
        copy_written=_copy_in_words(opened),
    )


def _open(request: Request) -> _Opened:
    """Read the source, and choose the writer."""
    stores = request.storage_options
    src, place = named(request.src, stores), open_place(request.dst, stores)
    writer = _named_writer(request, place.name)
    is_weights = request.adapter is not None or (writer is not None and not _is_whole(request, writer))
    reading = replace(request.reading, state="model" if is_weights else "all")
    source, manifest = read_checkpoint(
        src, reading, format_name=request.from_, storage_options=stores, step_by_name=True
    )
    check_apart(src, request.dst, stores)
    merge, source, request = _merge(request, src, source, manifest)
    writer = writer or _same_writer(request, manifest, place.name)
    if manifest.unplaced and writer.holds_optimizer and _is_whole(request, writer) and writer.name != manifest.format:
        # The run that resumes from the output would start with an empty optimizer.
        ways = "" if option("state", "model") in manifest.unplaced else f", or convert with {option('state', 'model')}"
        raise UnsupportedError(
            f"{writer.name} keeps an optimizer by the names of its parameters; {manifest.unplaced}{ways}"
        )
    return _Opened(request, src, source, manifest, merge, place, writer)


def _is_whole(options: ConvertOptions, writer: Format) -> bool:
    """Whether all state is written: what the user says, else what the format is for."""
    return writer.holds_optimizer if options.state is None else options.state == "all"


def _named_writer(request: Request, name: str) -> Format | None:
    """The writer of the format that the user names, or that ``name``, the destination's, implies; with ``like`` that of
    folders for ``from_pretrained``. None if it is the source's own format."""
    is_named = request.to is not None or implied_format(name) is not None
    if request.keeps_format or (request.adapter is not None and not is_named):
        return None
    return _writer("safetensors" if request.like is not None and not is_named else request.to, name)


def _writer(to: str | None, name: str) -> Format:
    check_ending(name, to)
    implied = implied_format(name)
    if to is None and implied is None:
        raise UsageError(f"choose a format with {option('to')}: {with_aliases('to', get_args(WrittenFormat))}")
    if to is not None and implied is not None and to != implied:
        raise UsageError(
            f"{name} is a {implied} file, which {option('to', to)} contradicts; name a folder or drop {option('to')}"
        )
    return written_format(to or implied or "")


def _same_writer(request: Request, manifest: Manifest, name: str) -> Format:
    """The writer of the source's own format: for another world size, or of a base model in safetensors."""
    if not request.keeps_format:
        return _writer("safetensors" if manifest.format == "safetensors" else None, name)
    if manifest.world_size is None or manifest.format in ("universal", "zero0"):
        raise UsageError(f"a {manifest.format} checkpoint has no world size to change")
    return _writer(manifest.format, name)


def _merge(
    request: Request, src: str | Path, source: Source, manifest: Manifest
) -> tuple[MergeStep | None, Source, Request]:
    """The step that merges the adapter, the source that has its files too, and the request, whose ``config`` is that of
    the base model alone."""
    if request.adapter is None:
        return None, source, request
    from ckpt_tools.lora.merge import MergeStep
    from ckpt_tools.reading.adapter import open_adapter
    from ckpt_tools.reading.naming import way_to_live

    stores = request.storage_options
    check_apart(request.adapter, request.dst, stores)
    opened = open_adapter(
        request, *read_checkpoint(request.adapter, ReadOptions(), storage_options=stores), source.store
    )
    if request.config is not None and config_in(open_source(request.config, stores)) is None:
        request = replace(request, config=None)
    config = find_config(src, source, manifest, request) or {}
    live = partial(way_to_live, config)
    merge = MergeStep(opened.adapter, opened.config, config, request.untie, request.allow_missing, live)
    return merge, replace(source, store=opened.store), request


def _edit(opened: _Opened) -> _Edited:
    """Apply the options to the manifest, and refuse those that do not fit it."""
    request, manifest, writer, is_whole = opened.request, opened.manifest, opened.writer, opened.is_whole
    recipe, like = recipe_step(opened.src, opened.source, manifest, request), likeness(request)
    case = case_of(manifest, writer.name, keeps_both=opened.keeps_both, whole=is_whole, has_recipe=request.needs_config)
    check(WRITING, request.given, case)
    if recipe is None:
        _check_quantized(manifest, request)
    try:
        applied = apply_options(
            manifest,
            request,
            whole=is_whole,
            holds_masters=writer.holds_masters,
            keeps_tree=writer.name == manifest.format,
            kept=writer.kept_entries,
            recipe=None if recipe is None else partial(_mapped, recipe, request),
            merge=opened.merge,
            like=like,
        )
    except (UsageError, IncompleteError) as error:
        raise _with_options(error, request) from error
    manifest, source = applied.manifest, opened.source
    is_held = writer.holds_values == "always" or (is_whole and writer.holds_values == "with state")
    if manifest.values and not is_held:
        manifest, notes = transforms.without_values(manifest, to=writer.name)
        manifest = replace(manifest, notes=(*manifest.notes, *notes))
    if recipe is not None or opened.merge is not None or like is not None:
        from ckpt_tools.transfer.computing import with_made_files

        source = replace(source, store=with_made_files(source.store, manifest))
    _check_dtypes(manifest, writer)
    return _Edited(source, manifest, applied, recipe, like)


def _with_options(error: UsageError | IncompleteError, request: Request) -> CkptError:
    """The error with the options that names depend on, because what one makes the other may not find."""
    names = ("dequantize", "strip", "recipe", "include", "exclude", "rename", "key_map", "like")
    given = [option(name) for name in names if getattr(request, name)]
    others = [each for each in given if each not in error.message]
    if (
        not others
        or (len(given) < 2 and request.adapter is None)
        or (isinstance(error, IncompleteError) and request.like is None)
    ):
        return error
    return UsageError(f"{error.message} (with {listed(others)})")


def _check_quantized(manifest: Manifest, options: ConvertOptions) -> None:
    """Raises UsageError if a quantized weight is selected without its scales."""
    if options.include or options.exclude:
        check_together(manifest, lambda fqn: is_chosen(fqn, options.include, options.exclude))


def _mapped(recipe: RecipeStep, options: ConvertOptions, manifest: Manifest) -> Transformed:
    """The step of a recipe, whose names are those that the user selects by."""
    made, notes = recipe(manifest)
    _check_quantized(made, options)
    return made, notes


def _check_dtypes(manifest: Manifest, writer: Format) -> None:
    """Raises UnsupportedError for a tensor that torch has no dtype for, if the format does not keep it."""
    for key, entry in () if writer.keeps_every_dtype else manifest.tensors.items():
        if not entry.dtype.is_of_torch:
            instead = f"write {option('to', 'safetensors')}, or exclude it"
            raise UnsupportedError(f"{writer.name} does not support {entry.dtype.value}; {instead}", key=str(key))


def _lay_out(opened: _Opened, edited: _Edited) -> _LaidOut:
    """Lay out the tensors and the files that are copied beside them, and collect all notes.

    Raises:
        LossError: with ``strict``, something would be lost. CkptError: the format cannot hold it.
    """
    request, writer, source, manifest = opened.request, opened.writer, edited.source, edited.manifest
    writing, files = _write_options(opened, edited.like), _model_files(opened, edited)
    tie_notes: tuple[Note, ...] = ()
    if files is not None:
        manifest, files, tie_notes = with_stated_ties(manifest, files, untie=request.untie)
    elif request.untie:
        here = f"this writes {writer.name}" + (", and finds none" if opened.takes_model_files else "")
        raise UsageError(f"{option('untie', True)} is for folders with a config.json; {here}")
    layout, carried = writer.layout(manifest, writing), frozenset[str]()
    if files is not None:
        source, carried = replace(source, store=files.store), files.sources
        layout = with_model_files(layout, files, manifest)
    elif opened.takes_model_files and (note := missing_note(source, manifest)) is not None:
        layout = replace(layout, notes=(*layout.notes, note))
    name_notes, way_to_hub = _foreign_names(edited, files)
    manifest = _with_copied(manifest, layout, carried)
    used = {ADAPTER} if opened.merge is not None or writer.asks_adapter_config else set()
    noted = merged(
        name_notes
        + manifest.notes
        + tie_notes
        + cast_notes(edited.applied.uncast, edited.applied.manifest, layout.as_stored)
        + (rank_notes(manifest, writing.world_size) if "world_size" in writer.writing_options else ())
        + layout.notes
        + _left_beside(manifest, carried | used, layout, has_place=opened.takes_model_files)
    )
    notes = tuple(note for note in noted if note.what.rpartition("/")[2] not in used)
    lost = [note.what for note in notes if note.is_loss]
    if request.strict and lost:
        raise LossError(f"with {option('strict', True)} nothing may be lost, and this would lose {listed(lost)}")
    return _LaidOut(source, manifest, layout, writing, notes, way_to_hub)


def _write_options(opened: _Opened, like: Like | None) -> WriteOptions:
    """The keys say where a tree is read where the source is one, and where it is written elsewhere."""
    request, source, manifest, writer = opened.request, opened.source, opened.manifest, opened.writer
    is_tree, adapter_text = manifest.tree is not None, b""
    if writer.asks_adapter_config:
        from ckpt_tools.reading.adapter import adapter_config

        adapter_text = adapter_config(opened.src, source, manifest, request)
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


def _model_files(opened: _Opened, edited: _Edited) -> ModelFiles | None:
    """The files that say what the model is, for a folder of its weights; None if none is written or there are none."""
    request, like = opened.request, edited.like
    if not opened.takes_model_files:
        if request.config is not None and not (request.needs_config or opened.writer.asks_adapter_config):
            raise UsageError(f"{option('config')} is for folders; {opened.place.name} is one file")
        return None
    folder, stores = request.config if like is None else like.folder_of_config, request.storage_options
    files = find_model_files(opened.src, edited.source, edited.manifest, config=folder, storage_options=stores)
    return None if files is None else replace(files, is_of_reference=like is not None)


def _foreign_names(edited: _Edited, files: ModelFiles | None) -> tuple[tuple[Note, ...], str]:
    """A note on names that are not the hub's beside a ``config.json``; and if ``from_pretrained`` does not know them,
    how they become the hub's. A folder of safetensors is taken for one of the hub: it costs 20 ms to know."""
    is_mapped = edited.recipe is not None or edited.like is not None
    if files is None or is_mapped or edited.manifest.format == "safetensors":
        return (), ""
    from ckpt_tools.reading.naming import naming_of

    naming = naming_of(edited.source, edited.manifest, files.config)
    if naming is None or not naming.to_hub:
        return (), ""
    loaders = "other loaders do" if naming.is_live else "from_pretrained does"
    note = Note(Outcome.KEPT, "names of tensors", f"those of {naming.left}, which {loaders} not know; {naming.like}")
    return (note,), "" if naming.is_live else naming.way


def _with_copied(manifest: Manifest, layout: Layout, carried: frozenset[str]) -> Manifest:
    """The manifest with the files that the layout copies as they are, without the notes on what a reader made of them:
    the layout says what becomes of each."""
    if layout.copied is None:
        return manifest
    sources = manifest.trainer.sources if manifest.trainer is not None and not carried else carried
    notes = tuple(note for note in manifest.notes if note.what not in sources)
    return replace(manifest, tensors={**manifest.tensors, **layout.copied}, notes=notes)


def _left_beside(manifest: Manifest, carried: frozenset[str], layout: Layout, *, has_place: bool) -> tuple[Note, ...]:
    """A note on the files beside the weights that are not ``carried``, which layouts may have notes on. Whoever chooses
    a format without a place for a model's files asks for that."""
    known = carried.union((note.what for note in layout.notes), (file.path for file in layout.files))
    left = [path for path in manifest.beside if path not in known]
    why = "not known to be the model's" if layout.config else "a model's files are copied if its config.json is there"
    why = why if has_place else "the output has no place for a model's files"
    return (Note(Outcome.DROPPED, listed(left), why, len(left), asked=not has_place),) if left else ()


def _plan(opened: _Opened, laid_out: _LaidOut, pool: WorkerPool) -> Plan:
    request, place, layout = opened.request, opened.place, laid_out.layout
    return make_plan(
        laid_out.manifest,
        layout,
        memory_bytes=request.memory_bytes,
        num_workers=pool.workers_per_process,
        is_limit=request.memory is not None,
        wanted_bytes=_wanted_bytes(place, layout),
        reading_bytes=reading_bytes(opened.manifest),
        remote_bytes=remote_bytes(opened.src, request.dst, request.adapter or request.dst),
        copies=_copies(laid_out.source, place),
    )


def _wanted_bytes(place: Place, layout: Layout) -> int:
    """The size of tasks that the place asks for; files made one by one are not made for a place that does not care."""
    if place.parts.max_parts is None:
        return place.parts.wanted_bytes(0)
    return place.parts.wanted_bytes(max((file.size_bytes for file in layout.files), default=0))


def _copies(source: Source, place: Place) -> CopyRules | None:
    """Rules for cutting files whose ranges the destination's service can copy from the source; None if it cannot."""
    rules, store = place.parts, source.store
    if rules.copying is None or rules.max_parts is None:
        return None
    found = next((store.locate(path) for path in source.files), None)
    is_same = found is not None and found.service == rules.copying.service
    return CopyRules(rules.copying.min_bytes, rules.max_parts) if is_same else None


def remote_bytes(*urls: str | Path) -> int:
    """Memory of the clients of stores that are not local."""
    return REMOTE_BYTES if any(map(is_remote, urls)) else 0


def _check_written(
    opened: _Opened, edited: _Edited, laid_out: _LaidOut, written: Mapping[StateKey, TensorEntry]
) -> None:
    """Raises UsageError or UnsupportedError where no tensor is written, or no weight though the source has some and the
    user selected no others. Raises CkptError for a tensor that is neither written nor named in a note."""
    is_selected = bool(opened.request.include or opened.request.exclude)
    if not written and is_selected:
        raise UsageError(f"{option('include')} and {option('exclude')} leave no tensor that could be written")
    if not written:
        raise UnsupportedError("no tensor would be written: the target format has no place for those of the source")
    if not is_selected and _holds_weights(opened.manifest.tensors) and not _holds_weights(written):
        raise UnsupportedError("none of the model's weights would be written")
    is_mapped = any(each is not None for each in (edited.recipe, opened.merge, edited.like))
    check_account(opened.manifest, edited.applied.manifest, written, laid_out.notes, is_mapped=is_mapped)


def _holds_weights(tensors: Mapping[StateKey, TensorEntry]) -> bool:
    return any(entry.kind in (Kind.PARAMETER, Kind.BUFFER) for entry in tensors.values())


def _loading(opened: _Opened, laid_out: _LaidOut) -> str:
    """The code that loads the output, from a local copy if it is in a store."""
    place, layout, way = opened.place, laid_out.layout, laid_out.way_to_hub
    is_in_store = is_remote(place.url)
    code = opened.writer.loading(
        place.name if is_in_store else place.url,
        laid_out.manifest,
        replace(layout, config={}) if way else layout,
        laid_out.writing,
    )
    above = f"# from_pretrained does not know these names: {way}\n" if way else ""
    below = f"\n# {place.name}: a local copy of {printable(place.url)}" if is_in_store else ""
    return above + code + below


def _copy_in_words(opened: _Opened) -> str:
    """The copy of a weight that is written, in words for the note on copies that differ."""
    if opened.keeps_both:
        return "both are written"
    if opened.request.weight_copy(opened.manifest) == "model":
        return "the model's is written" + (", as ZenFlow updates masters later" if opened.manifest.masters_lag else "")
    return f"the master is written; {option('weights', 'model')} writes the model's"


def _log(report: PlanReport) -> None:
    formats = f"{report.source_format} to {report.target_format}"
    inform("conversion", f"{formats}: {size(report.bytes_written)} in {count(report.num_tasks, 'task')}")
    for note in report.notes:
        inform("notes", f"{note.outcome.value}: {note.what} ({note.why})")


def written_tensors(manifest: Manifest, figures: Figures) -> Mapping[StateKey, TensorEntry]:
    """The tensors whose elements a layout writes. A weight can be written as its fp32 master alone, and a number
    of an optimizer's state as a value with the tensors of that state."""
    stored = figures.tensors
    of_state = {key.fqn for key in stored if manifest.tensors[key].kind is Kind.STATE}

    def is_written(key: StateKey, entry: TensorEntry) -> bool:
        is_number = entry.kind is Kind.STATE and not entry.shape and key.fqn in of_state
        return (
            key in stored
            or is_number
            or not entry.numel
            or (key.slot == WEIGHT and StateKey(key.fqn, MASTER) in stored)
        )

    return {key: entry for key, entry in manifest.tensors.items() if key.slot != FILE and is_written(key, entry)}


def plan_report(
    plan: Plan, figures: Figures, source_format: str, target_format: str, removed: Mapping[str, int]
) -> PlanReport:
    """The plan in figures, without notes. ``removed`` are files that are there now, names and sizes."""
    tensors = written_tensors(plan.manifest, figures)
    return PlanReport(
        source_format=source_format,
        target_format=target_format,
        files=figures.files,
        tensors_by_role=tensors_by_role(tensors),
        num_bytes=sum(entry.num_bytes for entry in tensors.values()),
        num_tasks=figures.num_tasks,
        bytes_read=figures.bytes_read,
        bytes_written=figures.bytes_written,
        peak_memory_bytes=plan.peak_memory_bytes,
        notes=(),
        removed_files=removed,
        tied={alias: owner for alias, owner in plan.manifest.aliases.items() if StateKey(owner) in tensors},
    )


def run(prepared: Prepared, pool: WorkerPool) -> ConvertReport:
    """Write the destination: whole, or not at all.

    Raises:
        DestinationExistsError, StoreError, FormatError: as the stores and the source's bytes say.
        DifferenceError: tensors that become one differ; nothing was written.
    """
    # A plan alone moves nothing, and needs none of these.
    from ckpt_tools.transfer.execute import execute
    from ckpt_tools.transfer.journal import JournalPolicy
    from ckpt_tools.transfer.runners.threads import ThreadRunner

    started = time.perf_counter()
    plan, report, request = prepared.plan, prepared.report, prepared.request
    selects = request.include or request.exclude  # no byte of another tensor is read then
    if not selects and prepared.original is not None and any(key.slot == MASTER for key in prepared.original.tensors):
        from ckpt_tools.transfer.copies import note_of_copies

        notes = note_of_copies(prepared.original, prepared.store, prepared.copy_written, is_sample=True)
        report = replace(report, notes=merged((*report.notes, *notes)))
    if plan.manifest.must_equal:
        from ckpt_tools.transfer.equality import check_equal

        check_equal(plan.manifest, prepared.store)
    on_progress = request.on_progress or silent
    journaling = JournalPolicy(keeps_output=request.resume)
    taking = prepared.place.claim(overwrite=request.overwrite, resume=journaling.keeps_output, fsync=request.fsync)
    with (
        pool.connected(),
        taking as claim,
        pool.start(plan, prepared.store, claim.destination) as (runner, board),
    ):
        meter = Meter(on_progress, report.bytes_written)
        threads = ThreadRunner(plan.num_workers)
        journal = journaling.open(claim.log, plan, prepared.store, claim.destination, threads)
        with journaling.noting(journal):
            result = execute(
                plan,
                prepared.store,
                claim.destination,
                runner=runner,
                on_bytes=meter.add,
                history=journal,
                board=board,
            )
            journaling.all_written(journal, is_replacing=bool(report.removed_files))
            digests = _digests(prepared, claim, on_progress) if request.checksum else None
            staged = [] if digests is None else digests.write_staged_list()
            with held_back():
                claim.publish([*staged, *(file.path for file in plan.layout.files)], report.removed_files)
        digests_url = None if digests is None else digests.publish_list(staged)
    return ConvertReport(
        report,
        prepared.place.url,
        result.bytes_read,
        result.bytes_written,
        journal.bytes_recovered,
        result.bytes_copied,
        time.perf_counter() - started,
        digests_url,
        prepared.loading(),
    )


def _digests(prepared: Prepared, claim: Claim, on_progress: Progress) -> OutputDigests:
    from ckpt_tools.verification.digest_files import OutputDigests

    return OutputDigests(
        claim,
        prepared.place,
        prepared.report.target_format,
        prepared.keys,
        prepared.plan.num_workers,
        lambda total: Meter(on_progress, total).add,
        prepared.request.storage_options,
    )


def removed_at(place: Place, layout: Layout, request: Request) -> Mapping[str, int]:
    """The files at the destination that the output replaces: one checkpoint, and the digests beside it.

    Raises:
        DestinationExistsError: something is there that may not be replaced, or digests of a file that is gone or would
            be replaced.
    """
    url = _digests_beside(place, request.storage_options)
    if not request.overwrite:
        place.check_free(overwrite=False)
        if url is not None:
            raise already_exists(url) if request.checksum else _of_another(url)
        return NOTHING
    from ckpt_tools.verification.digest_files import check_replaceable_list
    from ckpt_tools.verification.replacing import list_replaced_files

    removed = list_replaced_files(place, [file.path for file in layout.files])
    if url is None:
        return removed
    if not request.checksum:
        raise _of_another(url)
    return {**removed, **check_replaceable_list(open_place(url, request.storage_options))}


def _digests_beside(place: Place, storage_options: StorageOptions) -> str | None:
    """URL of the list of digests beside a destination that is one file, if there is one: it describes the old file."""
    url = place.url + DIGESTS_SUFFIX
    is_there = isinstance(place.form, SingleFile) and open_place(url, storage_options).as_file().present() is not None
    return url if is_there else None


def _of_another(url: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{url} describes the file being replaced; remove it, or replace it with {option('checksum', True)}"
    )
