"""The training state in DeepSpeed's terms, for any stage and world size: groups, dtype, and notes on lost state.

DeepSpeed's optimizers see one flat fp32 parameter a group. So a slot must have the shape of its parameter, to be cut
with it, or no dims, and then the group has one value. If a slot has another shape, the group is reset: an optimizer
that finds a part of its state takes it for all of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import ABSENT_REASON, Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.values import OrderedDict, Size
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.state_tree.frozen_or_buffer import classify_untrained, is_from_deepspeed


@dataclass(frozen=True, slots=True)
class PartitionedSlot:
    """A slot of a group that is cut as its parameters are. ``keys`` has the tensor of each parameter; None for one
    without state, which stands for zeros."""

    name: str
    dtype: DType
    keys: tuple[StateKey | None, ...]

    def select_positions(self, positions: Sequence[int]) -> PartitionedSlot:
        return PartitionedSlot(self.name, self.dtype, tuple(self.keys[i] for i in positions))


@dataclass(frozen=True, slots=True)
class _SlotColumn:
    """One slot of a group: for each parameter its name, its weight and its state, which may be None."""

    name: str
    rows: tuple[tuple[str, TensorEntry, TensorEntry | None], ...]

    @classmethod
    def of(cls, manifest: Manifest, name: str, params: Sequence[str]) -> _SlotColumn:
        tensors = manifest.tensors
        return cls(name, tuple((fqn, tensors[StateKey(fqn)], tensors.get(StateKey(fqn, name))) for fqn in params))

    @property
    def present_pairs(self) -> list[tuple[TensorEntry, TensorEntry]]:
        return [(weight, state) for _, weight, state in self.rows if state is not None]

    @property
    def keys(self) -> tuple[StateKey | None, ...]:
        return tuple(None if state is None else StateKey(param, self.name) for param, _, state in self.rows)

    @property
    def first_key(self) -> StateKey:
        return next(key for key in self.keys if key is not None)

    @property
    def is_scalar(self) -> bool:
        """Whether all its state is 0-d. That of a 0-d parameter counts as its element, except in the slot ``step``."""
        return all(s.shape == () and (w.shape != () or self.name == "step") for w, s in self.present_pairs)

    @property
    def is_partitionable(self) -> bool:
        """Whether it has its parameter's shape everywhere, and one type, or types that become fp32."""
        dtypes = {state.dtype for _, state in self.present_pairs}
        return all(w.shape == s.shape for w, s in self.present_pairs) and (len(dtypes) == 1 or dtypes <= CASTABLE)

    @property
    def partitioned_slot(self) -> PartitionedSlot:
        dtype = self.present_pairs[0][1].dtype
        return PartitionedSlot(self.name, DType.FLOAT32 if dtype in CASTABLE else dtype, self.keys)

    def make_notes(self, group_number: int) -> Iterator[Note]:
        """Notes on state that is set to zero or cast, or that parameters have each and the group only once."""
        if self.is_scalar:
            tables = [state.shards for _, state in self.present_pairs]
            places = {(*map(str, table.files), *table.byte_starts.tolist()) for table in tables}
            if len(places) > 1:
                why = f"DeepSpeed keeps one value for a group; the value of {self.first_key.fqn} is used"
                yield Note(Outcome.DEFAULTED, f"{self.name} of parameter group {group_number}", why, len(places))
            return
        weights_without_state = {param: weight for param, weight, state in self.rows if state is None}
        if weights_without_state:
            absence = "the source has none, as for parameters that never had a gradient"
            why = f"{absence}; set to zero, at the step of their group"
            what = f"{self.name} of {join_names([*weights_without_state])}"
            yield make_note(Outcome.DEFAULTED, what, why, weights_without_state.values())
        dtype = self.partitioned_slot.dtype
        for other_dtype in dict.fromkeys(state.dtype for _, state in self.present_pairs if state.dtype is not dtype):
            cast_entries = [state for _, state in self.present_pairs if state.dtype is other_dtype]
            what = f"{self.name} of {format_count(len(cast_entries), 'tensor')}"
            yield make_note(Outcome.CAST, what, f"{other_dtype.value} to {dtype.value}", cast_entries)


def make_note(outcome: Outcome, what: str, why: str, entries: Iterable[TensorEntry] = ()) -> Note:
    counted_entries = list(entries)
    return Note(outcome, what, why, max(1, len(counted_entries)), sum(entry.num_bytes for entry in counted_entries))


TRAINING_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
"""The types in which DeepSpeed trains."""

_ADAM_OPTIONS = {"lr", "betas", "eps", "weight_decay"}
_SLOTS_BESIDES_MOMENTS = {MASTER, "step", "max_exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """Parameters that are optimized together, in order: their numbers of elements, hyperparameters, and state.

    ``scalars`` are the 0-d slots by name, each the tensor of one parameter, which stands for the whole group. ``notes``
    are about the slots.
    """

    params: tuple[str, ...]
    numels: tuple[int, ...]
    options: Mapping[str, Any]
    masters: PartitionedSlot
    slots: tuple[PartitionedSlot, ...]
    scalars: Mapping[str, StateKey]
    notes: tuple[Note, ...] = ()

    def select_positions(self, positions: Sequence[int]) -> TrainingGroup:
        return TrainingGroup(
            tuple(self.params[i] for i in positions),
            tuple(self.numels[i] for i in positions),
            self.options,
            self.masters.select_positions(positions),
            tuple(slot.select_positions(positions) for slot in self.slots),
            self.scalars,
            self.notes,
        )


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A manifest as DeepSpeed holds it.

    ``dtype`` is what the model computes in. ``frozen`` are the parameters that no optimizer wrapper owns: those that
    are not trained, and those without elements (deepspeed/runtime/utils.py ``is_optimized_parameter``).
    """

    manifest: Manifest
    dtype: DType
    groups: tuple[TrainingGroup, ...]
    frozen: Mapping[str, TensorEntry]
    buffers: Mapping[str, TensorEntry]
    guessed_names: tuple[str, ...]
    general_notes: tuple[Note, ...]

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes on all groups, then those on the optimizer state of each."""
        return (*self.general_notes, *(note for group in self.groups for note in group.notes))

    @property
    def ties(self) -> dict[str, str]:
        """Tied parameters, by alias; not tied buffers."""
        return {alias: owner for alias, owner in self.manifest.aliases.items() if owner not in self.buffers}

    def get_weight(self, name: str) -> TensorEntry:
        return self.manifest.tensors[StateKey(name)]

    def make_param_shapes(self, names: Iterable[str]) -> OrderedDict:
        return OrderedDict({name: Size(self.get_weight(name).shape) for name in names})

    def find_master_key(self, name: str) -> StateKey:
        """The tensor from which the master of a trained parameter is read."""
        return _find_master_key(self.manifest, name)

    @classmethod
    def of(cls, manifest: Manifest) -> TrainingState:
        """Raises UnsupportedError if the weights are of a type that DeepSpeed does not train in, or of several;
        FormatError where a group names what is not there."""
        slot_names: defaultdict[str, list[str]] = defaultdict(list)
        for key, entry in manifest.tensors.items():
            if entry.kind is Kind.STATE and key.slot not in (WEIGHT, MASTER):
                slot_names[key.fqn].append(key.slot)
        return _TrainingStateBuilder(manifest, slot_names).build_state()


@dataclass(slots=True)
class _TrainingStateBuilder:
    """Collects the training state of a manifest. ``slot_names`` has the slots of each parameter."""

    manifest: Manifest
    slot_names: Mapping[str, Sequence[str]]
    notes: list[Note] = field(default_factory=list)

    def build_state(self) -> TrainingState:
        # The order is that of the notes: each step may add some.
        source_groups = [(group, self._list_members(group)) for group in self._list_source_groups()]
        trained = _require_distinct(name for _, members in source_groups for name in members)
        empty = {name: entry for name in trained if not (entry := self._get_weight(name)).numel}
        self._note_dropped_state(trained, empty)
        dtype = self._find_training_dtype([name for name in trained if name not in empty])
        training_groups = [self._build_group(i, group, members) for i, (group, members) in enumerate(source_groups)]
        self._note_made_masters(name for group in training_groups if group for name in group.params)
        untrained_tensors = classify_untrained(self.manifest, trained)
        return TrainingState(
            self.manifest,
            dtype,
            tuple(group for group in training_groups if group is not None),
            {**empty, **untrained_tensors.frozen},
            untrained_tensors.buffers,
            untrained_tensors.guessed_names,
            tuple(self.notes),
        )

    def _get_weight(self, name: str) -> TensorEntry:
        return self.manifest.tensors[StateKey(name)]

    def _list_source_groups(self) -> Sequence[ParamGroup]:
        """The source's groups. If it has none, one group of all weights of the dtype that has most elements, which
        loads as weights alone."""
        if self.manifest.groups:
            return self.manifest.groups
        effect = "all are in one group without hyperparameters; load it with load_optimizer_states=False"
        self.notes.append(Note(Outcome.DEFAULTED, "parameter groups", f"{ABSENT_REASON}, so {effect}"))
        weights = {key.fqn: e for key, e in self.manifest.tensors.items() if key.slot == WEIGHT}
        weights = {name: entry for name, entry in weights.items() if entry.kind is Kind.PARAMETER and entry.numel}
        numels: Counter[DType] = Counter()
        for entry in weights.values():
            numels[entry.dtype] += entry.numel
        main_dtype = max(numels, key=lambda dtype: numels[dtype], default=None)
        return [ParamGroup(tuple(name for name, entry in weights.items() if entry.dtype is main_dtype), {})]

    def _list_members(self, group: ParamGroup) -> tuple[str, ...]:
        names = tuple(self.manifest.aliases.get(name, name) for name in group.params)
        for name in names:
            if StateKey(name) not in self.manifest.tensors:
                advice = f"{format_option('strip', 'auto')} takes wrappers off names"
                raise IncompleteError(f"a parameter group names it, but there is no such weight; {advice}", key=name)
        return names

    def _find_training_dtype(self, trained: Sequence[str]) -> DType:
        name_by_dtype = {self._get_weight(name).dtype: name for name in trained}
        if not name_by_dtype:
            raise UnsupportedError("there is no trainable parameter, and DeepSpeed does not start without one")
        if len(name_by_dtype) > 1 or not name_by_dtype.keys() <= set(TRAINING_DTYPES):
            kinds = ", ".join(f"{dtype.value} ({name})" for dtype, name in name_by_dtype.items())
            if name_by_dtype.keys() <= CASTABLE:
                advice = f"choose one with {format_option('dtype')}"
            else:
                advice = f"dequantize the weights with {format_option('dequantize', True)}"
            raise UnsupportedError(
                f"DeepSpeed trains all parameters in one of float32, bfloat16 and float16, and these are {kinds}; "
                f"{advice}"
            )
        return next(iter(name_by_dtype))

    def _build_group(self, number: int, group: ParamGroup, members: Sequence[str]) -> TrainingGroup | None:
        """The training group of a group of the source; None if it has no elements."""
        params = tuple(name for name in members if self._get_weight(name).numel)
        if not params:
            why = "DeepSpeed does not support a parameter group without elements"
            self.notes.append(Note(Outcome.DROPPED, f"hyperparameters of parameter group {number}", why))
            return None
        scalars, slots, notes = self._collect_optimizer_state(number, params)
        return TrainingGroup(
            params,
            tuple(self._get_weight(name).numel for name in params),
            self._complete_options(number, group.options, params),
            PartitionedSlot(MASTER, DType.FLOAT32, tuple(_find_master_key(self.manifest, name) for name in params)),
            slots,
            scalars,
            notes,
        )

    def _collect_optimizer_state(
        self, number: int, params: Sequence[str]
    ) -> tuple[Mapping[str, StateKey], tuple[PartitionedSlot, ...], tuple[Note, ...]]:
        """A group's 0-d slots with the tensor that stands for all parameters, its other slots, and notes on them."""
        names = dict.fromkeys(slot for param in params for slot in self.slot_names.get(param, ()))
        columns = [_SlotColumn.of(self.manifest, name, params) for name in names]
        what = f"optimizer state of parameter group {number}"
        misfits = [column.name for column in columns if not column.is_scalar and not column.is_partitionable]
        if misfits:
            why = f"{', '.join(misfits)} cannot be partitioned like the parameters, so DeepSpeed resets this group"
            return {}, (), (make_note(Outcome.DROPPED, what, why, self._list_states(params)),)
        if not columns and self.manifest.groups:
            why = f"{ABSENT_REASON}, so DeepSpeed initializes it at the first step"
            return {}, (), (make_note(Outcome.MISSING, what, why),)
        columns.sort(key=lambda column: column.is_scalar)
        return (
            {column.name: column.first_key for column in columns if column.is_scalar},
            tuple(column.partitioned_slot for column in columns if not column.is_scalar),
            tuple(note for column in columns for note in column.make_notes(number)),
        )

    def _list_states(self, names: Iterable[str]) -> list[TensorEntry]:
        return [self.manifest.tensors[StateKey(n, slot)] for n in names for slot in self.slot_names.get(n, ())]

    def _complete_options(self, number: int, options: Mapping[str, Any], params: Sequence[str]) -> Mapping[str, Any]:
        """DeepSpeed's own Adams ask their groups for ``bias_correction`` (KeyError at the first step, ops/adam), which
        torch's do not have because they always correct. Other optimizers have options of the same names."""
        slots = {slot for name in params for slot in self.slot_names.get(name, ())} - _SLOTS_BESIDES_MOMENTS
        is_adam = options.keys() >= _ADAM_OPTIONS and (not slots or slots == {"exp_avg", "exp_avg_sq"})
        if is_from_deepspeed(self.manifest) or not is_adam or "bias_correction" in options:
            return options
        why = "DeepSpeed's Adam requires this setting; torch's Adam always corrects the bias and does not store it"
        self.notes.append(Note(Outcome.DEFAULTED, f"bias_correction = True in parameter group {number}", why))
        return {**options, "bias_correction": True}

    def _note_dropped_state(self, trained: Mapping[str, None], empty: Mapping[str, TensorEntry]) -> None:
        """Notes the state of parameters that DeepSpeed does not optimize."""
        names_by_reason = {"they are in no parameter group": [name for name in self.slot_names if name not in trained]}
        names_by_reason["they have no elements"] = [name for name in empty if name in self.slot_names]
        for reason, names in names_by_reason.items():
            if names:
                what = f"optimizer state of {join_names(names)}"
                self.notes.append(make_note(Outcome.DROPPED, what, reason, self._list_states(names)))

    def _note_made_masters(self, trained: Iterable[str]) -> None:
        """Notes masters that are made from a weight with fewer bits."""
        keys = [_find_master_key(self.manifest, name) for name in trained]
        narrow_entries = [entry for key in keys if (entry := self.manifest.tensors[key]).shards.dtype.item_bytes < 4]
        if narrow_entries:
            what = f"fp32 masters of {format_count(len(narrow_entries), 'parameter')}"
            why = "none are written from the source, so they are made from the weights"
            self.notes.append(make_note(Outcome.DEFAULTED, what, why, narrow_entries))


def _find_master_key(manifest: Manifest, name: str) -> StateKey:
    key = StateKey(name, MASTER)
    return key if key in manifest.tensors else StateKey(name)


def _require_distinct(names: Iterable[str]) -> dict[str, None]:
    """``names`` in order. Raises MalformedError if one comes twice."""
    distinct_names: dict[str, None] = {}
    for name in names:
        if name in distinct_names:
            raise MalformedError("it is in two parameter groups, or twice in one", key=name)
        distinct_names[name] = None
    return distinct_names
