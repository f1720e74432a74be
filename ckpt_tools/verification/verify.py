"""Implements ``verify``, ``diff`` and ``checksum``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ckpt_tools.core import matching, transforms
from ckpt_tools.core.applicability import OF_TWO_COPIES, Case, check
from ckpt_tools.core.apply_options import apply_options
from ckpt_tools.core.expansion import check_expansion
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, tensors_by_role
from ckpt_tools.core.names import model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import State, option
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.core.progress import Meter, Progress
from ckpt_tools.core.showing import Shown, json_of
from ckpt_tools.core.wording import count
from ckpt_tools.errors import FormatError, UnsupportedError, UsageError
from ckpt_tools.formats.applicability import COMPARING, DIFFING
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import known
from ckpt_tools.reading.checkpoint import case_of, check_reading, own_keys, recipe_step
from ckpt_tools.runs.opening import likeness, read_checkpoint
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, open_place
from ckpt_tools.transfer.computing import with_made_files
from ckpt_tools.transfer.equality import check_equal
from ckpt_tools.verification import digests
from ckpt_tools.verification.compare import Side, compare
from ckpt_tools.verification.digest_files import digests_of_files, digests_url, read_digests, stored_digests, write_list
from ckpt_tools.verification.digests import Digests
from ckpt_tools.verification.entries import differing_entries, differing_texts, not_compared
from ckpt_tools.verification.integrity import check_integrity
from ckpt_tools.verification.model_files import differing_files, expected_model
from ckpt_tools.verification.report import VerifyReport

if TYPE_CHECKING:
    from ckpt_tools.verification.file_lists import FileList


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """Number of worker threads, progress callback and storage options."""

    num_workers: int
    on_progress: Progress
    storage_options: StorageOptions = None


def verify_one(
    src: str | Path,
    options: ConvertOptions,
    execution: ExecutionOptions,
    *,
    against: str | Path | None = None,
    files: FileList | None = None,
) -> VerifyReport:
    """Check the files at ``src`` against lists of other tools, and then its tensors as ``verify_alone`` does.

    ``files`` is such a list, ``against`` the place of a list of digests of tensors; default: what is stored with
    ``src``. If a file is not as a list says, no tensor is read.

    Raises:
        CkptError: bytes or lists cannot be read.
    """

    def checked(folders: Collection[str]) -> VerifyReport | None:
        if against is not None:
            return None
        from ckpt_tools.verification.file_checks import check_with_lists

        return check_with_lists(
            src,
            files,
            folders,
            num_workers=execution.num_workers,
            on_progress=execution.on_progress,
            storage_options=execution.storage_options,
        )

    try:
        source, manifest = read_checkpoint(
            src, options.reading, format_name=options.from_, storage_options=execution.storage_options
        )
        check_reading(manifest, options.reading)
    except FormatError:
        report = checked(())
        if report is None or report.equal:
            raise
        return report
    tensor_files = {file for entry in manifest.tensors.values() for file in entry.shards.files}
    listed = checked({file.rpartition("/")[0] for file in tensor_files.difference(manifest.literals)})
    if listed is not None and not listed.equal:
        return listed
    report = verify_alone(source, manifest, options, execution, against=against)
    if listed is None:
        return report
    return replace(report, notes=report.notes + listed.notes, num_files=listed.num_files, lists=listed.lists)


def verify_alone(
    source: Source,
    manifest: Manifest,
    options: ConvertOptions,
    execution: ExecutionOptions,
    *,
    against: str | Path | None,
) -> VerifyReport:
    """Check that every byte can be read and matches the stored checksums, and every tensor matches its digest, if
    there are digests: those in ``against``, of a checkpoint that was converted to this one with ``options``, or those
    stored with this one.

    Raises:
        CkptError: bytes or the digests cannot be read.
    """
    reach = execution.storage_options
    check_expansion(manifest.tensors, manifest.stored_bytes)
    listed = read_digests(against, reach) if against is not None else stored_digests(source, manifest, reach)
    report = check_integrity(source, manifest, num_workers=execution.num_workers, on_progress=execution.on_progress)
    check_equal(manifest, source.store)
    if any(key.slot == MASTER for key in manifest.tensors):
        from ckpt_tools.transfer.copies import note_of_copies

        advice = "an export takes the model's" if manifest.masters_lag else "an export takes the master's"
        notes = note_of_copies(manifest, source.store, advice, is_sample=False)
        report = replace(report, notes=(*report.notes, *notes))
    lists = {} if against is not None else digests_of_files(source, manifest)
    if listed is None and not lists:
        return report
    meter = Meter(execution.on_progress, digests.num_bytes(manifest))
    found: Digests = digests.digests_of(
        source.store, manifest, num_workers=execution.num_workers, on_bytes=meter.add, compares_records=False
    )
    pairs = [(each, digests.of_file(found, each, manifest, file)) for file, each in lists.items()]
    if listed is not None:
        pairs.append(_comparable_digests(_converted(listed, options), found, options) if against else (listed, found))
    wrong = tuple(dict.fromkeys(each for pair in pairs for each in digests.differences(*pair)))
    num_digests = len({key for wanted, _ in pairs for key in wanted})
    return replace(report, differences=report.differences + wrong, num_digests=num_digests)


def _converted(listed: Digests, options: ConvertOptions) -> Digests:
    """The list after the conversion of its checkpoint: only weights, selected and renamed. Raises UsageError."""
    if options.state == "model":
        copies = digests.one_copy(listed, weights=options.weight_copy())
        listed = {key: digest for key, digest in copies.items() if key.slot == WEIGHT}
    names = sorted({key.fqn for key in listed})
    matching.check_renaming(names, rules=transforms.parsed_rules(options.rename), key_map=options.names)
    matching.check_globs(names, include=options.include, exclude=options.exclude)
    new_name = transforms.substitutions(options.rename, options.names)
    chosen = [key for key in listed if matching.is_chosen(key.fqn, options.include, options.exclude)]
    renamed = {key._replace(fqn=new_name(key.fqn)): listed[key] for key in chosen}
    if len(renamed) < len(chosen):
        raise UsageError("renaming gives two tensors the same name; names must stay distinct")
    return renamed


def _comparable_digests(wanted: Digests, found: Digests, options: ConvertOptions) -> tuple[Digests, Digests]:
    """If only one side has fp32 masters, one copy of each weight on both sides."""
    sides = [digests.has_masters(each) for each in (wanted, found)]
    check([OF_TWO_COPIES], options.given, Case(has_masters=sides[0], keeps_both=all(sides)))
    if sides[0] == sides[1]:
        return wanted, found
    weights = options.weight_copy()
    return digests.one_copy(wanted, weights=weights), digests.one_copy(found, weights=weights)


def verify_pair(
    src: str | Path,
    source: Source,
    manifest: Manifest,
    dst: str | Path,
    options: ConvertOptions,
    execution: ExecutionOptions,
) -> VerifyReport:
    """Whether ``dst`` holds the result of converting ``manifest``, read at ``src``, with ``options``.

    Raises:
        CkptError: one of them cannot be read.
    """
    other_source, other = _read_destination(dst, manifest, options)
    found = known(other.format)
    target = found if found is not None and found.writes else None
    whole = options.state != "model" and (_has_more(other) or _keeps_names(manifest, other, target, options))
    if options.state is None and manifest.tree is not None:  # the weights may be others than those with the optimizer
        reading = replace(options.reading, state="all" if whole else "model")
        source, manifest = read_checkpoint(
            src, reading, format_name=options.from_, storage_options=execution.storage_options
        )
        if whole and other.tree is not None:
            other_source, other = _read_destination(dst, manifest, options, state="all")
    holds_masters = target is None or target.holds_masters or manifest.keeps_masters
    has_recipe = options.needs_config
    case = case_of(manifest, other.format, keeps_both=whole and holds_masters, whole=whole, has_recipe=has_recipe)
    check(COMPARING, options.given, case)
    recipe, like = recipe_step(src, source, manifest, options), likeness(options)
    kept = () if target is None else target.kept_entries
    made = apply_options(
        manifest, options, whole=whole, holds_masters=holds_masters, kept=kept, recipe=recipe, like=like
    )
    expected, model_files = expected_model(src, source, made.manifest, dst, target, options)
    compared, notes = _of_model(other, options) if options.state == "model" else (other, ())
    theirs = Side.of("the destination", other_source.store, compared)
    store = with_made_files(source.store, expected)
    check_expansion(other.tensors, other.stored_bytes)
    check_equal(expected, store)
    ours = Side.of("the source", store, expected).with_masters_like(theirs).with_extras_like(theirs)
    report = compare(ours, theirs, num_workers=execution.num_workers, on_progress=execution.on_progress)
    names = (ours.name, theirs.name)
    texts = differing_texts(expected, other, names) if whole or HEADER_ENTRY in kept else []
    files = [] if model_files is None else differing_files(model_files, other_source)
    report = replace(report, notes=notes, differences=(*report.differences, *texts, *files))
    return _with_entries(report, expected, other, names) if whole else report


def _of_model(manifest: Manifest, options: ConvertOptions) -> tuple[Manifest, tuple[Note, ...]]:
    """The model alone, as ``diff`` compares it, and a note of what else the destination holds, if it holds more."""
    more = [key for key in manifest.of_kind(Kind.STATE, Kind.EXTRA) if key.slot != MASTER]
    if not more:
        return manifest, ()
    alone, _ = transforms.model_only(manifest, weights=options.weight_copy(manifest), asked=True)
    why = "the destination has them besides the model"
    note = Note(Outcome.NOT_COMPARED, count(len(more), "tensor"), why, len(more))
    return transforms.without_wrappers(alone)[0], (note,)


def _has_more(manifest: Manifest) -> bool:
    """True if there are tensors beside the model's, or groups of them."""
    return bool(manifest.groups or manifest.of_kind(Kind.STATE, Kind.EXTRA))


def _keeps_names(manifest: Manifest, other: Manifest, target: Format | None, options: ConvertOptions) -> bool:
    """True if the names of a model without other state are the source's own, wrappers' prefixes included: a format of
    whole states holds them so, unless ``state="model"`` wrote it."""
    if _has_more(manifest) or target is None or not (target.holds_optimizer or options.state == "all"):
        return False
    is_renamed = any((options.rename, options.names, options.needs_config, options.strip, options.like))
    return is_renamed or not model_names(manifest).isdisjoint(model_names(other))


def _with_entries(report: VerifyReport, ours: Manifest, theirs: Manifest, names: tuple[str, str]) -> VerifyReport:
    found = tuple(differing_entries(ours, theirs, names))
    return replace(report, differences=report.differences + found, notes=report.notes + not_compared(ours, theirs))


def _read_destination(
    dst: str | Path, manifest: Manifest, options: ConvertOptions, state: State | None = None
) -> tuple[Source, Manifest]:
    """The destination, by the tag and the keys that are not for reading the source; with these if it may have kept the
    source's tree and does not say by itself which model is meant. Raises CkptError."""
    taken, stores = case_of(manifest, "", keeps_both=False, whole=False).reads, options.storage_options
    free = {name: getattr(options, name) for name in ("tag", "model_key", "optim_key") if name not in taken}
    try:
        return read_checkpoint(dst, ReadOptions(state=state, **free), storage_options=stores)
    except UnsupportedError:
        keys = own_keys(manifest.format, manifest.format, options)
        if keys == ReadOptions():
            raise
        return read_checkpoint(dst, keys, format_name=manifest.format, storage_options=stores)


def compare_all(
    url: str | Path,
    a: tuple[Source, Manifest],
    b: tuple[Source, Manifest],
    options: ConvertOptions,
    execution: ExecutionOptions,
) -> VerifyReport:
    """The differences between ``a``, read at ``url``, with its tensors mapped and renamed by ``options``, and ``b``, in
    the selected tensors.

    Raises:
        CkptError: bytes cannot be read. UsageError: no tensor is selected.
    """
    recipe = recipe_step(url, *a, options)
    joining: tuple[Note, ...] = ()
    if recipe is not None and a[1].parted:
        joined, joining = recipe(a[1])
        a, recipe = (replace(a[0], store=with_made_files(a[0].store, joined)), joined), None
        check_equal(joined, a[0].store)
    has_masters = [any(key.slot == MASTER for key in each.tensors) for _, each in (a, b)]
    is_both = all(has_masters) and options.state != "model"
    has_recipe = options.needs_config
    check(DIFFING, options.given, case_of(a[1], "", keeps_both=is_both, whole=True, has_recipe=has_recipe))
    manifests, notes = _comparable([a[1], b[1]], options)
    notes = joining + notes
    stores = [source.store for source, _ in (a, b)]
    if recipe is not None:
        manifests[0], more = recipe(manifests[0])
        stores[0], notes = with_made_files(stores[0], manifests[0]), notes + more
    for manifest, store in zip(manifests, stores, strict=True):
        check_equal(manifest, store)
    if options.rename or options.names:
        transforms.check_renaming(manifests[0], options.rename, options.names)
        new_name = transforms.substitutions(options.rename, options.names)
        manifests[0], _ = transforms.rename(manifests[0], new_name)
    sides = [Side.of(name, store, m) for name, store, m in zip("AB", stores, manifests, strict=True)]
    if options.include or options.exclude:
        left = frozenset().union(*(each.left_out for each in manifests))
        names = sorted({key.fqn for side in sides for key in side.tensors} | left)
        matching.check_globs(names, include=options.include, exclude=options.exclude)
        sides = [side.selected(lambda fqn: matching.is_chosen(fqn, options.include, options.exclude)) for side in sides]
        if not any(side.tensors for side in sides):
            raise UsageError(f"{option('include')} and {option('exclude')} select no tensor on either side")
    for side, manifest in zip(sides, manifests, strict=True):
        check_expansion(side.tensors, manifest.stored_bytes)
    sides[0] = sides[0].with_extras_like(sides[1])
    report = compare(sides[0], sides[1], num_workers=execution.num_workers, on_progress=execution.on_progress)
    report = replace(report, notes=notes)
    is_part = options.state == "model" or options.include or options.exclude
    return report if is_part else _with_entries(report, manifests[0], manifests[1], (sides[0].name, sides[1].name))


def _comparable(manifests: list[Manifest], options: ConvertOptions) -> tuple[list[Manifest], tuple[Note, ...]]:
    """The manifests to compare, and notes about what is left out.

    If only one side has fp32 masters, ``options.weights`` says which of its copies is compared.
    """
    if options.state == "model":
        bare = [transforms.model_only(each, weights=options.weight_copy(each), asked=True) for each in manifests]
        return [transforms.without_wrappers(each)[0] for each, _ in bare], ()
    counts = [sum(key.slot == MASTER for key in each.tensors) for each in manifests]
    if all(counts) or not any(counts):
        return manifests, ()
    left_out = "model copies" if options.weight_copy(*manifests) == "master" else "fp32 masters"
    what = f"{left_out} of {count(max(counts), 'tensor')}"
    note = Note(Outcome.NOT_COMPARED, what, "only one side has fp32 masters", max(counts))
    return [transforms.one_copy(each, weights=options.weight_copy(*manifests))[0] for each in manifests], (note,)


@dataclass(frozen=True, slots=True, repr=False)
class ChecksumReport(Shown):
    """The digests of a checkpoint's tensors, and where they were written; None where they were not.

    A tied tensor has a digest under each of its names, so that there can be more digests than tensors.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("destination", "digests", "num_bytes")

    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("num_tensors",)

    digests: Digests
    tensors_by_role: Mapping[str, int]
    num_bytes: int
    destination: str | None

    @property
    def num_tensors(self) -> int:
        return sum(self.tensors_by_role.values())

    def to_json(self) -> dict[str, Any]:
        """``digests`` are rows, as in the file."""
        return {**json_of(self, *self.JSON_PROPERTIES), "digests": digests.rows(self.digests)}


def write_digests(
    source: Source, manifest: Manifest, execution: ExecutionOptions, *, output: str | Path | None, overwrite: bool
) -> ChecksumReport:
    """Write the list of a checkpoint's digests to ``output``. Default: with the checkpoint. ``-``: do not write it.

    Raises:
        DestinationExistsError: the list exists. CkptError: bytes cannot be read or written.
    """
    check_expansion(manifest.tensors, manifest.stored_bytes)
    check_equal(manifest, source.store)
    meter = Meter(execution.on_progress, digests.num_bytes(manifest))

    def made() -> Digests:
        return digests.digests_of(source.store, manifest, num_workers=execution.num_workers, on_bytes=meter.add)

    if output == "-":
        return ChecksumReport(made(), tensors_by_role(manifest.tensors), meter.total, None)
    place = open_place(output or digests_url(source, manifest), execution.storage_options)
    found = write_list(place, made, overwrite=overwrite)
    return ChecksumReport(found, tensors_by_role(manifest.tensors), meter.total, place.url)
