"""Comparison of two checkpoints: their tensors are read block by block and compared bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import (
    EXTRA_SLOT,
    MASTER,
    WEIGHT,
    Kind,
    Manifest,
    StateKey,
    TensorEntry,
    count_tensors_by_role,
)
from ckpt_tools.core.value_refs import iter_ref_paths
from ckpt_tools.messages.progress import ProgressCallback
from ckpt_tools.state_tree.from_deepspeed import collect_user_entries
from ckpt_tools.stores.local.direct import bypass_cache_if_large
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.buffers import allocate_page_aligned
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.tensor_reader import TensorReader
from ckpt_tools.verification.deviation import Deviation, measure_deviation
from ckpt_tools.verification.report import Aspect, Difference, VerifyReport

BLOCK_BYTES = 4 << 20
"""The size of a block: so many bytes of each side are in memory at a time, for each worker."""


"""The slot of the user's own tensors."""


def map_named_tensors(manifest: Manifest) -> dict[StateKey, TensorEntry]:
    """Every tensor by every name it has. A tied weight has several; optimizer state has its owner's alone."""
    tensors_by_key = {_strip_client_state(key): entry for key, entry in manifest.tensors.items()}
    for alias, owner in manifest.aliases.items():
        tensors_by_key[StateKey(alias)] = manifest.tensors[StateKey(owner)]
    return tensors_by_key


def _strip_client_state(key: StateKey) -> StateKey:
    """The key without ``client_state.``: only DeepSpeed puts user entries into its client state."""
    return key._replace(fqn=key.fqn.removeprefix("client_state.")) if key.slot == EXTRA_SLOT else key


@dataclass(frozen=True, slots=True)
class ComparedCheckpoint:
    """One of two checkpoints: its tensors by every name, its store, and its name in messages.

    ``entry_paths`` says where among the entries the user's own tensors are; ``owners`` are the names of tied tensors
    that own their bytes, by the others.
    """

    name: str
    store: Store
    tensors: Mapping[StateKey, TensorEntry]
    entry_paths: Mapping[StateKey, str] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, store: Store, manifest: Manifest) -> ComparedCheckpoint:
        path_refs = iter_ref_paths(collect_user_entries(manifest)[0])
        by_key = {_strip_client_state(ref.key): place for place, ref in path_refs}
        return cls(name, store, map_named_tensors(manifest), by_key, manifest.aliases)

    def select_tensors(self, is_wanted: Callable[[str], bool]) -> ComparedCheckpoint:
        """The tensors whose names are wanted, with their optimizer state."""
        return replace(self, tensors={key: entry for key, entry in self.tensors.items() if is_wanted(key.fqn)})

    def rename_extras_like(self, reference: ComparedCheckpoint) -> ComparedCheckpoint:
        """If only ``reference`` has one of the user's own tensors in the same place, or at the end of a longer path,
        or of a shorter one, ours goes by that name: formats name such tensors their own way, or put them below entries
        of their own."""
        # One format has `app.rng.torch` where another has `rng.torch`. A tensor goes by the name of its counterpart if
        # that is at the same path of the entries, or if one name is the end of the other, and no second tensor claims
        # it.
        unmatched_extras = [key for key in reference.tensors if key.slot == EXTRA_SLOT and key not in self.tensors]
        keys_by_path = {reference.entry_paths[key]: key for key in unmatched_extras if key in reference.entry_paths}
        candidates: dict[StateKey, list[StateKey]] = {}
        for key in self.tensors:
            if key.slot == EXTRA_SLOT and key not in reference.tensors:
                key_at_path = keys_by_path.get(self.entry_paths.get(key, ""))
                candidates[key] = (
                    [key_at_path]
                    if key_at_path
                    else [each for each in unmatched_extras if _is_path_suffix(key.fqn, each.fqn)]
                )
        candidate_counts = Counter(each for ends in candidates.values() for each in ends)
        new_keys = {
            key: ends[0] for key, ends in candidates.items() if len(ends) == 1 and candidate_counts[ends[0]] == 1
        }
        return replace(self, tensors={new_keys.get(key, key): entry for key, entry in self.tensors.items()})

    def add_masters_like(self, reference: ComparedCheckpoint) -> ComparedCheckpoint:
        """If only ``reference`` has an fp32 master, our weight as it is stored takes its place."""
        masters = {
            key: replace(weight, kind=Kind.STATE).cast_to(DType.FLOAT32)
            for key in reference.tensors
            if key.slot == MASTER and key not in self.tensors
            for weight in [self.tensors.get(StateKey(key.fqn))]
            if weight is not None
        }
        return replace(self, tensors={**self.tensors, **masters})


def _is_path_suffix(a: str, b: str) -> bool:
    """True if the shorter path is the end of the longer one: ``rng.torch`` of ``app.rng.torch``."""
    shorter, longer = sorted((a, b), key=len)
    return longer.endswith((f".{shorter}", f" {shorter}"))


@dataclass(frozen=True, slots=True)
class _ComparedBlock:
    key: StateKey
    start: int
    stop: int


def compare_checkpoints(
    ours: ComparedCheckpoint, theirs: ComparedCheckpoint, *, num_workers: int, on_progress: ProgressCallback
) -> VerifyReport:
    """The differences between two checkpoints, bit for bit, in the order of ``ours``. A tensor of the same shape but
    another dtype is compared by its values too.

    Raises:
        CkptError: a side cannot be read.
    """
    our_tensors = _deduplicate_tied_tensors(ours, theirs)
    their_shapes = {key: theirs.tensors[key].shape for key in our_tensors if key in theirs.tensors}
    comparable_keys = [key for key, shape in their_shapes.items() if shape == our_tensors[key].shape]
    total, num_bytes_done = sum(ours.tensors[key].num_bytes for key in comparable_keys), 0
    deviations: dict[StateKey, Deviation] = {}
    for side in (ours, theirs):
        bypass_cache_if_large(side.store, total)
    readers = [(side, TensorReader(side.store, BLOCK_BYTES)) for side in (ours, theirs)]
    for block, deviation in ThreadRunner(num_workers).run(
        _make_block_comparer(readers), _iter_blocks(ours, theirs, comparable_keys)
    ):
        if deviation.num_differing:
            deviations[block.key] = deviations.get(block.key, Deviation()) + deviation
        num_bytes_done += (block.stop - block.start) * ours.tensors[block.key].dtype.item_bytes
        on_progress(num_bytes_done, total)
    for _, reader in readers:
        reader.check_remaining_records()
    first_keys: dict[StateKey, StateKey] = {}
    for key in our_tensors:
        first_keys.setdefault(key._replace(fqn=ours.owners.get(key.fqn, key.fqn)), key)
    unique_tensors = {key: our_tensors[key] for key in first_keys.values()}
    return VerifyReport(
        count_tensors_by_role(unique_tensors),
        sum(entry.num_bytes for entry in unique_tensors.values()),
        tuple(_find_differences(ours, theirs, our_tensors, deviations)),
        tied={key.fqn: ours.owners[key.fqn] for key in our_tensors if key not in unique_tensors},
    )


def _deduplicate_tied_tensors(ours: ComparedCheckpoint, theirs: ComparedCheckpoint) -> dict[StateKey, TensorEntry]:
    """Our tensors, a tied one by its first name alone where its other names are tied on the other side too."""
    # Two names with the same slot, our owner and their owner are one pair of tensors.
    first_keys: dict[tuple[str, str, str | None], StateKey] = {}
    for key in ours.tensors:
        their_owner = theirs.owners.get(key.fqn, key.fqn) if key in theirs.tensors else None
        first_keys.setdefault((key.slot, ours.owners.get(key.fqn, key.fqn), their_owner), key)
    return {key: ours.tensors[key] for key in first_keys.values()}


def _find_differences(
    ours: ComparedCheckpoint,
    theirs: ComparedCheckpoint,
    our_tensors: Mapping[StateKey, TensorEntry],
    deviations: Mapping[StateKey, Deviation],
) -> Iterator[Difference]:
    names = (ours.name, theirs.name)
    for key, entry in our_tensors.items():
        their_entry = theirs.tensors.get(key)
        if their_entry is None:
            if not _is_state_of_empty_weight(key, ours.tensors):
                yield Difference(key, Aspect.MISSING, f"only in {ours.name}")
        elif (difference := _find_pair_difference(key, entry, their_entry, deviations.get(key), names)) is not None:
            yield difference
    for key in theirs.tensors:
        if key not in ours.tensors and not _is_state_of_empty_weight(key, theirs.tensors):
            yield Difference(key, Aspect.UNEXPECTED, f"only in {theirs.name}")


def _is_state_of_empty_weight(key: StateKey, tensors: Mapping[StateKey, TensorEntry]) -> bool:
    """Some frameworks store optimizer state of parameters without elements, others do not."""
    weight = tensors.get(StateKey(key.fqn))
    return key.slot != WEIGHT and weight is not None and weight.numel == 0


def _find_pair_difference(
    key: StateKey, ours: TensorEntry, theirs: TensorEntry, deviation: Deviation | None, names: tuple[str, str]
) -> Difference | None:
    if ours.shape != theirs.shape:
        shape_text = f"shape {list(ours.shape)} in {names[0]}, {list(theirs.shape)} in {names[1]}"
        return Difference(key, Aspect.SHAPE, shape_text)
    if ours.dtype is not theirs.dtype:
        numeric_deviation = deviation or Deviation()
        dtype_text = f"{ours.dtype.value} in {names[0]}, {theirs.dtype.value} in {names[1]}"
        description = f"{dtype_text}; as numbers, {numeric_deviation.described(ours.numel)}"
        return Difference(
            key, Aspect.DTYPE, description, numeric_deviation, f"{ours.dtype.value} -> {theirs.dtype.value}"
        )
    if deviation is None:
        return None
    return Difference(key, Aspect.VALUES, deviation.described(ours.numel), deviation)


def _iter_blocks(
    ours: ComparedCheckpoint, theirs: ComparedCheckpoint, keys: list[StateKey]
) -> Iterator[_ComparedBlock]:
    for key in keys:
        numel = ours.tensors[key].numel
        block_numel = BLOCK_BYTES // max(side.tensors[key].dtype.item_bytes for side in (ours, theirs))
        for start in range(0, numel, block_numel):
            yield _ComparedBlock(key, start, min(start + block_numel, numel))


def _make_block_comparer(
    readers: list[tuple[ComparedCheckpoint, TensorReader]],
) -> Callable[[_ComparedBlock], tuple[_ComparedBlock, Deviation]]:
    def compare_block(block: _ComparedBlock) -> tuple[_ComparedBlock, Deviation]:
        entries = [side.tensors[block.key] for side, _ in readers]
        blocks = []
        for (_, tensor_reader), entry in zip(readers, entries, strict=True):
            buffer = allocate_page_aligned((block.stop - block.start) * entry.dtype.item_bytes)
            tensor_reader.read(entry, Box.whole(entry.shape), entry.shape, block.start, block.stop, buffer.data)
            blocks.append(buffer)
        return block, measure_deviation(blocks[0], blocks[1], entries[0].dtype, entries[1].dtype)

    return compare_block
