"""A manifest as a ``torch_dist`` checkpoint, which ``dist_checkpointing.load`` of Megatron-Core loads at any sizes of
its parallel groups.

The files of the tensors are those of a DCP. The index has no tree, names have the optimizer's slots in front, and
beside it lie the common state and ``metadata.json``. What Megatron has no place for is an object of our own, which its
loader does not ask for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileSpec, Layout, Literal
from ckpt_tools.core.literals import read_literal_number
from ckpt_tools.core.manifest import MASTER, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import ABSENT_REASON, Note, Outcome
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.core.value_refs import iter_tensor_refs
from ckpt_tools.core.values import Value
from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.dcp.files import RankFiles, metadata_of, place
from ckpt_tools.formats.dcp.items import Items
from ckpt_tools.formats.dcp.names import METADATA
from ckpt_tools.formats.megatron.common_state import (
    CONTENT,
    FULLY_RESHARDABLE,
    SHARDING,
    Parameter,
    inner_tree,
    is_loadable,
    loadable,
    with_groups,
)
from ckpt_tools.formats.megatron.folders import BACKEND
from ckpt_tools.formats.megatron.names import (
    COMMON_FILE,
    CONFIG_FILE,
    MASTERS,
    OWN_ITEM,
    TRACKER,
    declared_forms,
    extra_states,
    is_expert,
    is_extra_state,
    without_numbers,
)
from ckpt_tools.formats.state_dict.build import Entries
from ckpt_tools.formats.state_dict.from_deepspeed import user_entries
from ckpt_tools.serialization.pickle.dump import dumps

CONFIG = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""dist_checkpointing/core.py, ``CheckpointingConfig`` of megatron-core 0.16.1."""

VERSION = 3.0
"""Megatron-LM's version of its checkpoints (training/checkpointing.py)."""

_DEFAULTS: Mapping[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
"""By these Megatron recognises its groups (optimizer/optimizer.py, ``param_group_identifier_keys``)."""


_WEIGHTS = (Kind.PARAMETER, Kind.BUFFER)

_REFUSED_CLASS = "it is of a class that Megatron's loader refuses"


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    state = _State(manifest)
    entries = state.entries()
    placed = place(state.readable, entries, options.world_size)
    placed = replace(placed, owners=state.owners)
    index = metadata_of(entries, placed)
    index.planner_data = None
    folder = f"iter_{state.iteration:07d}/"
    common = Items(manifest.tensors).object(state.common())
    files: tuple[FileSpec, ...] = (
        *RankFiles(placed, folder).files(),
        FileLayout(f"{folder}{METADATA}", (Literal(dumps(index)),)),
        FileLayout(f"{folder}{COMMON_FILE}", tuple(common.at(0))),
        FileLayout(f"{folder}{CONFIG_FILE}", (Literal(json.dumps(CONFIG).encode()),)),
        FileLayout(TRACKER, (Literal(str(state.iteration).encode()),)),
    )
    return Layout(files, tuple(state.notes))


@dataclass
class _State:
    """A manifest to be written. ``owners`` maps fp32 copies that the source lacks to the weights that become them."""

    manifest: Manifest
    notes: list[Note] = field(default_factory=list)
    owners: dict[StateKey, StateKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.manifest.step is None and type(self.manifest.extra.get("global_step")) is not int:
            why = f"{ABSENT_REASON}; Megatron starts counting at 0"
            self.notes.append(Note(Outcome.DEFAULTED, "global_step", why))
        for name in self.trained:
            weight, master = self.manifest.tensors.get(StateKey(name)), StateKey(name, MASTER)
            if master not in self.manifest.tensors and weight is not None and weight.dtype is not DType.FLOAT32:
                self.owners[master] = StateKey(name)
        if self.owners:
            why = "none are written from the source, so they are made from the weights"
            what = f"fp32 masters of {format_count(len(self.owners), 'parameter')}"
            self.notes.append(Note(Outcome.DEFAULTED, what, why, len(self.owners)))

    @cached_property
    def trained(self) -> list[str]:
        return list(dict.fromkeys(key.fqn for key in self.manifest.select_kinds(Kind.STATE)))

    @cached_property
    def readable(self) -> Manifest:
        tensors = self.manifest.tensors
        made = {
            key: replace(tensors[owner].cast_to(DType.FLOAT32), kind=Kind.STATE) for key, owner in self.owners.items()
        }
        return replace(self.manifest, tensors={**tensors, **made}) if made else self.manifest

    @cached_property
    def own_masters(self) -> list[str]:
        """The trained parameters that are fp32 themselves, each its own master."""
        tensors = self.readable.tensors
        return [name for name in self.trained if StateKey(name, MASTER) not in tensors and StateKey(name) in tensors]

    @cached_property
    def iteration(self) -> int:
        found = self.manifest.extra.get("global_step")
        step = found if type(found) is int else self.manifest.step
        return step if step is not None and step >= 0 else 0

    @cached_property
    def source(self) -> dict[Any, Value] | None:
        """The common state of a source that was Megatron's, wherever it has been since."""
        found = self.manifest.extra.get("megatron")
        match found.get("common") if isinstance(found, dict) else None:
            case (dict() as common,) if self._is_whole(common):
                return common
        return None

    def _is_whole(self, value: Value) -> bool:
        return all(ref.key in self.manifest.tensors for ref in iter_tensor_refs(value))

    @cached_property
    def objects(self) -> dict[str, list[Value]]:
        found = self.manifest.extra.get("megatron")
        pairs = found.get("objects") if isinstance(found, dict) else None
        pairs = pairs if isinstance(pairs, tuple) else ()
        return {
            pair[0]: list(pair[1])
            for pair in pairs
            if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], tuple) and self._is_whole(pair[1])
        }

    def entries(self) -> Entries:
        tensors: dict[str, StateKey] = {}
        aliases: dict[str, str] = dict(self.manifest.aliases)
        for key, entry in self.readable.tensors.items():
            if entry.kind in _WEIGHTS:
                tensors[key.fqn] = key
            # The groups of a Megatron source have its steps.
            elif entry.kind is Kind.STATE and (
                key.slot != "step" or self.source is None or self._number(entry) is None
            ):
                tensors[self._name(key)] = key
        aliases.update({self._name(StateKey(name, MASTER)): name for name in self.own_masters})
        lost = [name for name, value in self.objects.items() if not is_loadable(value)]
        self.notes += [Note(Outcome.DROPPED, name, _REFUSED_CLASS) for name in lost]
        objects = {name: value for name, value in self.objects.items() if name not in lost}
        objects[OWN_ITEM] = [self._own()]
        aliases.update(self._extra_states(objects))
        names = [*tensors, *aliases, *objects]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UnsupportedError("two entries would have this name in a Megatron checkpoint", key=twice)
        return Entries({name: (name,) for name in names}, tensors, aliases, objects, ())

    def _extra_states(self, objects: dict[str, list[Value]]) -> dict[str, str]:
        """Megatron's modules ask for an object each, and say nothing in it without fp8. Where the source has none of
        these modules, ``objects`` gets the first, and the others are the same by name."""
        weights = {key.fqn: entry.shape for kind in _WEIGHTS for key, entry in self.manifest.select_kinds(kind).items()}
        wanted = extra_states(weights)
        known = frozenset(wanted)
        others = [name for name in objects if is_extra_state(name) and name not in known]
        if not objects.keys().isdisjoint(known):
            # Layers and experts that the source names one by one are stacked now, or the other way round.
            forms = frozenset(map(without_numbers, wanted))
            others = [name for name in others if without_numbers(name) in forms]
            if not others:
                return {}
        said = [name for name in others if objects.pop(name) != [None]]
        self.notes += [Note(Outcome.DROPPED, name, "no module of the output has this name") for name in said]
        missing = [name for name in wanted if name not in objects]
        objects |= {name: [None] for name in missing[:1]}
        return dict.fromkeys(missing[1:], missing[0]) if missing else {}

    def _name(self, key: StateKey) -> str:
        if "." in key.slot:
            raise UnsupportedError("optimizer state of this name has no place in a Megatron checkpoint", key=str(key))
        return f"optimizer.state.{self._master if key.slot == MASTER else key.slot}.{key.fqn}"

    @cached_property
    def _master(self) -> str:
        """The slot of the fp32 copy, by the kind of optimizer."""
        trees = self._trees.values()
        return MASTERS[1] if any("fp32_from_fp16_params" in tree for tree in trees) else MASTERS[0]

    @cached_property
    def _trees(self) -> dict[Any, dict[Any, Value]]:
        found = self.source.get("optimizer") if self.source is not None else None
        is_known = isinstance(found, dict) and all(isinstance(tree, dict) for tree in found.values())
        is_known = is_known and is_loadable(found)
        return found if is_known and found is not None else {}

    def _number(self, entry: TensorEntry) -> float | None:
        """The value of a step, where it is not in a file of the source."""
        number = read_literal_number(self.manifest, entry)
        table = entry.shards
        data = self.manifest.literals.get(table.files[0]) if len(table) == 1 else None
        if number is None and data is not None and table.dtype is DType.FLOAT32 and not entry.shape:
            at = table.get_byte_range(0)
            number = struct.unpack("<f", data[at.start : at.stop])[0]
        return number

    def _own(self) -> dict[str, Value]:
        extra, notes = user_entries(self.manifest)
        self.notes += notes
        extra.pop("megatron", None)
        whole = {name: value for name, value in extra.items() if self._is_whole(value)}
        for name in extra.keys() - whole.keys():
            self.notes.append(Note(Outcome.DROPPED, name, "its tensor is not selected", asked=True))
        buffers = [key.fqn for key, entry in self.manifest.select_kinds(Kind.BUFFER).items() if entry.dtype.is_floating]
        groups = [{"params": list(group.params), "added": list(_missing(group))} for group in self.manifest.groups]
        # A tensor of no elements has no item, and so none that two names could share.
        empty = [name for name in self.own_masters if not prod(self.readable.tensors[StateKey(name)].shape)]
        widened = [*(key.fqn for key in self.owners), *empty]
        return {"made": self.source is None, "groups": groups, "buffers": buffers, "widened": widened, "extra": whole}

    def common(self) -> dict[Any, Value]:
        """The content of ``common.pt``."""
        found, lost = loadable({name: value for name, value in (self.source or {}).items() if name != "optimizer"})
        self.notes += [Note(Outcome.DROPPED, name, _REFUSED_CLASS) for name in lost]
        content = found.get(CONTENT)
        found[CONTENT] = {
            **(content if isinstance(content, dict) else {}),
            "distrib_optim_sharding_type": FULLY_RESHARDABLE,
            "chained_optim_avoid_prefix": True,
            **declared_forms(key.fqn for key in self.manifest.tensors),
        }
        found |= {"checkpoint_version": VERSION, "iteration": self.iteration}
        if self.trained:
            found["optimizer"] = self._optimizer()
        if "args" not in found:
            why = f"{ABSENT_REASON}; Megatron-LM then does not compare its arguments"
            self.notes.append(Note(Outcome.MISSING, "Megatron's args", why))
        return found

    def _optimizer(self) -> dict[Any, Value]:
        groups = [self._group(number, group) for number, group in enumerate(self.manifest.groups)]
        if self.source is None and groups:
            groups += self._groups_by_rule(groups)
        trees = self._trees
        counts = [n for tree in trees.values() if type(n := inner_tree(tree).get("param_groups")) is int]
        if not trees or len(counts) != len(trees) or sum(counts) != len(groups):
            return {"optimizer": {"param_groups": groups}, SHARDING: FULLY_RESHARDABLE}
        left = iter(groups)
        made = {number: self._filled(tree, left) for number, tree in trees.items()}
        return made if len(made) > 1 else next(iter(made.values()))

    def _filled(self, tree: Mapping[Any, Value], left: Iterator[dict[str, Value]]) -> dict[Any, Value]:
        found = with_groups(tree, lambda number: [next(left) for _ in range(number)])
        state = inner_tree(found).get("state")
        if isinstance(state, dict) and "common_step" in state:
            inner_tree(found)["state"]["common_step"] = self._step(self.trained)
        return {**found, SHARDING: FULLY_RESHARDABLE} if SHARDING in found else found

    def _group(self, number: int, group: ParamGroup) -> dict[str, Value]:
        missing = _missing(group)
        if missing:
            what = f"{', '.join(missing)} of parameter group {number}"
            why = "Megatron needs them in its groups, and the source has none"
            self.notes.append(Note(Outcome.DEFAULTED, what, why, len(missing)))
        return {**group.options, **missing, "step": self._step(group.params or self.trained)}

    def _groups_by_rule(self, groups: Sequence[dict[str, Value]]) -> list[dict[str, Value]]:
        """The groups that Megatron looks for by its rule, where ``groups`` of the source are not these: it takes the
        options of the last group that decays, or does not, for all parameters of this kind."""
        source = {name: number for number, group in enumerate(self.manifest.groups) for name in group.params}
        kinds: dict[float, list[str]] = {}
        for name in filter(source.__contains__, self.trained):
            stored = len(self.readable.tensors[StateKey(name)].shape) if StateKey(name) in self.readable.tensors else 2
            does_decay = Parameter(name, stored, None).decays(also_norms=False)
            kinds.setdefault(1.0 if does_decay else 0.0, []).append(name)
        added, changed = [], 0
        for kind, names in kinds.items():
            taken = next((group for group in reversed(groups) if _is_of(group, kind)), None)
            if taken is None:
                own = {"wd_mult": kind, "is_expert_parallel": False, **({} if kind else {"weight_decay": 0.0})}
                taken = {**groups[source[names[0]]], **own}
                added.append(taken)
            changed += sum(_hyperparameters(groups[source[name]]) != _hyperparameters(taken) for name in names)
        if changed:
            what = f"hyperparameters of {format_count(changed, 'parameter')}"
            why = (
                "Megatron groups parameters by a rule of its own: no weight decay for biases and parameters of one dim"
            )
            self.notes.append(Note(Outcome.DEFAULTED, what, why, changed))
        return added

    def _step(self, names: Sequence[str]) -> int:
        """The step of these parameters, because Megatron's groups have one each."""
        entries = (self.manifest.tensors.get(StateKey(name, "step")) for name in names)
        found = {self._number(entry) for entry in entries if entry is not None}
        known = next(iter(found)) if len(found) == 1 else None
        if known is not None and known == int(known):
            return int(known)
        why = "Megatron's groups have one each, and the parameters' are in tensors: the iteration is used"
        note = Note(Outcome.DEFAULTED, "step of the optimizer", why)
        if note not in self.notes:
            self.notes.append(note)
        return self.iteration


def _is_of(group: Mapping[str, Any], kind: float) -> bool:
    """Whether Megatron takes the group for the parameters whose weight decay is multiplied by ``kind``."""
    said = {name: group.get(name, group.get(f"pre_{name}")) for name in _DEFAULTS}
    return said == {**_DEFAULTS, "wd_mult": kind}


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options on which a step depends. Those that only identify a group in Megatron are left out."""
    return {name: value for name, value in group.items() if name.removeprefix("pre_") not in _DEFAULTS}


def _missing(group: ParamGroup) -> dict[str, Any]:
    """Options that Megatron needs in a group and the source's does not have."""
    options = group.options
    found = {name: value for name, value in _DEFAULTS.items() if name not in options and f"pre_{name}" not in options}
    if "wd_mult" in found and options.get("weight_decay") == 0:
        found["wd_mult"] = 0.0
    if "is_expert_parallel" in found:
        found["is_expert_parallel"] = bool(group.params) and all(map(is_expert, group.params))
    if {"betas", "eps"} <= options.keys() and "bias_correction" not in options:
        found["bias_correction"] = True  # FusedAdam of Transformer Engine and Apex needs it; torch's always corrects.
    return found
