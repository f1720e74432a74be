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
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.dcp.files import RankFiles, build_metadata
from ckpt_tools.formats.dcp.items import ItemFactory
from ckpt_tools.formats.dcp.names import METADATA
from ckpt_tools.formats.dcp.placement import place_items
from ckpt_tools.formats.megatron.common_state import (
    CONTENT_KEY,
    FULLY_RESHARDABLE,
    SHARDING_TYPE_KEY,
    TrainedParameter,
    drop_unloadable,
    get_inner_tree,
    is_loadable,
    replace_groups,
)
from ckpt_tools.formats.megatron.folders import SUPPORTED_BACKEND
from ckpt_tools.formats.megatron.names import COMMON_FILE, CONFIG_FILE, TRACKER_FILE
from ckpt_tools.formats.megatron.tensor_names import (
    MASTER_SLOTS,
    OWN_ITEM,
    find_content_flags,
    is_expert,
    is_extra_state_item,
    list_extra_states,
    strip_numbers,
)
from ckpt_tools.messages.loading_code import quote_literal
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.state_tree.build import Entries
from ckpt_tools.state_tree.from_deepspeed import collect_user_entries

CONFIG = {
    "sharded_backend": SUPPORTED_BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""dist_checkpointing/core.py, ``CheckpointingConfig`` of megatron-core 0.16.1."""

VERSION = 3.0
"""Megatron-LM's version of its checkpoints (training/checkpointing.py)."""

_GROUP_IDENTIFIERS: Mapping[str, Any] = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
}
"""By these Megatron recognises its groups (optimizer/optimizer.py, ``param_group_identifier_keys``)."""


_WEIGHTS = (Kind.PARAMETER, Kind.BUFFER)

_REFUSED_CLASS = "it is of a class that Megatron's loader refuses"


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    writer = _MegatronWriter(manifest)
    entries = writer.build_entries()
    placement = place_items(writer.readable_manifest, entries, options.world_size)
    placement = replace(placement, owners=writer.weight_of_master)
    index = build_metadata(entries, placement)
    index.planner_data = None
    folder = f"iter_{writer.iteration:07d}/"
    common_item = ItemFactory(manifest.tensors).make_object_item(writer.build_common_state())
    files: tuple[FileSpec, ...] = (
        *RankFiles(placement, folder).list_files(),
        FileLayout(f"{folder}{METADATA}", (Literal(dumps(index)),)),
        FileLayout(f"{folder}{COMMON_FILE}", tuple(common_item.segments_at(0))),
        FileLayout(f"{folder}{CONFIG_FILE}", (Literal(json.dumps(CONFIG).encode()),)),
        FileLayout(TRACKER_FILE, (Literal(str(writer.iteration).encode()),)),
    )
    return Layout(files, tuple(writer.notes))


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    folder = layout.files[0].path.partition("/")[0]
    return (
        f"from megatron.core import dist_checkpointing  # Megatron-LM: --load DIR --ckpt-format torch_dist\n"
        f"state = dist_checkpointing.load(sharded_state_dict, {quote_literal(f'{path}/{folder}')})"
    )


@dataclass
class _MegatronWriter:
    """A manifest to be written. ``weight_of_master`` maps fp32 copies that the source lacks to the weights that become
    them."""

    manifest: Manifest
    notes: list[Note] = field(default_factory=list)
    weight_of_master: dict[StateKey, StateKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.manifest.step is None and type(self.manifest.extra.get("global_step")) is not int:
            why = f"{ABSENT_REASON}; Megatron starts counting at 0"
            self.notes.append(Note(Outcome.DEFAULTED, "global_step", why))
        for name in self.trained_names:
            weight, master = self.manifest.tensors.get(StateKey(name)), StateKey(name, MASTER)
            if master not in self.manifest.tensors and weight is not None and weight.dtype is not DType.FLOAT32:
                self.weight_of_master[master] = StateKey(name)
        if self.weight_of_master:
            why = "none are written from the source, so they are made from the weights"
            what = f"fp32 masters of {format_count(len(self.weight_of_master), 'parameter')}"
            self.notes.append(Note(Outcome.DEFAULTED, what, why, len(self.weight_of_master)))

    @cached_property
    def trained_names(self) -> list[str]:
        return list(dict.fromkeys(key.fqn for key in self.manifest.select_kinds(Kind.STATE)))

    @cached_property
    def readable_manifest(self) -> Manifest:
        tensors = self.manifest.tensors
        made_masters = {
            key: replace(tensors[owner].cast_to(DType.FLOAT32), kind=Kind.STATE)
            for key, owner in self.weight_of_master.items()
        }
        return replace(self.manifest, tensors={**tensors, **made_masters}) if made_masters else self.manifest

    @cached_property
    def fp32_names(self) -> list[str]:
        """The trained parameters that are fp32 themselves, each its own master."""
        tensors = self.readable_manifest.tensors
        return [
            name for name in self.trained_names if StateKey(name, MASTER) not in tensors and StateKey(name) in tensors
        ]

    @cached_property
    def iteration(self) -> int:
        found = self.manifest.extra.get("global_step")
        step = found if type(found) is int else self.manifest.step
        return step if step is not None and step >= 0 else 0

    @cached_property
    def source_common(self) -> dict[Any, Value] | None:
        """The common state of a source that was Megatron's, wherever it has been since."""
        source_entry = self.manifest.extra.get("megatron")
        match source_entry.get("common") if isinstance(source_entry, dict) else None:
            case (dict() as common,) if self._has_all_tensors(common):
                return common
        return None

    def _has_all_tensors(self, value: Value) -> bool:
        return all(ref.key in self.manifest.tensors for ref in iter_tensor_refs(value))

    @cached_property
    def source_objects(self) -> dict[str, list[Value]]:
        source_entry = self.manifest.extra.get("megatron")
        pairs = source_entry.get("objects") if isinstance(source_entry, dict) else None
        pairs = pairs if isinstance(pairs, tuple) else ()
        return {
            pair[0]: list(pair[1])
            for pair in pairs
            if isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[1], tuple)
            and self._has_all_tensors(pair[1])
        }

    def build_entries(self) -> Entries:
        tensors: dict[str, StateKey] = {}
        aliases: dict[str, str] = dict(self.manifest.aliases)
        for key, entry in self.readable_manifest.tensors.items():
            if entry.kind in _WEIGHTS:
                tensors[key.fqn] = key
            # The groups of a Megatron source have its steps.
            elif entry.kind is Kind.STATE and (
                key.slot != "step" or self.source_common is None or self._read_step_number(entry) is None
            ):
                tensors[self._make_tensor_name(key)] = key
        aliases.update({self._make_tensor_name(StateKey(name, MASTER)): name for name in self.fp32_names})
        refused_names = [name for name, value in self.source_objects.items() if not is_loadable(value)]
        self.notes += [Note(Outcome.DROPPED, name, _REFUSED_CLASS) for name in refused_names]
        objects = {name: value for name, value in self.source_objects.items() if name not in refused_names}
        objects[OWN_ITEM] = [self._build_own_entry()]
        aliases.update(self._add_extra_states(objects))
        names = [*tensors, *aliases, *objects]
        if len(set(names)) < len(names):
            duplicate_name = next(name for name in names if names.count(name) > 1)
            raise UnsupportedError("two entries would have this name in a Megatron checkpoint", key=duplicate_name)
        return Entries({name: (name,) for name in names}, tensors, aliases, objects, ())

    def _add_extra_states(self, objects: dict[str, list[Value]]) -> dict[str, str]:
        """The names of the modules' objects, for which Megatron asks, as aliases. Without fp8 each is ``[None]``: where
        the source has none of these modules, ``objects`` gets the first one, and all others are aliases of it, since a
        large model would have thousands of equal items."""
        weights = {key.fqn: entry.shape for kind in _WEIGHTS for key, entry in self.manifest.select_kinds(kind).items()}
        expected_names = list_extra_states(weights)
        expected_set = frozenset(expected_names)
        unexpected_names = [name for name in objects if is_extra_state_item(name) and name not in expected_set]
        if not objects.keys().isdisjoint(expected_set):
            # Layers and experts that the source names one by one are stacked now, or the other way round.
            numberless_names = frozenset(map(strip_numbers, expected_names))
            unexpected_names = [name for name in unexpected_names if strip_numbers(name) in numberless_names]
            if not unexpected_names:
                return {}
        nonempty_names = [name for name in unexpected_names if objects.pop(name) != [None]]
        self.notes += [Note(Outcome.DROPPED, name, "no module of the output has this name") for name in nonempty_names]
        missing = [name for name in expected_names if name not in objects]
        objects |= {name: [None] for name in missing[:1]}
        return dict.fromkeys(missing[1:], missing[0]) if missing else {}

    def _make_tensor_name(self, key: StateKey) -> str:
        if "." in key.slot:
            raise UnsupportedError("optimizer state of this name has no place in a Megatron checkpoint", key=str(key))
        return f"optimizer.state.{self._master_slot if key.slot == MASTER else key.slot}.{key.fqn}"

    @cached_property
    def _master_slot(self) -> str:
        """The slot of the fp32 copy, by the kind of optimizer."""
        trees = self._optimizer_trees.values()
        return MASTER_SLOTS[1] if any("fp32_from_fp16_params" in tree for tree in trees) else MASTER_SLOTS[0]

    @cached_property
    def _optimizer_trees(self) -> dict[Any, dict[Any, Value]]:
        trees = self.source_common.get("optimizer") if self.source_common is not None else None
        is_known = isinstance(trees, dict) and all(isinstance(tree, dict) for tree in trees.values())
        is_known = is_known and is_loadable(trees)
        return trees if is_known and trees is not None else {}

    def _read_step_number(self, entry: TensorEntry) -> float | None:
        """The value of a step, where it is not in a file of the source."""
        number = read_literal_number(self.manifest, entry)
        table = entry.shards
        data = self.manifest.literals.get(table.files[0]) if len(table) == 1 else None
        if number is None and data is not None and table.dtype is DType.FLOAT32 and not entry.shape:
            at = table.get_byte_range(0)
            number = struct.unpack("<f", data[at.start : at.stop])[0]
        return number

    def _build_own_entry(self) -> dict[str, Value]:
        extra, notes = collect_user_entries(self.manifest)
        self.notes += notes
        extra.pop("megatron", None)
        kept_extra = {name: value for name, value in extra.items() if self._has_all_tensors(value)}
        for name in extra.keys() - kept_extra.keys():
            self.notes.append(Note(Outcome.DROPPED, name, "its tensor is not selected", asked=True))
        buffers = [key.fqn for key, entry in self.manifest.select_kinds(Kind.BUFFER).items() if entry.dtype.is_floating]
        groups = [
            {"params": list(group.params), "added": list(_find_missing_options(group))}
            for group in self.manifest.groups
        ]
        # A tensor of no elements has no item, and so none that two names could share.
        empty = [name for name in self.fp32_names if not prod(self.readable_manifest.tensors[StateKey(name)].shape)]
        widened_names = [*(key.fqn for key in self.weight_of_master), *empty]
        return {
            "made": self.source_common is None,
            "groups": groups,
            "buffers": buffers,
            "widened": widened_names,
            "extra": kept_extra,
        }

    def build_common_state(self) -> dict[Any, Value]:
        """The content of ``common.pt``."""
        common_state, refused_names = drop_unloadable(
            {name: value for name, value in (self.source_common or {}).items() if name != "optimizer"}
        )
        self.notes += [Note(Outcome.DROPPED, name, _REFUSED_CLASS) for name in refused_names]
        content = common_state.get(CONTENT_KEY)
        common_state[CONTENT_KEY] = {
            **(content if isinstance(content, dict) else {}),
            "distrib_optim_sharding_type": FULLY_RESHARDABLE,
            "chained_optim_avoid_prefix": True,
            **find_content_flags(key.fqn for key in self.manifest.tensors),
        }
        common_state |= {"checkpoint_version": VERSION, "iteration": self.iteration}
        if self.trained_names:
            common_state["optimizer"] = self._build_optimizer()
        if "args" not in common_state:
            why = f"{ABSENT_REASON}; Megatron-LM then does not compare its arguments"
            self.notes.append(Note(Outcome.MISSING, "Megatron's args", why))
        return common_state

    def _build_optimizer(self) -> dict[Any, Value]:
        groups = [self._build_group(number, group) for number, group in enumerate(self.manifest.groups)]
        if self.source_common is None and groups:
            groups += self._add_groups_by_rule(groups)
        trees = self._optimizer_trees
        group_counts = [n for tree in trees.values() if type(n := get_inner_tree(tree).get("param_groups")) is int]
        if not trees or len(group_counts) != len(trees) or sum(group_counts) != len(groups):
            return {"optimizer": {"param_groups": groups}, SHARDING_TYPE_KEY: FULLY_RESHARDABLE}
        remaining_groups = iter(groups)
        filled_trees = {number: self._fill_tree(tree, remaining_groups) for number, tree in trees.items()}
        return filled_trees if len(filled_trees) > 1 else next(iter(filled_trees.values()))

    def _fill_tree(self, tree: Mapping[Any, Value], remaining_groups: Iterator[dict[str, Value]]) -> dict[Any, Value]:
        filled_tree = replace_groups(tree, lambda number: [next(remaining_groups) for _ in range(number)])
        state = get_inner_tree(filled_tree).get("state")
        if isinstance(state, dict) and "common_step" in state:
            get_inner_tree(filled_tree)["state"]["common_step"] = self._find_common_step(self.trained_names)
        return (
            {**filled_tree, SHARDING_TYPE_KEY: FULLY_RESHARDABLE} if SHARDING_TYPE_KEY in filled_tree else filled_tree
        )

    def _build_group(self, number: int, group: ParamGroup) -> dict[str, Value]:
        missing_options = _find_missing_options(group)
        if missing_options:
            what = f"{', '.join(missing_options)} of parameter group {number}"
            why = "Megatron needs them in its groups, and the source has none"
            self.notes.append(Note(Outcome.DEFAULTED, what, why, len(missing_options)))
        return {**group.options, **missing_options, "step": self._find_common_step(group.params or self.trained_names)}

    def _add_groups_by_rule(self, groups: Sequence[dict[str, Value]]) -> list[dict[str, Value]]:
        """The groups that Megatron looks for by its rule, where ``groups`` of the source are not these: it takes the
        options of the last group that decays, or does not, for all parameters of this kind."""
        group_number_by_name = {
            name: number for number, group in enumerate(self.manifest.groups) for name in group.params
        }
        names_by_multiplier: dict[float, list[str]] = {}
        for name in filter(group_number_by_name.__contains__, self.trained_names):
            weight = self.readable_manifest.tensors.get(StateKey(name))
            stored_dims = 2 if weight is None else len(weight.shape)
            does_decay = TrainedParameter(name, stored_dims, None).does_decay(also_norms=False)
            names_by_multiplier.setdefault(1.0 if does_decay else 0.0, []).append(name)
        # On loading, Megatron makes its own groups and takes for each the options of the last stored group with the
        # same identifiers. For a kind of parameters that no group of the source is meant for, one is appended.
        added, num_changed = [], 0
        for multiplier, names in names_by_multiplier.items():
            matching_group = next(
                (group for group in reversed(groups) if _is_group_with_multiplier(group, multiplier)), None
            )
            if matching_group is None:
                identifying_options = {
                    "wd_mult": multiplier,
                    "is_expert_parallel": False,
                    **({} if multiplier else {"weight_decay": 0.0}),
                }
                matching_group = {**groups[group_number_by_name[names[0]]], **identifying_options}
                added.append(matching_group)
            num_changed += sum(
                _select_hyperparameters(groups[group_number_by_name[name]]) != _select_hyperparameters(matching_group)
                for name in names
            )
        if num_changed:
            what = f"hyperparameters of {format_count(num_changed, 'parameter')}"
            why = (
                "Megatron groups parameters by a rule of its own: no weight decay for biases and parameters of one dim"
            )
            self.notes.append(Note(Outcome.DEFAULTED, what, why, num_changed))
        return added

    def _find_common_step(self, names: Sequence[str]) -> int:
        """The step of these parameters, because Megatron's groups have one each."""
        entries = (self.manifest.tensors.get(StateKey(name, "step")) for name in names)
        step_numbers = {self._read_step_number(entry) for entry in entries if entry is not None}
        common_step = next(iter(step_numbers)) if len(step_numbers) == 1 else None
        if common_step is not None and common_step == int(common_step):
            return int(common_step)
        why = "Megatron's groups have one each, and the parameters' are in tensors: the iteration is used"
        note = Note(Outcome.DEFAULTED, "step of the optimizer", why)
        if note not in self.notes:
            self.notes.append(note)
        return self.iteration


def _is_group_with_multiplier(group: Mapping[str, Any], multiplier: float) -> bool:
    """Whether Megatron takes the group for the parameters whose weight decay is multiplied by ``multiplier``."""
    identifiers = {name: group.get(name, group.get(f"pre_{name}")) for name in _GROUP_IDENTIFIERS}
    return identifiers == {**_GROUP_IDENTIFIERS, "wd_mult": multiplier}


def _select_hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options on which a step depends. Those that only identify a group in Megatron are left out."""
    return {name: value for name, value in group.items() if name.removeprefix("pre_") not in _GROUP_IDENTIFIERS}


def _find_missing_options(group: ParamGroup) -> dict[str, Any]:
    """Options that Megatron needs in a group and the source's does not have."""
    options = group.options
    missing_options = {
        name: value
        for name, value in _GROUP_IDENTIFIERS.items()
        if name not in options and f"pre_{name}" not in options
    }
    if "wd_mult" in missing_options and options.get("weight_decay") == 0:
        missing_options["wd_mult"] = 0.0
    if "is_expert_parallel" in missing_options:
        missing_options["is_expert_parallel"] = bool(group.params) and all(map(is_expert, group.params))
    if {"betas", "eps"} <= options.keys() and "bias_correction" not in options:
        missing_options["bias_correction"] = (
            True  # FusedAdam of Transformer Engine and Apex needs it; torch's always corrects.
        )
    return missing_options
