"""The training state in DeepSpeed's terms, for any stage and world size: groups, flavour, and what is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import ABSENT, Note, Outcome
from ckpt_tools.core.option_names import option
from ckpt_tools.core.wording import count, listed
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.optimizer_slots import OptimizerState, Slot, noted
from ckpt_tools.formats.state_dict.frozen_or_buffer import is_deepspeed, untrained

FLAVOURS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
"""What DeepSpeed trains in."""

_ADAM_OPTIONS = {"lr", "betas", "eps", "weight_decay"}


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are optimized together, in order: their elements, hyperparameters, and state.

    ``scalars`` are the 0-d slots, each by the tensor that stands for the whole group. ``notes`` are about the slots.
    """

    params: tuple[str, ...]
    numels: tuple[int, ...]
    options: Mapping[str, Any]
    masters: Slot
    slots: tuple[Slot, ...]
    scalars: Mapping[str, StateKey]
    notes: tuple[Note, ...] = ()

    def picked(self, positions: Sequence[int]) -> Group:
        """The group with these of its parameters, in this order."""
        return Group(
            tuple(self.params[i] for i in positions),
            tuple(self.numels[i] for i in positions),
            self.options,
            self.masters.picked(positions),
            tuple(slot.picked(positions) for slot in self.slots),
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
    groups: tuple[Group, ...]
    frozen: Mapping[str, TensorEntry]
    buffers: Mapping[str, TensorEntry]
    guessed: tuple[str, ...]
    of_all_groups: tuple[Note, ...]

    @property
    def notes(self) -> tuple[Note, ...]:
        """Those on all groups, then those on the optimizer state of each."""
        return (*self.of_all_groups, *(note for group in self.groups for note in group.notes))

    def weight(self, name: str) -> TensorEntry:
        return self.manifest.tensors[StateKey(name)]

    def master(self, name: str) -> StateKey:
        """What the master of a trained parameter is read from."""
        return _master(self.manifest, name)

    @classmethod
    def of(cls, manifest: Manifest) -> TrainingState:
        """Raises UnsupportedError where the weights are of a type that DeepSpeed does not train in, or of several;
        FormatError where a group names what is not there."""
        return _Reading(manifest, OptimizerState.of(manifest)).state()


@dataclass(slots=True)
class _Reading:
    """One manifest on its way; notes are taken as it goes."""

    manifest: Manifest
    optimizer: OptimizerState
    notes: list[Note] = field(default_factory=list)

    def state(self) -> TrainingState:
        groups = [(group, self._members(group)) for group in self._source_groups()]
        trained = _distinct(name for _, members in groups for name in members)
        empty = {name: entry for name in trained if not (entry := self._weight(name)).numel}
        self._note_lost(trained, empty)
        dtype = self._flavour([name for name in trained if name not in empty])
        found = [self._group(number, group, members) for number, (group, members) in enumerate(groups)]
        self._note_masters(name for group in found if group for name in group.params)
        rest = untrained(self.manifest, trained)
        return TrainingState(
            self.manifest,
            dtype,
            tuple(group for group in found if group is not None),
            {**empty, **rest.frozen},
            rest.buffers,
            rest.guessed,
            tuple(self.notes),
        )

    def _weight(self, name: str) -> TensorEntry:
        return self.manifest.tensors[StateKey(name)]

    def _source_groups(self) -> Sequence[ParamGroup]:
        """The source's own groups; without any, one of all weights of the main type, which loads as weights alone."""
        if self.manifest.groups:
            return self.manifest.groups
        why = f"{ABSENT}, so all are in one group without hyperparameters; load it with load_optimizer_states=False"
        self.notes.append(Note(Outcome.DEFAULTED, "parameter groups", why))
        weights = {key.fqn: e for key, e in self.manifest.tensors.items() if key.slot == WEIGHT}
        weights = {name: entry for name, entry in weights.items() if entry.kind is Kind.PARAMETER and entry.numel}
        main = _main_type(weights.values())
        return [ParamGroup(tuple(name for name, entry in weights.items() if entry.dtype is main), {})]

    def _members(self, group: ParamGroup) -> tuple[str, ...]:
        names = tuple(self.manifest.aliases.get(name, name) for name in group.params)
        for name in names:
            if StateKey(name) not in self.manifest.tensors:
                raise IncompleteError("a parameter group names it, but there is no such weight", key=name)
        return names

    def _flavour(self, trained: Sequence[str]) -> DType:
        found = {self._weight(name).dtype: name for name in trained}
        if not found:
            raise UnsupportedError("there is no trainable parameter, and DeepSpeed does not start without one")
        if len(found) > 1 or not found.keys() <= set(FLAVOURS):
            kinds = ", ".join(f"{dtype.value} ({name})" for dtype, name in found.items())
            raise UnsupportedError(
                f"DeepSpeed trains all parameters in one of float32, bfloat16 and float16, and these are {kinds}; "
                f"choose one with {option('dtype')}"
            )
        return next(iter(found))

    def _group(self, number: int, group: ParamGroup, members: Sequence[str]) -> Group | None:
        """None for a group without elements."""
        params = tuple(name for name in members if self._weight(name).numel)
        if not params:
            why = "DeepSpeed does not support a parameter group without elements"
            self.notes.append(Note(Outcome.DROPPED, f"hyperparameters of parameter group {number}", why))
            return None
        state = self.optimizer.group(number, params)
        return Group(
            params,
            tuple(self._weight(name).numel for name in params),
            self._options(number, group.options),
            Slot(MASTER, DType.FLOAT32, tuple(_master(self.manifest, name) for name in params)),
            state.cut,
            state.scalars,
            state.notes,
        )

    def _options(self, number: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """DeepSpeed's own Adams ask their groups for ``bias_correction`` (KeyError at the first step, ops/adam), which
        torch's do not have because they always correct."""
        if is_deepspeed(self.manifest) or not options.keys() >= _ADAM_OPTIONS or "bias_correction" in options:
            return options
        why = "DeepSpeed's Adam requires this setting; torch's Adam always corrects the bias and does not store it"
        self.notes.append(Note(Outcome.DEFAULTED, f"bias_correction = True in parameter group {number}", why))
        return {**options, "bias_correction": True}

    def _note_lost(self, trained: Mapping[str, None], empty: Mapping[str, TensorEntry]) -> None:
        """State of parameters that DeepSpeed does not optimize."""
        why = {"they are in no parameter group": [name for name in self.optimizer.slots if name not in trained]}
        why["they have no elements"] = [name for name in empty if name in self.optimizer.slots]
        for reason, names in why.items():
            if names:
                lost = self.optimizer.entries(names)
                self.notes.append(noted(Outcome.DROPPED, f"optimizer state of {listed(names)}", reason, lost))

    def _note_masters(self, trained: Iterable[str]) -> None:
        """Where a master comes from a weight that is stored in fewer bits."""
        keys = [_master(self.manifest, name) for name in trained]
        narrow = [entry for key in keys if (entry := self.manifest.tensors[key]).shards.dtype.item_bytes < 4]
        if narrow:
            why = "none are written from the source, so they are made from the weights"
            self.notes.append(
                noted(Outcome.DEFAULTED, f"fp32 masters of {count(len(narrow), 'parameter')}", why, narrow)
            )


def _master(manifest: Manifest, name: str) -> StateKey:
    key = StateKey(name, MASTER)
    return key if key in manifest.tensors else StateKey(name)


def _main_type(entries: Iterable[TensorEntry]) -> DType | None:
    """The element type of most elements."""
    numels: Counter[DType] = Counter()
    for entry in entries:
        numels[entry.dtype] += entry.numel
    return max(numels, key=lambda dtype: numels[dtype], default=None)


def _distinct(names: Iterable[str]) -> dict[str, None]:
    """``names`` in order. Raises MalformedError where one comes twice."""
    found: dict[str, None] = {}
    for name in names:
        if name in found:
            raise MalformedError("it is in two parameter groups, or twice in one", key=name)
        found[name] = None
    return found
