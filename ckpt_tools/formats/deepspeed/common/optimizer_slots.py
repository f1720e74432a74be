"""Optimizer state of a group: which slots are cut as the parameters are, which are one for all, and which fit nowhere.

DeepSpeed's optimizers see one flat fp32 parameter a group. So a slot has to have the shape of its parameter, to be cut
with it, or no dims, and then the group has one. A group of which some slot is neither starts afresh: an optimizer that
finds a part of its state takes it for the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import ABSENT, Note, Outcome
from ckpt_tools.core.wording import count, listed


@dataclass(frozen=True, slots=True)
class Slot:
    """State that is cut as the parameters are: each one's tensor, or None where it has none, and zeros are meant."""

    name: str
    dtype: DType
    keys: tuple[StateKey | None, ...]

    def picked(self, positions: Sequence[int]) -> Slot:
        return Slot(self.name, self.dtype, tuple(self.keys[i] for i in positions))


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of one group: ``cut`` slots, and ``scalars`` by the tensor that stands for all parameters."""

    scalars: Mapping[str, StateKey]
    cut: tuple[Slot, ...]
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Everything that the optimizer keeps; ``slots`` has the names of each parameter's."""

    manifest: Manifest
    slots: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, manifest: Manifest) -> OptimizerState:
        slots: defaultdict[str, list[str]] = defaultdict(list)
        for key, entry in manifest.tensors.items():
            if entry.kind is Kind.STATE and key.slot not in (WEIGHT, MASTER):
                slots[key.fqn].append(key.slot)
        return cls(manifest, slots)

    def entries(self, names: Iterable[str]) -> list[TensorEntry]:
        """All state of these parameters."""
        return [self.manifest.tensors[StateKey(n, slot)] for n in names for slot in self.slots.get(n, ())]

    def group(self, number: int, params: Sequence[str]) -> GroupState:
        """The state of the group with this number."""
        names = list(dict.fromkeys(slot for param in params for slot in self.slots.get(param, ())))
        columns = [_Column.of(self.manifest, name, params) for name in names]
        foreign = [column.name for column in columns if not column.is_scalar and not column.is_cut]
        if not columns or foreign:
            return GroupState({}, (), tuple(self._absent(number, params, foreign)))
        cut = [column for column in columns if not column.is_scalar]
        scalars = [column for column in columns if column.is_scalar]
        notes = [note for column in cut for note in column.notes()]
        notes += [note for column in scalars for note in column.shared_notes(number)]
        return GroupState({c.name: c.first for c in scalars}, tuple(c.slot for c in cut), tuple(notes))

    def _absent(self, number: int, params: Sequence[str], foreign: Sequence[str]) -> list[Note]:
        what = f"optimizer state of parameter group {number}"
        if foreign:
            why = f"{', '.join(foreign)} cannot be partitioned like the parameters, so DeepSpeed resets this group"
            return [noted(Outcome.DROPPED, what, why, self.entries(params))]
        if self.manifest.groups:
            return [noted(Outcome.MISSING, what, f"{ABSENT}, so DeepSpeed initializes it at the first step")]
        return []


@dataclass(frozen=True, slots=True)
class _Column:
    """One slot of a group's parameters; ``states`` are None for those that have none."""

    name: str
    params: tuple[str, ...]
    weights: tuple[TensorEntry, ...]
    states: tuple[TensorEntry | None, ...]

    @classmethod
    def of(cls, manifest: Manifest, name: str, params: Sequence[str]) -> _Column:
        weights = tuple(manifest.tensors[StateKey(param)] for param in params)
        return cls(name, tuple(params), weights, tuple(manifest.tensors.get(StateKey(p, name)) for p in params))

    @property
    def present(self) -> list[tuple[TensorEntry, TensorEntry]]:
        """Weight and state of those that have it."""
        pairs = zip(self.weights, self.states, strict=True)
        return [(weight, state) for weight, state in pairs if state is not None]

    @property
    def keys(self) -> tuple[StateKey | None, ...]:
        pairs = zip(self.params, self.states, strict=True)
        return tuple(None if state is None else StateKey(param, self.name) for param, state in pairs)

    @property
    def first(self) -> StateKey:
        return next(key for key in self.keys if key is not None)

    @property
    def is_scalar(self) -> bool:
        """0-d where the parameter is not, or ``step``."""
        return all(s.shape == () and (w.shape != () or self.name == "step") for w, s in self.present)

    @property
    def is_cut(self) -> bool:
        """Of its parameter's shape everywhere, and of one type, or of types that become fp32."""
        dtypes = {state.dtype for _, state in self.present}
        return all(w.shape == s.shape for w, s in self.present) and (len(dtypes) == 1 or dtypes <= CASTABLE)

    @property
    def slot(self) -> Slot:
        dtype = self.present[0][1].dtype
        return Slot(self.name, DType.FLOAT32 if dtype in CASTABLE else dtype, self.keys)

    def notes(self) -> list[Note]:
        """Notes on what is set to zero or cast."""
        missing = [param for param, state in zip(self.params, self.states, strict=True) if state is None]
        fresh = [weight for weight, state in zip(self.weights, self.states, strict=True) if state is None]
        cast = [state for _, state in self.present if state.dtype is not self.slot.dtype]
        why = (
            "the source has none, as for parameters that never had a gradient; set to zero, at the step of their group"
        )
        notes = [noted(Outcome.DEFAULTED, f"{self.name} of {listed(missing)}", why, fresh)] if missing else []
        for dtype in dict.fromkeys(state.dtype for state in cast):
            found = [state for state in cast if state.dtype is dtype]
            what, why = f"{self.name} of {count(len(found), 'tensor')}", f"{dtype.value} to {self.slot.dtype.value}"
            notes.append(noted(Outcome.CAST, what, why, found))
        return notes

    def shared_notes(self, number: int) -> list[Note]:
        """What is not known: whether the parameters of a group, each with its own, have the same."""
        places = {(*map(str, state.shards.files), *state.shards.byte_starts.tolist()) for _, state in self.present}
        if len(places) < 2:
            return []
        why = f"DeepSpeed keeps one value for a group; the value of {self.first.fqn} is used"
        return [Note(Outcome.DEFAULTED, f"{self.name} of parameter group {number}", why, len(places))]


def noted(outcome: Outcome, what: str, why: str, entries: Iterable[TensorEntry] = ()) -> Note:
    """A note about these tensors."""
    found = list(entries)
    return Note(outcome, what, why, max(1, len(found)), sum(entry.num_bytes for entry in found))
