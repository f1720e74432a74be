"""Any format to any format: wires reader, transforms, writer, plan and execution together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from ckpt_tools.core import transforms
from ckpt_tools.core.accounting import check_account
from ckpt_tools.core.applicability import check
from ckpt_tools.core.apply_options import apply_options
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
from ckpt_tools.core.ties import untied_config, with_ties
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
from ckpt_tools.reading.model_files import ModelFiles, config_in, find_model_files, missing_note, with_model_files
from ckpt_tools.runs.opening import likeness, named, read_checkpoint
from ckpt_tools.signals import held_back
from ckpt_tools.stores.destination import Claim, Place
from ckpt_tools.stores.marker_files import DIGESTS_SUFFIX
from ckpt_tools.stores.output_form import OutputForm, SingleFile
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
    from ckpt_tools.lora.merge import Merge
    from ckpt_tools.reading.recipe_step import RecipeStep
    from ckpt_tools.recipes.like import Like
    from ckpt_tools.recipes.report import UsedRecipe
    from ckpt_tools.transfer.workers import WorkerPool


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversion ready to run."""

    request: Request
    store: Store
    plan: Plan
    figures: Figures
    source_format: str
    target_format: str
    place: Place
    removed: Mapping[str, int]
    """Files that are there now and will be replaced: names and sizes."""
    notes: tuple[Note, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    keys: ReadOptions = field(default_factory=ReadOptions)
    """Options for reading the output, if it has the tree of a source that was read with them."""
    recipe: UsedRecipe | None = None
    loading: Callable[[], str] = str
    """Makes Python code that loads the output."""
    original: Manifest | None = None
    """The source as it was read, whose copies of weights are compared, and which of them is written."""
    copy_written: str = ""


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


def is_whole(options: ConvertOptions, writer: Format) -> bool:
    """Whether all state is written: what the user says, else what the format is for."""
    return writer.holds_optimizer if options.state is None else options.state == "all"


def plan_conversion(request: Request) -> PlanReport:
    """Plan a conversion; write nothing."""
    return plan_report(prepare(request, _pool(request)))


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
    dst, stores = request.dst, request.storage_options
    src, place = named(request.src, stores), open_place(dst, stores)
    is_named = request.to is not None or implied_format(place.name) is not None
    has_form_of_source = request.keeps_format or (request.adapter is not None and not is_named)
    writer = None if has_form_of_source else _writer(_target(request, place.name), place.name)
    is_weights = request.adapter is not None or (writer is not None and not is_whole(request, writer))
    reading_options = replace(request.reading, state="model" if is_weights else "all")
    source, manifest = read_checkpoint(
        src, reading_options, format_name=request.from_, storage_options=stores, step_by_name=True
    )
    read = manifest
    check_apart(src, dst, stores)
    merge, source, request = _merge(request, src, source, manifest)
    source_format, reading, has_weights = manifest.format, reading_bytes(manifest), holds_weights(manifest.tensors)
    writer = writer or _same_writer(request, manifest, place.name)
    whole = is_whole(request, writer)
    if whole and writer.holds_optimizer and writer.name != manifest.format:
        _refuse_unplaced(manifest, writer)
    recipe = recipe_step(src, source, manifest, request)
    like = likeness(request)
    keeps_both, has_recipe = whole and (writer.holds_masters or manifest.keeps_masters), request.needs_config
    check(
        WRITING,
        request.given,
        case_of(manifest, writer.name, keeps_both=keeps_both, whole=whole, has_recipe=has_recipe),
    )
    original, writing = manifest, _write_options(place.form, manifest, request)
    if like is not None:
        writing = replace(writing, shard_map=like.reference.files)
    if writer.asks_adapter_config:
        from ckpt_tools.reading.adapter import adapter_config

        text = adapter_config(src, source, manifest, request.config, stores)
        writing = replace(writing, adapter_config=text)
    if writer.asks_model_type:
        writing = replace(writing, model_config=_model_config(src, source, manifest, request))
    mapped = None if recipe is None else partial(_mapped, recipe, request)
    if recipe is None:
        _check_quantized(manifest, request)
    try:
        made = apply_options(
            manifest,
            request,
            whole=whole,
            holds_masters=writer.holds_masters,
            keeps_tree=writer.name == manifest.format,
            kept=writer.kept_entries,
            recipe=mapped,
            merge=merge,
            like=like,
        )
    except (UsageError, IncompleteError) as error:
        raise _with_options(error, request) from error
    manifest = made.manifest
    if manifest.values and writer.holds_values not in ("always", "with state" if whole else "always"):
        manifest, more = transforms.without_values(manifest, to=writer.name)
        manifest = replace(manifest, notes=(*manifest.notes, *more))
    if recipe is not None or merge is not None or like is not None:
        from ckpt_tools.transfer.computing import with_made_files

        source = replace(source, store=with_made_files(source.store, manifest))
    _check_dtypes(manifest, writer)
    files = _model_files(src, source, manifest, request, place, writer, like)
    tying: tuple[Note, ...] = ()
    if files is not None:
        manifest, tying = with_ties(manifest, files.config, untie=request.untie)
        files = replace(files, config=untied_config(files.config)) if request.untie else files
    elif request.untie:
        here = f"this writes {writer.name}" + (", and finds none" if _has_place(writer, place) else "")
        raise UsageError(f"{option('untie', True)} is for folders with a config.json; {here}")
    layout = writer.layout(manifest, writing)
    source, layout, carried = _with_model_files(source, manifest, layout, files, is_folder=_has_place(writer, place))
    names, way = _naming(source, manifest, files) if recipe is None and like is None else ((), "")
    manifest = _with_copied(manifest, layout, carried)
    cast = cast_notes(made.uncast, made.manifest, layout.as_stored)
    used = ADAPTER if merge is not None or writer.asks_adapter_config else None
    left = _left_beside(manifest, carried | {str(used)}, layout, has_place=_has_place(writer, place))
    of_ranks = rank_notes(manifest, writing.world_size) if "world_size" in writer.writing_options else ()
    noted = merged(names + manifest.notes + tying + cast + of_ranks + layout.notes + left)
    notes = tuple(note for note in noted if note.what.rpartition("/")[2] != used)
    if request.strict:
        _refuse_losses(notes)
    plan = make_plan(
        manifest,
        layout,
        memory_bytes=request.memory_bytes,
        num_workers=pool.workers_per_process,
        is_limit=request.memory is not None,
        wanted_bytes=_wanted_bytes(place, layout),
        reading_bytes=reading,
        remote_bytes=remote_bytes(src, dst, request.adapter or dst),
        copies=_copies(source, place),
    )
    figures = plan.figures()
    _log(source_format, writer.name, figures, notes)
    written = written_tensors(manifest, figures)
    _refuse_nothing(written, has_weights=has_weights, options=request)
    is_mapped = recipe is not None or merge is not None or like is not None
    check_account(read, made.manifest, written, notes, is_mapped=is_mapped)
    return Prepared(
        request,
        source.store,
        plan,
        figures,
        source_format,
        writer.name,
        place,
        removed_at(place, layout, overwrite=request.overwrite, checksum=request.checksum, storage_options=stores),
        notes,
        made.renamed,
        own_keys(source_format, writer.name, request),
        None if recipe is None else recipe.used,
        partial(_loading, place, writer, manifest, layout if not way else replace(layout, config={}), writing, way),
        original,
        "both are written" if keeps_both else _copy_in_words(original, request),
    )


def _copy_in_words(manifest: Manifest, request: Request) -> str:
    if request.weight_copy(manifest) == "model":
        return "the model's is written" + (", as ZenFlow updates masters later" if manifest.masters_lag else "")
    return f"the master is written; {option('weights', 'model')} writes the model's"


def _naming(source: Source, manifest: Manifest, files: ModelFiles | None) -> tuple[tuple[Note, ...], str]:
    """A note on names that are not the hub's beside a ``config.json``; and if ``from_pretrained`` does not know them,
    how they become the hub's. A folder of safetensors is taken for one of the hub: it costs 20 ms to know."""
    if files is None or manifest.format == "safetensors":
        return (), ""
    from ckpt_tools.reading.naming import naming_of

    found = naming_of(source, manifest, files.config)
    if found is None or not found.to_hub:
        return (), ""
    loaders = "other loaders do" if found.is_live else "from_pretrained does"
    note = Note(Outcome.KEPT, "names of tensors", f"those of {found.left}, which {loaders} not know; {found.like}")
    return (note,), "" if found.is_live else found.way


def _refuse_unplaced(manifest: Manifest, writer: Format) -> None:
    """Raises UnsupportedError for an optimizer whose parameters are not known: a run would go on without it."""
    if manifest.unplaced:
        ways = "" if option("state", "model") in manifest.unplaced else f", or convert with {option('state', 'model')}"
        raise UnsupportedError(
            f"{writer.name} keeps an optimizer by the names of its parameters; {manifest.unplaced}{ways}"
        )


def _loading(
    place: Place, writer: Format, manifest: Manifest, layout: Layout, writing: WriteOptions, way: str = ""
) -> str:
    """The code that loads the output, from a local copy if it is in a store; ``way`` says how from_pretrained could."""
    if way:
        return f"# from_pretrained does not know these names: {way}\n" + _loading(
            place, writer, manifest, layout, writing
        )
    if not is_remote(place.url):
        return writer.loading(place.url, manifest, layout, writing)
    code = writer.loading(place.name, manifest, layout, writing)
    return f"{code}\n# {place.name}: a local copy of {printable(place.url)}"


def _log(source_format: str, target_format: str, figures: Figures, notes: Iterable[Note]) -> None:
    inform(
        "conversion",
        f"{source_format} to {target_format}: {size(figures.bytes_written)} in {count(figures.num_tasks, 'task')}",
    )
    for note in notes:
        inform("notes", f"{note.outcome.value}: {note.what} ({note.why})")


def _check_dtypes(manifest: Manifest, writer: Format) -> None:
    """Raises UnsupportedError for a tensor that torch has no dtype for, if the format does not keep it."""
    for key, entry in () if writer.keeps_every_dtype else manifest.tensors.items():
        if not entry.dtype.is_of_torch:
            instead = f"write {option('to', 'safetensors')}, or exclude it"
            raise UnsupportedError(f"{writer.name} does not support {entry.dtype.value}; {instead}", key=str(key))


def _merge(
    request: Request, src: str | Path, source: Source, manifest: Manifest
) -> tuple[Merge | None, Source, Request]:
    """The step that merges the adapter, the source that has its files too, and the request, whose ``config`` is that of
    the base model alone."""
    if request.adapter is None:
        return None, source, request
    from ckpt_tools.lora.merge import Merge
    from ckpt_tools.reading.adapter import open_adapter
    from ckpt_tools.reading.naming import way_to_live

    stores = request.storage_options
    check_apart(request.adapter, request.dst, stores)
    on_its_own = stores if is_remote(request.adapter) else None
    beside = read_checkpoint(request.adapter, ReadOptions(), storage_options=on_its_own)
    opened = open_adapter(request, *beside, source.store)
    folder = request.config
    if folder is not None and config_in(open_source(folder, stores if is_remote(folder) else None)) is None:
        request = replace(request, config=None)
    found = find_model_files(src, source, manifest, config=request.config, storage_options=stores)
    config = {} if found is None else found.config
    live = partial(way_to_live, config)
    merge = Merge(opened.adapter, opened.config, config, request.untie, request.allow_missing, live)
    return merge, replace(source, store=opened.store), request


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


def remote_bytes(*urls: str | Path) -> int:
    """Memory of the clients of stores that are not local."""
    return REMOTE_BYTES if any(map(is_remote, urls)) else 0


def _model_files(
    src: str | Path,
    source: Source,
    manifest: Manifest,
    options: ConvertOptions,
    place: Place,
    writer: Format,
    like: Like | None,
) -> ModelFiles | None:
    """The files that say what the model is, for a folder of its weights; None if none is written or there are none."""
    if writer.asks_adapter_config:
        return None
    if not _has_place(writer, place):
        if options.config is not None and not options.needs_config:
            raise UsageError(f"{option('config')} is for folders; {place.name} is one file")
        return None
    folder = options.config if like is None else like.folder_of_config
    found = find_model_files(src, source, manifest, config=folder, storage_options=options.storage_options)
    return None if found is None else replace(found, is_of_reference=like is not None)


def _with_model_files(
    source: Source, manifest: Manifest, layout: Layout, found: ModelFiles | None, *, is_folder: bool
) -> tuple[Source, Layout, frozenset[str]]:
    """A folder of weights with these files, the source that has them too, and their names."""
    if found is not None:
        return replace(source, store=found.store), with_model_files(layout, found, manifest), found.sources
    note = missing_note(source, manifest) if is_folder else None
    return source, layout if note is None else replace(layout, notes=(*layout.notes, note)), frozenset()


def _model_config(src: str | Path, source: Source, manifest: Manifest, request: Request) -> Mapping[str, Any]:
    """The content of the model's ``config.json``; empty if there is none."""
    stores = request.storage_options
    found = find_model_files(src, source, manifest, config=request.config, storage_options=stores)
    return {} if found is None else found.config


def _with_copied(manifest: Manifest, layout: Layout, carried: frozenset[str]) -> Manifest:
    """The manifest with the files that the layout copies as they are, without the notes on what a reader made of them:
    the layout says what becomes of each."""
    if layout.copied is None:
        return manifest
    sources = manifest.trainer.sources if manifest.trainer is not None and not carried else carried
    notes = tuple(note for note in manifest.notes if note.what not in sources)
    return replace(manifest, tensors={**manifest.tensors, **layout.copied}, notes=notes)


def _has_place(writer: Format, place: Place) -> bool:
    """Whether the output is a folder that ``from_pretrained`` opens."""
    return "config" in writer.writing_options and not isinstance(place.form, SingleFile)


def _left_beside(manifest: Manifest, carried: frozenset[str], layout: Layout, *, has_place: bool) -> tuple[Note, ...]:
    """A note on the files beside the weights that are not ``carried``, which layouts may have notes on. Whoever chooses
    a format without a place for a model's files asks for that."""
    known = carried.union((note.what for note in layout.notes), (file.path for file in layout.files))
    left = [path for path in manifest.beside if path not in known]
    unnamed = "a model's files are copied if a config.json that names it (model_type, architectures) is there"
    why = "not known to be the model's" if layout.config else unnamed
    why = why if has_place else "the output has no place for a model's files"
    return (Note(Outcome.DROPPED, listed(left), why, len(left), asked=not has_place),) if left else ()


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


def _target(request: Request, name: str) -> str | None:
    """The format that the user names; that of folders for ``from_pretrained`` if the output is to be like one."""
    is_like_alone = request.like is not None and request.to is None and implied_format(name) is None
    return "safetensors" if is_like_alone else request.to


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


def _write_options(form: OutputForm, manifest: Manifest, options: ConvertOptions) -> WriteOptions:
    """The keys say where a tree is read where the source is one, and where it is written elsewhere."""
    is_tree = manifest.tree is not None
    return WriteOptions(
        file_name=form.file_name,
        max_shard_bytes=options.max_shard_bytes,
        world_size=options.world_size or manifest.world_size or 1,
        tag=options.tag,
        model_key=None if is_tree else options.model_key,
        optim_key=None if is_tree else options.optim_key,
    )


def _refuse_losses(notes: tuple[Note, ...]) -> None:
    lost = [note.what for note in notes if note.is_loss]
    if lost:
        raise LossError(f"with {option('strict', True)} nothing may be lost, and this would lose {listed(lost)}")


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


def _refuse_nothing(written: Mapping[StateKey, TensorEntry], *, has_weights: bool, options: ConvertOptions) -> None:
    """Raises UsageError or UnsupportedError where no tensor is written, or no weight though the source has some and the
    user selected no others."""
    is_selected = bool(options.include or options.exclude)
    if not written and is_selected:
        raise UsageError(f"{option('include')} and {option('exclude')} leave no tensor that could be written")
    if not written:
        raise UnsupportedError("no tensor would be written: the target format has no place for those of the source")
    if has_weights and not is_selected and not holds_weights(written):
        raise UnsupportedError("none of the model's weights would be written")


def holds_weights(tensors: Mapping[StateKey, TensorEntry]) -> bool:
    return any(entry.kind in (Kind.PARAMETER, Kind.BUFFER) for entry in tensors.values())


def plan_report(prepared: Prepared) -> PlanReport:
    """The plan in figures."""
    plan, figures = prepared.plan, prepared.figures
    tensors = written_tensors(plan.manifest, figures)
    return PlanReport(
        source_format=prepared.source_format,
        target_format=prepared.target_format,
        files=figures.files,
        tensors_by_role=tensors_by_role(tensors),
        num_bytes=sum(entry.num_bytes for entry in tensors.values()),
        num_tasks=figures.num_tasks,
        bytes_read=figures.bytes_read,
        bytes_written=figures.bytes_written,
        peak_memory_bytes=plan.peak_memory_bytes,
        notes=prepared.notes,
        renamed=prepared.renamed,
        removed_files=prepared.removed,
        recipe=prepared.recipe,
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
    selects = prepared.request.include or prepared.request.exclude  # no byte of another tensor is read then
    if not selects and prepared.original is not None and any(key.slot == MASTER for key in prepared.original.tensors):
        from ckpt_tools.transfer.copies import note_of_copies

        notes = note_of_copies(prepared.original, prepared.store, prepared.copy_written, is_sample=True)
        prepared = replace(prepared, notes=merged((*prepared.notes, *notes)))
    plan, report, request = prepared.plan, plan_report(prepared), prepared.request
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
            journaling.all_written(journal, is_replacing=bool(prepared.removed))
            digests = _staged_digests(prepared, claim, on_progress) if request.checksum else []
            with held_back():
                claim.publish([*digests, *(file.path for file in plan.layout.files)], prepared.removed)
        digests_url = _digests_url(prepared, claim, digests, on_progress) if request.checksum else None
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


def _staged_digests(prepared: Prepared, claim: Claim, on_progress: Progress) -> list[str]:
    from ckpt_tools.verification.digest_files import write_staged

    return write_staged(
        claim,
        prepared.place,
        prepared.target_format,
        options=prepared.keys,
        num_workers=prepared.plan.num_workers,
        on_total=lambda total: Meter(on_progress, total).add,
    )


def _digests_url(prepared: Prepared, claim: Claim, staged: list[str], on_progress: Progress) -> str:
    """URL of the list of digests. It is written now if it was not staged with the output."""
    from ckpt_tools.verification.digest_files import write_published

    if staged:
        return prepared.place.form.url_of(prepared.place.url, staged[0])
    return write_published(
        claim,
        prepared.place,
        prepared.target_format,
        options=prepared.keys,
        num_workers=prepared.plan.num_workers,
        on_total=lambda total: Meter(on_progress, total).add,
        storage_options=prepared.request.storage_options,
    )


def removed_at(
    place: Place, layout: Layout, *, overwrite: bool, checksum: bool, storage_options: StorageOptions
) -> Mapping[str, int]:
    """The files at the destination that the output replaces: one checkpoint, and the digests beside it.

    Raises:
        DestinationExistsError: something is there that may not be replaced, or digests of a file that is gone or would
            be replaced.
    """
    if not overwrite:
        place.check_free(overwrite=False)
        if (url := _digests_beside(place, storage_options)) is not None:
            raise already_exists(url) if checksum else _of_another(url)
        return NOTHING
    from ckpt_tools.verification.digest_files import check_list
    from ckpt_tools.verification.replacing import replaced_files

    removed = replaced_files(place, [file.path for file in layout.files])
    url = _digests_beside(place, storage_options)
    if url is None:
        return removed
    if not checksum:
        raise _of_another(url)
    return {**removed, **check_list(open_place(url, storage_options))}


def _digests_beside(place: Place, storage_options: StorageOptions) -> str | None:
    """URL of the list of digests beside a destination that is one file, if there is one: it describes the old file."""
    url = place.url + DIGESTS_SUFFIX
    is_there = isinstance(place.form, SingleFile) and open_place(url, storage_options).as_file().present() is not None
    return url if is_there else None


def _of_another(url: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{url} describes the file being replaced; remove it, or replace it with {option('checksum', True)}"
    )
