"""No item of a source is lost in silence: each is written, or a note names it, in every format that is written."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from ckpt_tools.conversion.report import select_written_tensors
from ckpt_tools.core.accounting import check_nothing_lost
from ckpt_tools.core.apply_options import apply_options
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome, merge_notes
from ckpt_tools.core.options import ConvertOptions, ReadOptions, WriteOptions
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.errors import CkptError, UnsupportedError
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.builtin import FORMATS
from ckpt_tools.planning.plan import make_plan
from ckpt_tools.state_tree.from_deepspeed import collect_user_entries
from ckpt_tools.stores.destination import StoreDestination
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.testing.manifests import StoredCheckpoint, stored_checkpoints
from ckpt_tools.transfer.execute import execute_plan
from ckpt_tools.transfer.runners.threads import ThreadRunner

MEMORY_BYTES = 64 << 20
HEADER = {"said": "x", "ss_network_alpha": "16"}
WRITERS = {form.name: form for form in FORMATS.values() if form.writes and not form.asks_adapter_config}


def converted(checkpoint: StoredCheckpoint, writer: Format, whole: bool) -> tuple[Manifest, tuple[Note, ...]]:
    """What is read of the output, and the notes, by the way of every conversion."""
    read = checkpoint.manifest
    made = apply_options(
        read,
        ConvertOptions(),
        writes_all_state=whole,
        holds_masters=writer.holds_masters,
        kept_entries=writer.kept_entries,
    ).manifest
    layout = writer.layout(made, WriteOptions())
    notes = merge_notes(made.notes + layout.notes)
    plan = make_plan(made, layout, memory_bytes=MEMORY_BYTES, num_workers=1)
    check_nothing_lost(read, made, select_written_tensors(made, plan.compute_figures()), notes, is_mapped=False)
    target = MemoryStore()
    execute_plan(
        plan, checkpoint.store, StoreDestination(target), runner=ThreadRunner(1), on_bytes=lambda num_bytes: None
    )
    return writer.read(Source.open(target), ReadOptions()), notes


def items(manifest: Manifest) -> set[str]:
    weights = {key.fqn for key in manifest.select_kinds(Kind.PARAMETER, Kind.BUFFER)}
    state = {str(key) for key in manifest.select_kinds(Kind.STATE)}
    entries, _ = collect_user_entries(manifest)
    return {*weights, *manifest.aliases, *state, *map(str, entries)}


def is_named(item: str, notes: Iterable[Note]) -> bool:
    slot = item.rpartition("(")[2].rstrip(")")
    lost = [note.what for note in notes if note.outcome in (Outcome.DROPPED, Outcome.DEFAULTED)]
    owner = item.partition(" (")[0]
    return any(
        what == item
        or what.startswith((f"{item}.", f"{slot} of "))
        or (what.startswith("optimizer state of ") and owner in what)
        for what in lost
    )


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_no_item_is_lost_in_silence(name, whole):
    writer = WRITERS[name]
    if whole and writer.is_weights_alone:
        return

    @settings(max_examples=6, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
    @given(stored_checkpoints(is_whole=True))
    def check(checkpoint: StoredCheckpoint) -> None:
        manifest = checkpoint.manifest
        source = replace(checkpoint, manifest=replace(manifest, extra={**manifest.extra, HEADER_ENTRY: HEADER}))
        try:
            found, notes = converted(source, writer, whole)
        except UnsupportedError:
            return
        lost = {item for item in items(source.manifest) - items(found) if not is_named(item, notes)}
        assert not lost, notes

    check()


@pytest.mark.parametrize("name", [WRITERS["dcp"].name, WRITERS["safetensors"].name])
def test_what_a_step_forgets_is_an_error_that_names_it(name):
    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    @given(stored_checkpoints())
    def check(checkpoint: StoredCheckpoint) -> None:
        read = replace(checkpoint.manifest, extra={HEADER_ENTRY: HEADER})
        # Of parameters without elements, state may be left out without a word.
        assume(all(entry.numel for entry in read.tensors.values()))
        first = next(iter(read.tensors))
        rest = {key: entry for key, entry in read.tensors.items() if key.fqn != first.fqn}
        made = replace(read, tensors=rest, aliases={}, groups=(), extra={})
        with pytest.raises(CkptError, match=f"a defect of ckpt-tools: .*{HEADER_ENTRY}"):
            check_nothing_lost(read, made, made.tensors, (), is_mapped=False)
        with pytest.raises(CkptError, match="a defect of ckpt-tools"):
            check_nothing_lost(*((made, made) if rest else (read, read)), [], (), is_mapped=False)
        check_nothing_lost(read, read, read.tensors, (), is_mapped=False)

    check()


def test_a_note_by_number_covers_that_number_of_tensors():
    """A note on a cast covers none: what it counts is written."""
    keys = [StateKey("a"), StateKey("b")]
    shard = Shard(Box((0,), (1,)), ByteRange("file", 0, 4))
    tables = [ShardTable.build((1,), DType.FLOAT32, [shard]) for _ in keys]
    entries = [TensorEntry((1,), DType.FLOAT32, Kind.PARAMETER, shards) for shards in tables]
    read = Manifest("npz", dict(zip(keys, entries, strict=True)))
    made = replace(read, tensors={})
    check_nothing_lost(read, made, [], [Note(Outcome.DROPPED, "2 tensors", "not chosen", 2)], is_mapped=False)
    for outcome, number in ((Outcome.DROPPED, 1), (Outcome.CAST, 2)):
        note = Note(outcome, f"{number} float32 tensors", "", number)
        with pytest.raises(CkptError, match=r"a defect of ckpt-tools: .*b"):
            check_nothing_lost(read, made, [], [note], is_mapped=False)
