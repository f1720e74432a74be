"""Comparison of two checkpoints: their tensors are read block by block and compared bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey, TensorEntry, tensors_by_role
from ckpt_tools.core.progress import Progress
from ckpt_tools.core.value_refs import places
from ckpt_tools.formats.state_dict.from_deepspeed import user_entries
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.buffers import page_aligned
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.tensor_reader import TensorReader
from ckpt_tools.verification.deviation import Deviation, measure
from ckpt_tools.verification.report import Aspect, Difference, VerifyReport

BLOCK_BYTES = 4 << 20
"""The size of a block: so many bytes of each side are in memory at a time, for each worker."""


EXTRA = "extra"
"""The slot of the user's own tensors."""


def named_tensors(manifest: Manifest) -> dict[StateKey, TensorEntry]:
    """Every tensor by every name it has. A tied weight has several; optimizer state has its owner's alone."""
    found = {_neutral(key): entry for key, entry in manifest.tensors.items()}
    for alias, owner in manifest.aliases.items():
        found[StateKey(alias)] = manifest.tensors[StateKey(owner)]
    return found


def _neutral(key: StateKey) -> StateKey:
    """The key without ``client_state.``: only DeepSpeed puts user entries into its client state."""
    return key._replace(fqn=key.fqn.removeprefix("client_state.")) if key.slot == EXTRA else key


@dataclass(frozen=True, slots=True)
class Side:
    """One of two checkpoints: its tensors by every name, its store, and its name in messages.

    ``places`` says where among the entries the user's own tensors are; ``owners`` are the names of tied tensors that
    own their bytes, by the others.
    """

    name: str
    store: Store
    tensors: Mapping[StateKey, TensorEntry]
    places: Mapping[StateKey, str] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, store: Store, manifest: Manifest) -> Side:
        found = places(user_entries(manifest)[0])
        by_key = {_neutral(ref.key): place for place, ref in found}
        return cls(name, store, named_tensors(manifest), by_key, manifest.aliases)

    def selected(self, is_wanted: Callable[[str], bool]) -> Side:
        """The tensors whose names are wanted, with their optimizer state."""
        return replace(self, tensors={key: entry for key, entry in self.tensors.items() if is_wanted(key.fqn)})

    def with_extras_like(self, other: Side) -> Side:
        """If only ``other`` has one of the user's own tensors in the same place, or at the end of a longer path, or of
        a shorter one, ours goes by that name: formats name such tensors their own way, or put them below entries of
        their own."""
        free = [key for key in other.tensors if key.slot == EXTRA and key not in self.tensors]
        there = {other.places[key]: key for key in free if key in other.places}
        found: dict[StateKey, list[StateKey]] = {}
        for key in self.tensors:
            if key.slot == EXTRA and key not in other.tensors:
                same = there.get(self.places.get(key, ""))
                found[key] = [same] if same else [each for each in free if _is_end(key.fqn, each.fqn)]
        taken = Counter(each for ends in found.values() for each in ends)
        names = {key: ends[0] for key, ends in found.items() if len(ends) == 1 and taken[ends[0]] == 1}
        return replace(self, tensors={names.get(key, key): entry for key, entry in self.tensors.items()})

    def with_masters_like(self, other: Side) -> Side:
        """If only ``other`` has an fp32 master, our weight as it is stored takes its place."""
        masters = {
            key: replace(weight, kind=Kind.STATE).cast(DType.FLOAT32)
            for key in other.tensors
            if key.slot == MASTER and key not in self.tensors
            for weight in [self.tensors.get(StateKey(key.fqn))]
            if weight is not None
        }
        return replace(self, tensors={**self.tensors, **masters})


def _is_end(a: str, b: str) -> bool:
    """True if the shorter path is the end of the longer one: ``rng.torch`` of ``app.rng.torch``."""
    shorter, longer = sorted((a, b), key=len)
    return longer.endswith((f".{shorter}", f" {shorter}"))


@dataclass(frozen=True, slots=True)
class _Block:
    key: StateKey
    start: int
    stop: int


def compare(ours: Side, theirs: Side, *, num_workers: int, on_progress: Progress) -> VerifyReport:
    """The differences between two checkpoints, bit for bit, in the order of ``ours``. A tensor of the same shape but
    another dtype is compared by its values too.

    Raises:
        CkptError: a side cannot be read.
    """
    compared = _each_once(ours, theirs)
    both = {key: theirs.tensors[key].shape for key in compared if key in theirs.tensors}
    shared = [key for key, shape in both.items() if shape == compared[key].shape]
    total, done = sum(ours.tensors[key].num_bytes for key in shared), 0
    apart: dict[StateKey, Deviation] = {}
    readers = [(side, TensorReader(side.store, BLOCK_BYTES)) for side in (ours, theirs)]
    for block, deviation in ThreadRunner(num_workers).run(_compare_on(readers), _blocks(ours, theirs, shared)):
        if deviation.num_differing:
            apart[block.key] = apart.get(block.key, Deviation()) + deviation
        done += (block.stop - block.start) * ours.tensors[block.key].dtype.item_bytes
        on_progress(done, total)
    for _, reader in readers:
        reader.finish()
    firsts: dict[StateKey, StateKey] = {}
    for key in compared:
        firsts.setdefault(key._replace(fqn=ours.owners.get(key.fqn, key.fqn)), key)
    once = {key: compared[key] for key in firsts.values()}
    return VerifyReport(
        tensors_by_role(once),
        sum(entry.num_bytes for entry in once.values()),
        tuple(_differences(ours, theirs, compared, apart)),
        tied={key.fqn: ours.owners[key.fqn] for key in compared if key not in once},
    )


def _each_once(ours: Side, theirs: Side) -> dict[StateKey, TensorEntry]:
    """Our tensors, a tied one by its first name alone where its other names are tied on the other side too."""
    found: dict[tuple[str, str, str | None], StateKey] = {}
    for key in ours.tensors:
        other = theirs.owners.get(key.fqn, key.fqn) if key in theirs.tensors else None
        found.setdefault((key.slot, ours.owners.get(key.fqn, key.fqn), other), key)
    return {key: ours.tensors[key] for key in found.values()}


def _differences(
    ours: Side, theirs: Side, compared: Mapping[StateKey, TensorEntry], apart: Mapping[StateKey, Deviation]
) -> Iterator[Difference]:
    names = (ours.name, theirs.name)
    for key, entry in compared.items():
        other = theirs.tensors.get(key)
        if other is None:
            if not _is_state_of_nothing(key, ours.tensors):
                yield Difference(key, Aspect.MISSING, f"only in {ours.name}")
        elif (found := _pair_difference(key, entry, other, apart.get(key), names)) is not None:
            yield found
    for key in theirs.tensors:
        if key not in ours.tensors and not _is_state_of_nothing(key, theirs.tensors):
            yield Difference(key, Aspect.UNEXPECTED, f"only in {theirs.name}")


def _is_state_of_nothing(key: StateKey, tensors: Mapping[StateKey, TensorEntry]) -> bool:
    """Some frameworks store optimizer state of parameters without elements, others do not."""
    weight = tensors.get(StateKey(key.fqn))
    return key.slot != WEIGHT and weight is not None and weight.numel == 0


def _pair_difference(
    key: StateKey, ours: TensorEntry, theirs: TensorEntry, deviation: Deviation | None, names: tuple[str, str]
) -> Difference | None:
    if ours.shape != theirs.shape:
        shapes = f"shape {list(ours.shape)} in {names[0]}, {list(theirs.shape)} in {names[1]}"
        return Difference(key, Aspect.SHAPE, shapes)
    if ours.dtype is not theirs.dtype:
        found = deviation or Deviation()
        types = f"{ours.dtype.value} in {names[0]}, {theirs.dtype.value} in {names[1]}"
        what = f"{types}; as numbers, {found.described(ours.numel)}"
        return Difference(key, Aspect.DTYPE, what, found, f"{ours.dtype.value} -> {theirs.dtype.value}")
    if deviation is None:
        return None
    return Difference(key, Aspect.VALUES, deviation.described(ours.numel), deviation)


def _blocks(ours: Side, theirs: Side, keys: list[StateKey]) -> Iterator[_Block]:
    for key in keys:
        numel = ours.tensors[key].numel
        step = BLOCK_BYTES // max(side.tensors[key].dtype.item_bytes for side in (ours, theirs))
        for start in range(0, numel, step):
            yield _Block(key, start, min(start + step, numel))


def _compare_on(readers: list[tuple[Side, TensorReader]]) -> Callable[[_Block], tuple[_Block, Deviation]]:
    def deviation(block: _Block) -> tuple[_Block, Deviation]:
        entries = [side.tensors[block.key] for side, _ in readers]
        pair = []
        for (_, tensor_reader), entry in zip(readers, entries, strict=True):
            elements = page_aligned((block.stop - block.start) * entry.dtype.item_bytes)
            tensor_reader.read(entry, Box.whole(entry.shape), entry.shape, block.start, block.stop, elements.data)
            pair.append(elements)
        return block, measure(pair[0], pair[1], entries[0].dtype, entries[1].dtype)

    return deviation
