"""Implements ``verify``, ``diff`` and ``checksum``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ckpt_tools.core import matching, renaming, transforms
from ckpt_tools.core.applicability import TWO_COPIES_RULE, OptionContext, check_applicability
from ckpt_tools.core.apply_options import apply_options
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.limits import check_expansion
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, count_tensors_by_role
from ckpt_tools.core.names import collect_model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import State, format_option
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.errors import FormatError, UnsupportedError, UsageError
from ckpt_tools.formats.applicability import COMPARING_RULES, DIFFING_RULES
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import lookup_format
from ckpt_tools.messages.progress import ProgressCallback, ProgressMeter
from ckpt_tools.messages.showing import DisplayableResult, dataclass_to_json
from ckpt_tools.messages.wording import format_count
from ckpt_tools.reading.checkpoint import (
    make_option_case,
    make_quantize_step,
    make_read_back_options,
    make_recipe_step,
)
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.runs.opening import open_checkpoint, open_reference_matcher
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, open_output_location
from ckpt_tools.transfer.computing import add_generated_files
from ckpt_tools.transfer.tensor_checks import check_required_equal
from ckpt_tools.verification import digests
from ckpt_tools.verification.compare import ComparedCheckpoint, compare_checkpoints
from ckpt_tools.verification.digest_files import (
    get_digests_url,
    read_companion_digests,
    read_digests,
    read_stored_digests,
    write_digest_list,
)
from ckpt_tools.verification.digests import Digests
from ckpt_tools.verification.entries import find_differing_entries, find_differing_texts, list_uncompared_entries
from ckpt_tools.verification.integrity import check_integrity
from ckpt_tools.verification.model_files import build_expected_model, find_differing_files
from ckpt_tools.verification.report import VerifyReport

if TYPE_CHECKING:
    from ckpt_tools.verification.file_lists import FileList


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """Number of worker threads, progress callback and storage options."""

    num_workers: int
    on_progress: ProgressCallback
    storage_options: StorageOptions = None


def verify_checkpoint(
    src: str | Path,
    options: ConvertOptions,
    execution: ExecutionOptions,
    *,
    against: str | Path | None = None,
    files: FileList | None = None,
) -> VerifyReport:
    """Check the files at ``src`` against lists of other tools, and then its tensors as ``verify_tensors`` does.

    ``files`` is such a list, ``against`` the place of a list of digests of tensors; default: what is stored with
    ``src``. If a file is not as a list says, no tensor is read.

    Raises:
        CkptError: bytes or lists cannot be read.
    """

    def check_listed_files(folders: Collection[str]) -> VerifyReport | None:
        if against is not None:
            return None
        from ckpt_tools.verification.file_checks import check_against_lists

        return check_against_lists(
            src,
            files,
            folders,
            num_workers=execution.num_workers,
            on_progress=execution.on_progress,
            storage_options=execution.storage_options,
        )

    try:
        opened = open_checkpoint(
            src,
            options.read_options,
            format_name=options.from_,
            storage_options=execution.storage_options,
            checks_options=True,
        )
    except FormatError:
        report = check_listed_files(())
        if report is None or report.equal:
            raise
        return report
    tensor_files = opened.manifest.files.difference(opened.manifest.literals)
    file_report = check_listed_files({file.rpartition("/")[0] for file in tensor_files})
    if file_report is not None and not file_report.equal:
        return file_report
    report = verify_tensors(opened.source, opened.manifest, options, execution, against=against)
    if file_report is None:
        return report
    return replace(
        report, notes=report.notes + file_report.notes, num_files=file_report.num_files, lists=file_report.lists
    )


def verify_tensors(
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
    storage_options = execution.storage_options
    check_expansion(manifest.tensors, manifest.stored_bytes)
    recorded = (
        read_digests(against, storage_options)
        if against is not None
        else read_stored_digests(source, manifest, storage_options)
    )
    report = check_integrity(source, manifest, num_workers=execution.num_workers, on_progress=execution.on_progress)
    check_required_equal(manifest, source.store)
    if any(key.slot == MASTER for key in manifest.tensors):
        from ckpt_tools.transfer.tensor_checks import note_differing_copies

        advice = "an export takes the model's" if manifest.masters_are_outdated else "an export takes the master's"
        notes = note_differing_copies(manifest, source.store, advice, is_sample=False)
        report = replace(report, notes=(*report.notes, *notes))
    file_digests = {} if against is not None else read_companion_digests(source, manifest)
    if recorded is None and not file_digests:
        return report
    meter = ProgressMeter(execution.on_progress, digests.count_hashed_bytes(manifest))
    computed: Digests = digests.compute_digests(
        source.store, manifest, num_workers=execution.num_workers, on_bytes=meter.add_bytes, compares_records=False
    )
    digest_pairs: list[tuple[Digests, Digests]] = []
    for file, recorded_of_file in file_digests.items():
        # The list of one file covers the tensors that it names, and each tensor whose shards are in that file alone,
        # under the name that owns its bytes.
        own_keys = {key for key, entry in manifest.tensors.items() if set(entry.shards.files) == {file}}
        covered = {key: each for key, each in computed.items() if key in recorded_of_file or key in own_keys}
        digest_pairs.append((recorded_of_file, covered))
    if recorded is not None:
        digest_pairs.append(
            _select_comparable_digests(_convert_digests(recorded, options), computed, options)
            if against
            else (recorded, computed)
        )
    mismatches = tuple(dict.fromkeys(each for pair in digest_pairs for each in digests.compare_digests(*pair)))
    num_digests = len({key for wanted, _ in digest_pairs for key in wanted})
    return replace(report, differences=report.differences + mismatches, num_digests=num_digests)


def _convert_digests(recorded: Digests, options: ConvertOptions) -> Digests:
    """The list after the conversion of its checkpoint: only weights, selected and renamed. Raises UsageError."""
    if options.state == "model":
        single_copies = digests.select_one_copy(recorded, weights=options.choose_weight_copy())
        recorded = {key: digest for key, digest in single_copies.items() if key.slot == WEIGHT}
    names = sorted({key.fqn for key in recorded})
    matching.check_renaming(names, rules=renaming.parse_rename_rules(options.rename), key_map=options.names)
    matching.check_globs_match(names, include=options.include, exclude=options.exclude)
    new_name = renaming.make_renamer(options.rename, options.names)
    chosen_keys = [key for key in recorded if matching.is_selected(key.fqn, options.include, options.exclude)]
    renamed = {key._replace(fqn=new_name(key.fqn)): recorded[key] for key in chosen_keys}
    if len(renamed) < len(chosen_keys):
        raise UsageError("renaming gives two tensors the same name; names must stay distinct")
    return renamed


def _select_comparable_digests(expected: Digests, actual: Digests, options: ConvertOptions) -> tuple[Digests, Digests]:
    """If only one side has fp32 masters, one copy of each weight on both sides."""
    have_masters = [any(key.slot == MASTER for key in each) for each in (expected, actual)]
    check_applicability(
        [TWO_COPIES_RULE],
        options.values_by_name,
        OptionContext(has_masters=have_masters[0], keeps_both_copies=all(have_masters)),
    )
    if have_masters[0] == have_masters[1]:
        return expected, actual
    weights = options.choose_weight_copy()
    return digests.select_one_copy(expected, weights=weights), digests.select_one_copy(actual, weights=weights)


def verify_conversion(
    opened: OpenedCheckpoint, dst: str | Path, options: ConvertOptions, execution: ExecutionOptions
) -> VerifyReport:
    """Whether ``dst`` holds the result of converting ``opened`` with ``options``.

    Raises:
        CkptError: one of them cannot be read.
    """
    # The destination is compared with what the conversion would write now:
    #
    #     src ── read ──▶ manifest ── apply_options ──▶ expected ──┐
    #                                                              ├──▶ tensors, entries, texts and files that differ
    #     dst ── read ──▶ its manifest ── the model alone? ────────┘
    #
    # The destination tells which state is compared: the whole one (`is_whole`) if it holds more than a model, or keeps
    # the names of the source. A tree is then read again with that state.
    manifest = opened.manifest
    written = _open_destination(dst, manifest, options)
    dst_manifest = written.manifest
    dst_format = lookup_format(dst_manifest.format)
    writer = dst_format if dst_format is not None and dst_format.writes else None
    is_whole = options.state != "model" and (
        _has_other_state(dst_manifest) or _has_source_names(manifest, dst_manifest, writer, options)
    )
    if options.state is None and manifest.tree is not None:  # the weights may be others than those with the optimizer
        reading = replace(options.read_options, state="all" if is_whole else "model")
        opened = open_checkpoint(
            opened.url,
            reading,
            format_name=options.from_,
            storage_options=execution.storage_options,
            config_folder=options.config,
        )
        manifest = opened.manifest
        if is_whole and dst_manifest.tree is not None:
            written = _open_destination(dst, manifest, options, state="all")
            dst_manifest = written.manifest
    fill = None
    if options.fill is not None:
        from ckpt_tools.runs.weight_source import open_fill

        opened, fill = open_fill(opened, options, options.fill)
        manifest = opened.manifest
    holds_masters = writer is None or writer.holds_masters or manifest.keeps_masters
    has_recipe = options.needs_config
    case = make_option_case(
        manifest,
        dst_manifest.format,
        keeps_both=is_whole and holds_masters,
        is_whole_state=is_whole,
        has_recipe=has_recipe,
    )
    check_applicability(COMPARING_RULES, options.values_by_name, case)
    recipe, like = make_recipe_step(opened, options), open_reference_matcher(options)
    kept_entries = () if writer is None else writer.kept_entries
    edited = apply_options(
        manifest,
        options,
        writes_all_state=is_whole,
        holds_masters=holds_masters,
        kept_entries=kept_entries,
        recipe=recipe,
        like=like,
        quantize=make_quantize_step(opened, options),
        fill=fill,
    )
    expected, model_files = build_expected_model(opened, edited.manifest, dst, writer, options)
    dst_model, notes = _select_model(dst_manifest, options) if options.state == "model" else (dst_manifest, ())
    theirs = ComparedCheckpoint.of("the destination", written.source.store, dst_model)
    store = add_generated_files(opened.source.store, expected)
    check_expansion(dst_manifest.tensors, dst_manifest.stored_bytes)
    check_required_equal(expected, store)
    ours = ComparedCheckpoint.of("the source", store, expected).add_masters_like(theirs).rename_extras_like(theirs)
    report = compare_checkpoints(ours, theirs, num_workers=execution.num_workers, on_progress=execution.on_progress)
    names = (ours.name, theirs.name)
    text_differences = (
        find_differing_texts(expected, dst_manifest, names) if is_whole or HEADER_ENTRY in kept_entries else []
    )
    file_differences = [] if model_files is None else find_differing_files(model_files, opened.source, written.source)
    report = replace(report, notes=notes, differences=(*report.differences, *text_differences, *file_differences))
    return _add_entry_differences(report, expected, dst_manifest, names) if is_whole else report


def _select_model(manifest: Manifest, options: ConvertOptions) -> tuple[Manifest, tuple[Note, ...]]:
    """The model alone, as ``diff`` compares it, and a note of what else the destination holds, if it holds more."""
    other_keys = [key for key in manifest.select_kinds(Kind.STATE, Kind.EXTRA) if key.slot != MASTER]
    if not other_keys:
        return manifest, ()
    model, _ = transforms.keep_model_only(manifest, weight_copy=options.choose_weight_copy(manifest), is_requested=True)
    reason = "the destination has them besides the model"
    note = Note(Outcome.NOT_COMPARED, format_count(len(other_keys), "tensor"), reason, len(other_keys))
    return renaming.strip_wrappers(model)[0], (note,)


def _has_other_state(manifest: Manifest) -> bool:
    """True if there are tensors beside the model's, or groups of them."""
    return bool(manifest.groups or manifest.select_kinds(Kind.STATE, Kind.EXTRA))


def _has_source_names(
    manifest: Manifest, dst_manifest: Manifest, writer: Format | None, options: ConvertOptions
) -> bool:
    """True if the names of a model without other state are the source's own, wrappers' prefixes included: a format of
    whole states holds them so, unless ``state="model"`` wrote it."""
    if _has_other_state(manifest) or writer is None or not (writer.holds_optimizer or options.state == "all"):
        return False
    is_renamed = any((options.rename, options.names, options.needs_config, options.strip, options.like))
    return is_renamed or not collect_model_names(manifest).isdisjoint(collect_model_names(dst_manifest))


def _add_entry_differences(
    report: VerifyReport, ours: Manifest, theirs: Manifest, names: tuple[str, str]
) -> VerifyReport:
    entry_differences = tuple(find_differing_entries(ours, theirs, names))
    return replace(
        report,
        differences=report.differences + entry_differences,
        notes=report.notes + list_uncompared_entries(ours, theirs),
    )


def _open_destination(
    dst: str | Path, manifest: Manifest, options: ConvertOptions, state: State | None = None
) -> OpenedCheckpoint:
    """The destination, by the tag and the keys that are not for reading the source; with these if it may have kept the
    source's tree and does not say by itself which model is meant. Raises CkptError."""
    source_options = make_option_case(manifest, "", keeps_both=False, is_whole_state=False).reader_options
    storage_options = options.storage_options
    destination_options = {
        name: getattr(options, name) for name in ("tag", "model_key", "optim_key") if name not in source_options
    }
    try:
        return open_checkpoint(dst, ReadOptions(state=state, **destination_options), storage_options=storage_options)
    except UnsupportedError:
        tree_options = make_read_back_options(manifest.format, manifest.format, options)
        if tree_options == ReadOptions():
            raise
        return open_checkpoint(dst, tree_options, format_name=manifest.format, storage_options=storage_options)


def diff_checkpoints(
    a: OpenedCheckpoint, b: OpenedCheckpoint, options: ConvertOptions, execution: ExecutionOptions
) -> VerifyReport:
    """The differences between ``a``, with its tensors mapped and renamed by ``options``, and ``b``, in the selected
    tensors.

    Raises:
        CkptError: bytes cannot be read. UsageError: no tensor is selected.
    """
    # Each step makes the two sides comparable: parts joined, one copy of each weight, a recipe, other names, a
    # selection. Options that map names change side A alone; the selection is applied to both.
    recipe = make_recipe_step(a, options)
    manifests, side_stores = [a.manifest, b.manifest], [a.source.store, b.source.store]
    joining_notes: tuple[Note, ...] = ()
    if recipe is not None and a.manifest.unjoined_state:
        manifests[0], joining_notes = recipe(a.manifest)
        side_stores[0], recipe = add_generated_files(a.source.store, manifests[0]), None
        check_required_equal(manifests[0], side_stores[0])
    has_masters = [any(key.slot == MASTER for key in each.tensors) for each in manifests]
    has_both_copies = all(has_masters) and options.state != "model"
    has_recipe = options.needs_config
    check_applicability(
        DIFFING_RULES,
        options.values_by_name,
        make_option_case(manifests[0], "", keeps_both=has_both_copies, is_whole_state=True, has_recipe=has_recipe),
    )
    manifests, notes = _select_comparable(manifests, options)
    notes = joining_notes + notes
    if recipe is not None:
        manifests[0], recipe_notes = recipe(manifests[0])
        side_stores[0], notes = add_generated_files(side_stores[0], manifests[0]), notes + recipe_notes
    for manifest, store in zip(manifests, side_stores, strict=True):
        check_required_equal(manifest, store)
    if options.rename or options.names:
        renaming.check_renaming(manifests[0], options.rename, options.names)
        new_name = renaming.make_renamer(options.rename, options.names)
        manifests[0], _ = renaming.rename_tensors(manifests[0], new_name)
    sides = [ComparedCheckpoint.of(name, store, m) for name, store, m in zip("AB", side_stores, manifests, strict=True)]
    if options.include or options.exclude:
        left_out_names = frozenset().union(*(each.unreadable_names for each in manifests))
        names = sorted({key.fqn for side in sides for key in side.tensors} | left_out_names)
        matching.check_globs_match(names, include=options.include, exclude=options.exclude)
        sides = [
            side.select_tensors(lambda fqn: matching.is_selected(fqn, options.include, options.exclude))
            for side in sides
        ]
        if not any(side.tensors for side in sides):
            raise UsageError(
                f"{format_option('include')} and {format_option('exclude')} select no tensor on either side"
            )
    for side, manifest in zip(sides, manifests, strict=True):
        check_expansion(side.tensors, manifest.stored_bytes)
    sides[0] = sides[0].rename_extras_like(sides[1])
    report = compare_checkpoints(
        sides[0], sides[1], num_workers=execution.num_workers, on_progress=execution.on_progress
    )
    report = replace(report, notes=notes)
    is_partial = options.state == "model" or options.include or options.exclude
    return (
        report
        if is_partial
        else _add_entry_differences(report, manifests[0], manifests[1], (sides[0].name, sides[1].name))
    )


def _select_comparable(manifests: list[Manifest], options: ConvertOptions) -> tuple[list[Manifest], tuple[Note, ...]]:
    """The manifests to compare, and notes about what is left out.

    If only one side has fp32 masters, ``options.weights`` says which of its copies is compared.
    """
    if options.state == "model":
        bare_models = [
            transforms.keep_model_only(each, weight_copy=options.choose_weight_copy(each), is_requested=True)
            for each in manifests
        ]
        return [renaming.strip_wrappers(each)[0] for each, _ in bare_models], ()
    master_counts = [sum(key.slot == MASTER for key in each.tensors) for each in manifests]
    if all(master_counts) or not any(master_counts):
        return manifests, ()
    left_out = "model copies" if options.choose_weight_copy(*manifests) == "master" else "fp32 masters"
    description = f"{left_out} of {format_count(max(master_counts), 'tensor')}"
    note = Note(Outcome.NOT_COMPARED, description, "only one side has fp32 masters", max(master_counts))
    return [
        transforms.keep_one_copy(each, weight_copy=options.choose_weight_copy(*manifests))[0] for each in manifests
    ], (note,)


@dataclass(frozen=True, slots=True, repr=False)
class ChecksumReport(DisplayableResult):
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
        return {**dataclass_to_json(self, *self.JSON_PROPERTIES), "digests": digests.build_digest_rows(self.digests)}


def write_digests(
    source: Source, manifest: Manifest, execution: ExecutionOptions, *, output: str | Path | None, overwrite: bool
) -> ChecksumReport:
    """Write the list of a checkpoint's digests to ``output``. Default: with the checkpoint. ``-``: do not write it.

    Raises:
        DestinationExistsError: the list exists. CkptError: bytes cannot be read or written.
    """
    check_expansion(manifest.tensors, manifest.stored_bytes)
    check_required_equal(manifest, source.store)
    meter = ProgressMeter(execution.on_progress, digests.count_hashed_bytes(manifest))

    def compute_all_digests() -> Digests:
        return digests.compute_digests(
            source.store, manifest, num_workers=execution.num_workers, on_bytes=meter.add_bytes
        )

    if output == "-":
        return ChecksumReport(compute_all_digests(), count_tensors_by_role(manifest.tensors), meter.total, None)
    destination = open_output_location(output or get_digests_url(source, manifest), execution.storage_options)
    written_digests = write_digest_list(destination, compute_all_digests, overwrite=overwrite)
    return ChecksumReport(written_digests, count_tensors_by_role(manifest.tensors), meter.total, destination.url)
