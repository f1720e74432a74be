"""From the headers of a ZeRO checkpoint to its manifest: which tensor is what, and where.

Weights come from ``module`` where it has them (stages 1 and 2). In stage 3 it has only their type, and the masters are
read as it: DeepSpeed itself refills the 16-bit weights from the masters when it loads, stage3.py
``_rigid_load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import ClassVar

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import is_number, make_number_table
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.step_claims import StepClaim
from ckpt_tools.core.values import StoredTensor, Value, describe_kind, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, OptimGroup, OptimStates, model_claims
from ckpt_tools.formats.deepspeed.common.model_file import (
    aliases,
    check_names,
    is_round_robin,
    other_shape,
    zero_option,
)
from ckpt_tools.formats.deepspeed.common.partition import MOMENTUM, original_order
from ckpt_tools.formats.deepspeed.common.saved_extras import Extras
from ckpt_tools.formats.deepspeed.zero_reader.flat import (
    Flats,
    Gaps,
    Pieces,
    Vector,
    cut_pieces,
    locate_group,
    locate_params,
    locate_whole,
    share,
)
from ckpt_tools.formats.deepspeed.zero_reader.ranks import Partitions, is_scalar, vector
from ckpt_tools.formats.foreign import refuse_tensor_object
from ckpt_tools.stores.source import Source

Entries = Iterator[tuple[StateKey, TensorEntry]]

Scalars = list[Mapping[str, TensorEntry]]
"""By flat the 0-d slots."""


@dataclass
class Contents:
    """A checkpoint while it is read. ``part`` sets its literals apart from those of checkpoints that are joined with
    it."""

    source: Source
    model: ModelStates
    optim: OptimStates
    model_paths: tuple[str, ...]
    partitions: Partitions
    extras: Extras = field(default_factory=Extras)
    literals: dict[str, bytes] = field(default_factory=dict)
    part: str = ""
    left_out: ClassVar[tuple[str, ...]] = ("optimizer",)

    def manifest(self) -> Manifest:
        """Raises FormatError where the files contradict themselves."""
        tensors = {key: entry for name in self._names() for key, entry in self._of(name)}
        groups = tuple(self._group(number, group) for number, group in enumerate(self.optim.groups))
        self._gather_extras()
        return Manifest(
            format=f"zero{self.optim.stage}",
            tensors=tensors | self.extras.tensors,
            aliases=self.aliases,
            groups=groups,
            literals=self.literals,
            extra=self.extras.values,
            step=self.model.step,
            world_size=self.optim.world_size,
            notes=tuple(self._notes()),
            step_claims=(
                *model_claims(self.model.file),
                *chain(*(each[1] for each in self._other_models)),
                *self.partitions.steps,
            ),
            masters_are_outdated=zero_option(self.model, "zenflow") is not None,
        )

    def _notes(self) -> Iterator[Note]:
        """Stages 2 and 3 list frozen parameters, with None in place of the list if they were not saved. Stage 1 never
        lists them; if it has one, it has them all."""
        content = self.model.file.content
        if "frozen_param_shapes" not in content or content["frozen_param_shapes"] is not None:
            return
        what = "weights of frozen parameters, if the run has any"
        if self.optim.stage > 1:
            yield Note(Outcome.MISSING, what, "the checkpoint was saved with exclude_frozen_parameters")
            return
        known = {*self.trainable, *self.model.buffers, *self.aliases}
        others = (value for name, value in self.model.module.items() if name not in known)
        if not any(isinstance(value, StoredTensor) for value in others):
            why = "there are none, and stage 1 does not record whether exclude_frozen_parameters left them out"
            yield Note(Outcome.MISSING, what, why)

    @cached_property
    def trainable(self) -> Mapping[str, Shape]:
        return self.model.trainable

    @cached_property
    def pieces(self) -> Mapping[str, Pieces]:
        """The places in the partitions of each trainable parameter that has elements."""
        shapes, found = self.model.param_shapes, self.partitions
        if self.optim.stage == 3:
            return locate_params(shapes, found.masters)
        self._check_groups(shapes)
        return {
            name: pieces
            for flat, group in enumerate(shapes)
            for name, pieces in locate_group(flat, group, self._gaps(flat), found.masters, found.paddings).items()
        }

    def _check_groups(self, shapes: Sequence[Mapping[str, Shape]]) -> None:
        groups, path = len(self.optim.masters), self.optim.file.path
        if len(shapes) != groups:
            raise MalformedError(f"{groups} groups of partitions, but param_shapes has {len(shapes)}", path=path)

    def _gaps(self, flat: int) -> Gaps:
        return None if self.optim.alignment_paddings is None else self.optim.alignment_paddings[flat]

    @cached_property
    def momentum(self) -> Mapping[str, Pieces]:
        """The places of Muon's momentum of each parameter, if its vectors hold whole parameters."""
        return locate_whole(self.pieces, self.partitions.momentum)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Tied parameters, by alias."""
        return aliases(self.model, self._are_tied)

    def _are_tied(self, alias: str, one: StoredTensor, other: StoredTensor) -> bool:
        if self.optim.stage == 3:
            return alias not in self.model.frozen_shapes
        return one.numel > 0 and one.shape == other.shape

    def _names(self) -> list[str]:
        """The model's own names in its own order, each tie once. Raises IncompleteError."""
        check_names(self.model)
        return [name for name in self.model.module if name not in self.aliases and not self._is_left_out(name)]

    def _is_left_out(self, name: str) -> bool:
        """Whether ``exclude_frozen_parameters`` took the owner of a tie and left its alias, empty, behind."""
        value, owner = self.model.module[name], self.model.ties.get(name)
        return (
            owner is not None and owner not in self.model.module and isinstance(value, StoredTensor) and not value.numel
        )

    def _of(self, name: str) -> Entries:
        """The tensors of one name: the weight or buffer, and the optimizer's."""
        value = self.model.module[name]
        refuse_tensor_object(value, name)
        if not isinstance(value, StoredTensor) and name not in self.trainable:
            self.extras.add_module_value(name, value, self.model.home(name))
            return
        if not isinstance(value, StoredTensor):
            raise MalformedError(
                f"module contains a {describe_kind(value)} instead of a tensor", path=self.model.file.path, key=name
            )
        yield StateKey(name, WEIGHT), self._weight(name, value)
        if name in self.pieces:
            yield from self._states(name, self.trainable[name], self.pieces[name])

    def _weight(self, name: str, value: StoredTensor) -> TensorEntry:
        kind = Kind.BUFFER if name in self.model.buffers else Kind.PARAMETER
        shape = self._shape(name, value)
        if tuple(value.shape) == shape:
            return TensorEntry(shape, value.dtype, kind, self.model.home(name).table(value))
        if self.optim.stage < 3 or value.numel:
            raise other_shape(self.model, name, value, shape)
        return TensorEntry(shape, value.dtype, kind, self._cut_weight(name, shape, value.dtype))

    def _shape(self, name: str, value: StoredTensor) -> Shape:
        """The shape of the whole weight; in stage 3 ``module`` has an empty tensor in place of one that is cut."""
        if name in self.model.buffers:
            return tuple(value.shape)
        frozen = self.model.frozen_shapes if self.optim.stage == 3 else {}
        shape = self.trainable.get(name, frozen.get(name))
        if shape is None and self.optim.stage == 3 and not value.numel:
            raise IncompleteError(
                "no file contains the elements of this parameter", path=self.model.file.path, key=name
            )
        return tuple(value.shape) if shape is None else shape

    def _cut_weight(self, name: str, shape: Shape, dtype: DType) -> ShardTable:
        """The elements of a stage 3 weight: the masters, or the fragments of a frozen one."""
        if not prod(shape):
            return ShardTable.build(shape, dtype, [])
        if name in self.pieces:
            return self.partitions.masters.table(self.pieces[name])
        fragments = [{0: rank[name]} if name in rank else {} for rank in self.fragments]
        flats = Flats.of(f"the frozen {name}", self.model_paths, fragments, 1)
        cut = share(prod(shape), self.optim.world_size)
        return flats.table(cut_pieces(0, prod(shape), self.optim.world_size, np.array([0, cut])))

    @property
    def fragments(self) -> list[Mapping[str, Vector]]:
        """Each rank's fragments of the frozen parameters."""
        return [_fragments(self.model), *(each[0] for each in self._other_models)]

    @cached_property
    def _other_models(self) -> list[tuple[Mapping[str, Vector], list[StepClaim]]]:
        """The fragments and the steps of each model file but the first, which only stage 3 has."""
        return list(map(self._read_model, self.model_paths[1:]))

    def _read_model(self, path: str) -> tuple[Mapping[str, Vector], list[StepClaim]]:
        model = ModelStates.of(File.open(self.source, path))
        found, expected = (each.file.content.get("dp_world_size") for each in (model, self.model))
        if found != expected:
            why = f"its dp_world_size is {format_brief(found)} but that of rank 0 is {format_brief(expected)}"
            raise MalformedError(why, path=path)
        return _fragments(model), model_claims(model.file)

    def _states(self, name: str, shape: Shape, pieces: Pieces) -> Entries:
        yield StateKey(name, MASTER), _state(shape, self.partitions.masters.table(pieces))
        for slot in self.partitions.slots:
            if slot.holds(pieces):
                yield StateKey(name, slot.name), _state(shape, slot.table(pieces))
        if name in self.momentum:
            yield StateKey(name, MOMENTUM), _state(shape, self.partitions.momentum.table(self.momentum[name]))
        for slot_name, entry in self._scalars_at(pieces)[int(pieces.flats[0])].items():
            yield StateKey(name, slot_name), entry

    def _scalars_at(self, pieces: Pieces) -> Scalars:
        return self.scalars

    @cached_property
    def scalars(self) -> Scalars:
        """The 0-d state of each flat, from rank 0, which has some of every parameter's elements or of its group's."""
        return self._scalars_of(self.optim, self.part)

    def _scalars_of(self, optim: OptimStates, part: str) -> Scalars:
        steps = {flat: group.options.get("step") for group in optim.groups for flat in group.flats}
        return [
            {
                slot: self._scalar(optim.file, f"{part}{flat}.{slot}", value)
                for slot, value in _scalars(state, steps.get(flat)).items()
            }
            for flat, state in enumerate(optim.states)
        ]

    def _scalar(self, file: File, name: str, value: Value) -> TensorEntry:
        if isinstance(value, StoredTensor):
            return _state((), file.table(value))
        if not is_number(value):
            raise MalformedError(f"a step or another counter of the optimizer is {value.bit_length()} bits long")
        table, files = make_number_table(value, name)
        self.literals |= files
        return _state((), table)

    def _group(self, number: int, group: OptimGroup) -> ParamGroup:
        return ParamGroup(self._members(group), self.extras.options(number, group.options, self.optim.file))

    def _members(self, group: OptimGroup) -> tuple[str, ...]:
        """The parameters of a group in the order in which the optimizer got them.

        A group is one flat in stages 1 and 2, but for Adagrad: DeepSpeed remakes it with a single group of all flats.
        """
        if self.optim.stage == 3:
            flats = set(group.flats)
            return tuple(name for name, pieces in self.pieces.items() if int(pieces.flats[0]) in flats)
        return tuple(name for flat in group.flats for name in self._flat_members(flat))

    def _flat_members(self, flat: int) -> tuple[str, ...]:
        found = tuple(self.model.param_shapes[flat])
        if is_round_robin(self.model) and not self.optim.is_bf16_optimizer:
            return original_order(found, self.optim.world_size)
        return found

    def _gather_extras(self) -> None:
        self.extras.add_model(self.model.file, without=self.left_out)
        self.extras.add_optimizer(self.optim.file, self.optim.own)
        for rank, state in self.partitions.rest:
            assert state.file is not None, "other state is read with its file"
            kept = self.extras.values.setdefault("deepspeed", {}).setdefault("partition_state", {})
            kept[rank] = self.extras.inert(dict(state.rest), f"partition_state.{rank}", state.file)


def _fragments(model: ModelStates) -> Mapping[str, Vector]:
    return {name: vector(model.file, tensor) for name, tensor in model.frozen_fragments.items() if tensor.numel}


def _state(shape: Shape, table: ShardTable) -> TensorEntry:
    return TensorEntry(shape, table.dtype, Kind.STATE, table)


def _scalars(state: Mapping[str, Value], group_step: Value) -> Mapping[str, Value]:
    """The 0-d slots of a flat. Apex keeps one step for a whole group, among its hyperparameters."""
    found = {slot: value for slot, value in state.items() if is_scalar(value)}
    return found if "step" in found or not is_scalar(group_step) else {**found, "step": group_step}
