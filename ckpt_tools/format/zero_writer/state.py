"""The training state in DeepSpeed's terms, for any stage and world size: groups, slots, flavour, and what is lost.

DeepSpeed optimizes flat fp32 vectors. So a group has one value of each 0-d slot (``step``), and every other slot has to
have the shape of its parameter. A group of which some slot cannot be cut like that starts afresh: an optimizer that
finds a part of its state takes it for the whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.casts import CASTABLE
from ckpt_tools.dtypes import DType
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.format.zero_writer.kinds import is_deepspeed, untrained
from ckpt_tools.ledger import Fate, Note
from ckpt_tools.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry

FLAVOURS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
"""What DeepSpeed trains in."""

_ADAM_OPTIONS = {"lr", "betas", "eps", "weight_decay"}

MAX_NAMES = 4
"""Names that a note lists."""


@dataclass(frozen=True, slots=True)
class Slot:
    """State that is cut as the parameters are: each one's tensor, or None where it has none, and zeros are meant."""

    name: str
    dtype: DType
    keys: tuple[StateKey | None, ...]

    def picked(self, positions: Sequence[int]) -> Slot:
        return Slot(self.name, self.dtype, tuple(self.keys[i] for i in positions))


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are optimized together, in order: their elements, hyperparameters, and state.

    ``scalars`` are the 0-d slots, each by the tensor that stands for the whole group.
    """

    params: tuple[str, ...]
    numels: tuple[int, ...]
    options: Mapping[str, Any]
    masters: Slot
    slots: tuple[Slot, ...]
    scalars: Mapping[str, StateKey]

    def picked(self, positions: Sequence[int]) -> Group:
        """The group with these of its parameters, in this order."""
        return Group(
            tuple(self.params[i] for i in positions),
            tuple(self.numels[i] for i in positions),
            self.options,
            self.masters.picked(positions),
            tuple(slot.picked(positions) for slot in self.slots),
            self.scalars,
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
    notes: tuple[Note, ...]

    def weight(self, name: str) -> TensorEntry:
        return self.manifest.tensors[StateKey(name)]

    @classmethod
    def of(cls, manifest: Manifest) -> TrainingState:
        """Raises UnsupportedError where the weights are of a type that DeepSpeed does not train in, or of several;
        FormatError where a group names what is not there."""
        return _Reading(manifest).state()


@dataclass(slots=True)
class _Reading:
    """One manifest on its way; ``slots_of`` has the names of a parameter's optimizer state."""

    manifest: Manifest
    notes: list[Note] = field(default_factory=list)
    slots_of: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def state(self) -> TrainingState:
        for key, entry in self.manifest.tensors.items():
            if entry.kind is Kind.STATE and key.slot not in (WEIGHT, MASTER):
                self.slots_of[key.fqn].append(key.slot)
        named = [(group, self._members(group)) for group in self._source_groups()]
        trained = [name for _, members in named for name in members]
        _refuse_twice(trained)
        dtype = self._flavour([name for name in trained if self._weight(name).numel])
        groups = [self._group(number, group, members) for number, (group, members) in enumerate(named)]
        self._note_masters(groups)
        self._note_strays(trained)
        rest = untrained(self.manifest, dict.fromkeys(trained))
        empty = {name: entry for name in trained if not (entry := self._weight(name)).numel}
        return TrainingState(
            self.manifest,
            dtype,
            tuple(group for group in groups if group is not None),
            {**empty, **rest.frozen},
            rest.buffers,
            rest.guessed,
            tuple(self.notes),
        )

    def _note(self, fate: Fate, what: str, why: str, entries: Iterable[TensorEntry] = ()) -> None:
        found = list(entries)
        self.notes.append(Note(fate, what, why, max(1, len(found)), sum(entry.num_bytes for entry in found)))

    def _weight(self, name: str) -> TensorEntry:
        return self.manifest.tensors[StateKey(name)]

    def _source_groups(self) -> Sequence[ParamGroup]:
        """The source's own groups; without any, one of all weights of the main type, which loads as weights alone."""
        if self.manifest.groups:
            return self.manifest.groups
        self._note(
            Fate.DEFAULTED,
            "parameter groups",
            "the source has none: one group of all parameters, without hyperparameters; "
            "load it with load_optimizer_states=False",
        )
        weights = [(k.fqn, e) for k, e in self.manifest.tensors.items() if k.slot == WEIGHT]
        weights = [(name, entry) for name, entry in weights if entry.kind is Kind.PARAMETER]
        numels: Counter[DType] = Counter()
        for _, entry in weights:
            numels[entry.dtype] += entry.numel
        main = max(numels, key=lambda dtype: numels[dtype], default=None)
        return [ParamGroup(tuple(name for name, entry in weights if entry.dtype is main and entry.numel), {})]

    def _members(self, group: ParamGroup) -> tuple[str, ...]:
        names = tuple(self.manifest.aliases.get(name, name) for name in group.params)
        for name in names:
            if StateKey(name) not in self.manifest.tensors:
                raise IncompleteError("a parameter group names it, and there is no such weight", key=name)
        return names

    def _flavour(self, trained: Sequence[str]) -> DType:
        found = {self._weight(name).dtype: name for name in trained}
        if not found:
            raise UnsupportedError("there is no parameter to train, and DeepSpeed does not start without one")
        if len(found) > 1 or not found.keys() <= set(FLAVOURS):
            kinds = ", ".join(f"{dtype.value} ({name})" for dtype, name in found.items())
            raise UnsupportedError(
                f"DeepSpeed trains all parameters in one of float32, bfloat16 and float16, and these are {kinds}; "
                "choose one with --dtype"
            )
        return next(iter(found))

    # Groups

    def _group(self, number: int, group: ParamGroup, members: Sequence[str]) -> Group | None:
        params = tuple(name for name in members if self._weight(name).numel)
        self._note_empty(members)
        if not params:
            why = "DeepSpeed has no group without elements to optimize"
            self._note(Fate.DROPPED, f"hyperparameters of parameter group {number}", why)
            return None
        scalars, slots = self._slots(number, params)
        return Group(
            params,
            tuple(self._weight(name).numel for name in params),
            self._options(number, group.options),
            Slot(MASTER, DType.FLOAT32, tuple(self._master(name) for name in params)),
            slots,
            scalars,
        )

    def _options(self, number: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """DeepSpeed's own Adams ask their groups for ``bias_correction`` (KeyError at the first step, ops/adam), which
        torch's do not have because they always correct."""
        if is_deepspeed(self.manifest) or not options.keys() >= _ADAM_OPTIONS or "bias_correction" in options:
            return options
        why = "DeepSpeed's own Adam asks for it, and the source's always corrects: True"
        self._note(Fate.DEFAULTED, f"bias_correction of parameter group {number}", why)
        return {**options, "bias_correction": True}

    def _master(self, name: str) -> StateKey:
        key = StateKey(name, MASTER)
        return key if key in self.manifest.tensors else StateKey(name)

    def _slots(self, number: int, params: Sequence[str]) -> tuple[dict[str, StateKey], tuple[Slot, ...]]:
        """The 0-d slots of a group, and those that are cut."""
        names = list(dict.fromkeys(slot for param in params for slot in self.slots_of[param]))
        if not names and self.manifest.groups:
            why = "the source has none, so DeepSpeed starts it at the first step"
            self._note(Fate.DEFAULTED, f"optimizer state of parameter group {number}", why)
        whole = [slot for slot in names if self._is_scalar(slot, params)]
        foreign = [slot for slot in names if slot not in whole and not self._is_cut(slot, params)]
        if foreign:
            self._drop_state(number, params, foreign)
            return {}, ()
        scalars = {slot: next(key for key in self._keys(slot, params) if key is not None) for slot in whole}
        return scalars, tuple(self._cut_slot(slot, params) for slot in names if slot not in whole)

    def _keys(self, slot: str, params: Sequence[str]) -> tuple[StateKey | None, ...]:
        keys = (StateKey(param, slot) for param in params)
        return tuple(key if key in self.manifest.tensors else None for key in keys)

    def _present(self, slot: str, params: Sequence[str]) -> list[TensorEntry]:
        return [self.manifest.tensors[key] for key in self._keys(slot, params) if key is not None]

    def _is_scalar(self, slot: str, params: Sequence[str]) -> bool:
        """0-d for a parameter that is not, or ``step``."""
        found = zip(params, self._keys(slot, params), strict=True)
        pairs = [(self._weight(param).shape, self.manifest.tensors[key].shape) for param, key in found if key]
        return all(state == () and (shape != () or slot == "step") for shape, state in pairs)

    def _is_cut(self, slot: str, params: Sequence[str]) -> bool:
        """Of its parameter's shape everywhere, and of one type, or of types that become fp32."""
        found = zip(params, self._keys(slot, params), strict=True)
        pairs = [(self._weight(param), self.manifest.tensors[key]) for param, key in found if key]
        dtypes = {entry.dtype for _, entry in pairs}
        return all(a.shape == b.shape for a, b in pairs) and (len(dtypes) == 1 or dtypes <= CASTABLE)

    def _cut_slot(self, slot: str, params: Sequence[str]) -> Slot:
        keys = self._keys(slot, params)
        found = self._present(slot, params)
        missing = [param for param, key in zip(params, keys, strict=True) if key is None]
        if missing:
            why = "the source has none, as of parameters that never had a gradient; zeros, at their group's step"
            self._note(Fate.DEFAULTED, f"{slot} of {_listed(missing)}", why, map(self._weight, missing))
        wide = [entry for entry in found if entry.dtype is DType.FLOAT64]
        if wide:
            self._note(Fate.CAST, f"{slot} of {len(wide)} tensors", "float64 to float32", wide)
        dtype = DType.FLOAT32 if found[0].dtype in CASTABLE else found[0].dtype
        return Slot(slot, dtype, keys)

    # Notes

    def _drop_state(self, number: int, params: Sequence[str], foreign: Sequence[str]) -> None:
        lost = [entry for param in params for slot in self.slots_of[param] for entry in self._present(slot, [param])]
        self._note(
            Fate.DROPPED,
            f"optimizer state of parameter group {number}",
            f"{', '.join(foreign)} cannot be cut as the parameters are, so DeepSpeed starts this group afresh",
            lost,
        )

    def _note_empty(self, members: Iterable[str]) -> None:
        empty = [name for name in members if not self._weight(name).numel and self.slots_of[name]]
        if empty:
            why = "DeepSpeed does not optimize parameters without elements"
            self._note(Fate.DROPPED, f"optimizer state of {_listed(empty)}", why)

    def _note_masters(self, groups: Iterable[Group | None]) -> None:
        """Where a master comes from a weight that is stored in fewer bits."""
        keys = [key for group in groups if group for key in group.masters.keys if key and key.slot == WEIGHT]
        narrow = [entry for key in keys if (entry := self.manifest.tensors[key]).shards.dtype.item_bytes < 4]
        if narrow:
            why = "the source keeps none, so the weights are widened"
            self._note(Fate.DEFAULTED, f"fp32 masters of {len(narrow)} parameters", why, narrow)

    def _note_strays(self, trained: Collection[str]) -> None:
        known = set(trained)
        strays = [name for name, slots in self.slots_of.items() if slots and name not in known]
        if strays:
            lost = [entry for name in strays for slot in self.slots_of[name] for entry in self._present(slot, [name])]
            self._note(Fate.DROPPED, f"optimizer state of {_listed(strays)}", "no parameter group has them", lost)


def _refuse_twice(trained: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in trained:
        if name in seen:
            raise MalformedError("it is in two parameter groups, or twice in one", key=name)
        seen.add(name)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
