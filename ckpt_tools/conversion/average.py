"""Opens the sources of an average, compares them, and makes one checkpoint of them, whose elements are computed.

The last source is the one that is converted: what it says of names, ties, dtypes and files is written, and the earlier
ones give elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Unpack

from ckpt_tools.core.averages import Average, AverageRule, Averaging
from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry, make_computed_file_name
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import AverageKeywords, ConvertRequest
from ckpt_tools.core.quantized import find_uncastable_keys
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.runs.weight_source import MAX_NAMED, WeightSource, match_weights
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.urls import check_not_nested
from ckpt_tools.stores.wrappers import RedirectingStore


def make_average_request(
    sources: str | Path | Sequence[str | Path],
    dst: str | Path,
    *,
    last: int | None,
    every: int | None,
    coefficients: Sequence[float],
    decay: float | None,
    **options: Unpack[AverageKeywords],
) -> ConvertRequest:
    """The conversion that writes the average of ``sources``, or of the checkpoints of one run that ``last`` and
    ``every`` choose. Raises UsageError, and as ``choose_run_checkpoints``."""
    urls = (sources,) if isinstance(sources, str | Path) else tuple(sources)
    if last is not None or every is not None:
        from ckpt_tools.runs.choosing import choose_run_checkpoints

        if len(urls) != 1:
            names = f"{format_option('last')} and {format_option('every')}"
            raise UsageError(f"{names} choose checkpoints of one run, and {len(urls)} sources are named")
        urls = choose_run_checkpoints(urls[0], last=last, every=every, storage_options=options.get("storage_options"))
    if len(urls) < 2:
        ways = f"name several, or one run with {format_option('last')} or {format_option('every')}"
        raise UsageError(f"an average is of at least two sources, and here {'is one' if urls else 'are none'}; {ways}")
    averaging = Averaging(urls[:-1], AverageRule.of(len(urls), coefficients, decay))
    return ConvertRequest(src=urls[-1], dst=dst, averaging=averaging, state="model", **options)


def open_average(request: ConvertRequest, opened: OpenedCheckpoint, averaging: Averaging) -> OpenedCheckpoint:
    """``opened``, the last source of the average, with the average of all in place of its own weights.

    Raises:
        UsageError: the sources do not hold the same tensors, or one is named twice. UnsupportedError: a weight is
            quantized. CkptError: as ``open_checkpoint``.
    """
    sources, redirected_files = list[WeightSource](), dict[str, tuple[Store, str]]()
    for number, url in enumerate(averaging.earlier, 1):
        earlier = open_checkpoint(
            url,
            replace(request.read_options, state="model"),
            format_name=request.from_,
            storage_options=request.storage_options,
            checks_options=True,
        )
        check_not_nested(earlier.url, request.dst, request.storage_options)
        source, prefix = WeightSource.of(earlier, request), f"source {number}:"
        redirected_files |= {prefix + file: (earlier.source.store, file) for file in source.files}
        sources.append(source.with_file_prefix(prefix))
    sources.append(WeightSource.of(opened, request))
    labels = [source.label for source in sources]
    repeated_labels = sorted({label for label in labels if labels.count(label) > 1})
    if repeated_labels:
        way = f"a source that counts more than others has a larger number in {format_option('coefficients')}"
        raise UsageError(f"{join_names(repeated_labels)} is named twice; {way}")
    manifest = _average_manifests(sources, request, averaging.rule)
    store = RedirectingStore(opened.source.store, redirected_files)
    return replace(opened, source=replace(opened.source, store=store), manifest=manifest)


def _average_manifests(sources: Sequence[WeightSource], request: ConvertRequest, rule: AverageRule) -> Manifest:
    """The last manifest with averages for its parameters of floating point. Integers, bools and buffers are its own,
    and so are tensors that the options leave out. Raises UsageError and UnsupportedError."""
    has_own_names = not request.needs_config and request.strip is None
    if request.buffers and not has_own_names:
        others = f"{format_option('recipe')} or {format_option('strip')}"
        raise UsageError.of("buffers", f"{format_option('buffers')} names tensors of the sources, without {others}")

    def is_wanted(names: Iterable[str]) -> bool:
        return not has_own_names or any(is_selected(name, request.include, request.exclude) for name in names)

    last = sources[-1]
    names_by_owner = {owner: names for owner, names in last.list_names().items() if is_wanted(names)}
    for source in sources:
        if any(is_wanted([key.fqn]) for key in find_uncastable_keys(source.manifest)):
            way = f"dequantize each source first (ckpt-tools convert SRC OUT {format_option('dequantize', True)})"
            raise UnsupportedError(f"{source.label} is quantized, and quantized weights are not averaged; {way}")
    way = f"; leave them out with {format_option('exclude')}, or give all sources the same names and shapes first"
    found, pairs = match_weights(sources, last, names_by_owner, is_wanted, way)
    other_names = (source.list_names() for source in sources)
    tensors, computed = dict(last.manifest.tensors), dict(last.manifest.computed)
    averaged, mixed_names, kept_names = list[TensorEntry](), list[str](), list(map(str, last.manifest.values))
    for name, entries in ((name, entries) for name, entries in found.items() if entries[-1].numel):
        entry, names = entries[-1], names_by_owner[name]
        is_buffer = any(is_selected(each, request.buffers, ()) for each in names if request.buffers)
        is_buffer = is_buffer or any(each.kind is Kind.BUFFER for each in entries)
        if is_buffer or entry.dtype not in CASTABLE:
            kept_names.append(name)
            continue
        file = make_computed_file_name(f"{name} averaged")
        computed[file] = Average.of(entries, rule, name, [source.label for source in sources])
        tensors[StateKey(name)] = replace(entry, shards=computed[file].make_table(file), plus=0)
        averaged.append(entry)
        mixed_names += [name] if len({each.dtype for each in entries}) > 1 else []
    return replace(
        last.manifest,
        tensors=tensors,
        computed=computed,
        must_equal=(*chain.from_iterable(source.manifest.must_equal for source in sources), *pairs),
        decoding_bytes=sum(source.manifest.decoding_bytes for source in sources),
        stored_bytes=sum(source.manifest.stored_bytes for source in sources),
        # What only earlier sources have is left out by the options: else there was an error.
        unreadable_names=last.manifest.unreadable_names.union(*other_names) - last.manifest.fqns,
        notes=(*_collect_notes(sources), *_note_average(sources, averaged, mixed_names, kept_names)),
    )


def _collect_notes(sources: Sequence[WeightSource]) -> Iterator[Note]:
    """The notes of all sources; one of an earlier source that the last has too is made once."""
    *earlier, last = sources
    yield from last.notes
    known_notes = {(note.outcome, note.what, note.why) for note in last.notes}
    for source in earlier:
        for note in source.notes:
            if (note.outcome, note.what, note.why) not in known_notes:
                yield replace(note, what=f"{note.what} of {source.label}")
        files = source.manifest.unread_files
        if files:
            why = f"those of {last.label} are written, if there are any"
            yield Note(Outcome.DROPPED, f"{join_names(files)} of {source.label}", why, len(files))


def _note_average(
    sources: Sequence[WeightSource],
    averaged: Sequence[TensorEntry],
    mixed_names: Sequence[str],
    kept_names: Sequence[str],
) -> Iterator[Note]:
    labels = [source.label for source in sources]
    size, over = sum(entry.num_bytes for entry in averaged), join_names(labels, MAX_NAMED)
    if averaged:
        what, why = format_count(len(averaged), "tensor"), f"over {len(sources)} sources: {over}"
        yield Note(Outcome.AVERAGED, what, why, len(averaged), size, asked=True)
    if mixed_names:
        why = f"their dtypes differ between the sources; that of {labels[-1]} counts"
        yield Note(Outcome.AVERAGED, join_names(mixed_names), why, len(mixed_names), asked=True)
    if kept_names:
        why = f"integers, complex numbers and buffers are not averaged; they are those of {labels[-1]}"
        yield Note(Outcome.KEPT, join_names(kept_names), why, len(kept_names), asked=True)
