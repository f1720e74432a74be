"""The files of the model and, one a rank, of the optimizer.

Model files (engine.py ``_save_checkpoint``, ``_common_checkpoint_state``) have weights and buffers, names and shapes,
counters and client state. Stages 1 and 2 have one with whole weights. Stage 3 has one a rank, whose module holds empty
tensors in the place of parameters, since ``load_checkpoint`` fills them from the optimizer's masters, and this rank's
part of each frozen one.

Optimizer files (engine.py ``_save_zero_checkpoint``; stage_1_and_2.py and stage3.py ``state_dict``) have masters, the
optimizer's state, hyperparameters and the loss scaler. Two keys of a native file are left out: ``clip_grad`` where the
source has none, because loading it overrules the config of the run that resumes, and ``param_alignment_paddings``,
without which a file loads whatever ``parameter_alignment`` the run has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, Padding, Payload, Segment
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, StateKey
from ckpt_tools.core.values import OrderedDict, StoredTensor, Value
from ckpt_tools.formats.deepspeed.common.partition import (
    MOMENTUM,
    GroupCut,
    ParamCut,
    Vector,
    is_muon,
    round_robin_order,
    sub_groups,
)
from ckpt_tools.formats.deepspeed.common.pickled_objects import DS_VERSION, fragment_address, loss_scaler, zero_stage
from ckpt_tools.formats.deepspeed.common.tensor_rows import Form, Tensors, counters, elements, rows_of
from ckpt_tools.formats.deepspeed.common.training_state import Group, TrainingState
from ckpt_tools.formats.deepspeed.common.written_extras import Extras, Settings, adapted


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters in the order in which they are flattened, their cut, and the number of their param group."""

    group: Group
    cut: GroupCut | ParamCut
    number: int


@dataclass(frozen=True, slots=True)
class Target:
    """The training state flattened for a stage and a number of ranks. ``flat_groups`` are a rank's vectors: one a param
    group, or in stage 3 one a sub-group. ``has_whole_momentum`` says that Muon's are of whole parameters."""

    state: TrainingState
    extras: Extras
    flat_groups: tuple[FlatGroup, ...]
    stage: int
    world_size: int
    has_whole_momentum: bool = False

    @classmethod
    def of(cls, manifest: Manifest, stage: int, world_size: int) -> Target:
        state = TrainingState.of(manifest)
        extras = Extras.of(manifest, state.dtype)
        settings = Settings.of(extras.config, stage, state.dtype)
        flat_groups: list[FlatGroup] = []
        for number, group in enumerate(state.groups):
            if stage < 3:
                order = round_robin_order(len(group.params), world_size if settings.is_round_robin else 1)
                part = group.picked(order)
                flat_groups.append(FlatGroup(part, GroupCut.of(part.numels, world_size), number))
                continue
            shares = ParamCut.of(group.numels, world_size).shares.tolist()
            for positions in sub_groups(shares, settings.sub_group_size):
                part = group.picked(positions)
                flat_groups.append(FlatGroup(part, ParamCut.of(part.numels, world_size), number))
        return cls(state, extras, tuple(flat_groups), stage, world_size, settings.has_whole_momentum)

    @property
    def config(self) -> dict[str, Value]:
        return adapted(self.extras.config, self.stage, self.state.dtype)


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Stages 1 and 2: one file, of rank 0. Stage 1 has the weights of frozen parameters and does not list them."""

    target: Target

    def file(self, path: str, rank: int) -> FileLayout:
        state = self.target.state
        tensors = Tensors(state.manifest)
        # In fp32 a trained weight is read from its master, of which it may be a rounded copy.
        source = state.master if state.dtype is DType.FLOAT32 else StateKey
        trained = [name for group in state.groups for name in group.params]
        weights = {name: tensors.whole(source(name), state.weight(name)) for name in trained}
        frozen = {name: tensors.whole(StateKey(name), entry) for name, entry in state.frozen.items()}
        return tensors.file(path, _model_content(self.target, tensors, weights | frozen, frozen, rank=rank))


@dataclass(frozen=True)
class CutModel:
    """Stage 3: one file a rank. They differ in the parts of frozen parameters, and in that only rank 0's names ties."""

    target: Target

    def file(self, path: str, rank: int) -> FileLayout:
        first, other = self._forms
        return (first if rank == 0 else other).filled(path, self._frozen_parts(rank))

    @cached_property
    def _forms(self) -> tuple[Form, Form]:
        return self._form(rank=0), self._form(rank=1)

    def _form(self, rank: int) -> Form:
        tensors = Tensors(self.target.state.manifest)
        frozen = self.target.state.frozen
        shares = self._frozen_cut.shares.tolist()
        parts = {name: tensors.hole(e.dtype, share) for (name, e), share in zip(frozen.items(), shares, strict=True)}
        return tensors.form(_model_content(self.target, tensors, self._empty_weights(tensors), parts, rank=rank))

    def _empty_weights(self, tensors: Tensors) -> dict[str, StoredTensor]:
        """All on one empty storage a type: a record for each would be most of the file."""
        state = self.target.state
        trained = {name: state.weight(name) for group in state.groups for name in group.params}
        entries = {**trained, **state.frozen}
        empty = {dtype: tensors.add([], dtype, (0,)).storage for dtype in {e.dtype: None for e in entries.values()}}
        return {name: StoredTensor(empty[e.dtype], e.dtype, 0, (0,), (1,)) for name, e in entries.items()}

    @cached_property
    def _frozen_cut(self) -> ParamCut:
        return ParamCut.of([entry.numel for entry in self.target.state.frozen.values()], self.target.world_size)

    def _frozen_parts(self, rank: int) -> list[list[Segment]]:
        """A rank's part of each frozen parameter, in its own type."""
        vector = self._frozen_cut.vector(rank)
        columns = (vector.starts.tolist(), vector.stops.tolist(), vector.paddings.tolist())
        found: list[list[Segment]] = []
        for (name, entry), start, stop, padding in zip(self.target.state.frozen.items(), *columns, strict=True):
            payload = Payload(StateKey(name), Box((start,), (stop,)), (entry.numel,), entry.dtype)
            found.append([payload, Padding(padding * entry.dtype.item_bytes)])
        return found


def _model_content(
    target: Target,
    tensors: Tensors,
    weights: Mapping[str, StoredTensor],
    frozen: Mapping[str, StoredTensor],
    *,
    rank: int,
) -> dict[str, Value]:
    """The whole dictionary; ``frozen`` are the fragments, which stage 1 does not list, nor a checkpoint of weights
    alone, whose module has everything."""
    state = target.state
    module = _module(target, tensors, weights)
    lists_frozen = target.stage > 1 and bool(state.manifest.groups)
    return {
        "module": module,
        "buffer_names": [name for name in module if state.manifest.aliases.get(name, name) in state.buffers],
        "optimizer": None,
        "param_shapes": [state.shapes(flat.group.params) for flat in target.flat_groups],
        "frozen_param_shapes": state.shapes(state.frozen) if lists_frozen else None,
        "shared_params": state.ties if rank == 0 else {},
        "frozen_param_fragments": OrderedDict(frozen) if lists_frozen else None,
        **counters(target.extras, tensors, target.world_size, target.config),
        **tensors.restored(dict(target.extras.client_state)),
    }


def _module(target: Target, tensors: Tensors, weights: Mapping[str, StoredTensor]) -> OrderedDict:
    """The model's state dict in the source's order, ties under both names, and what modules keep beside tensors."""
    manifest = target.state.manifest
    buffers = {name: tensors.whole(StateKey(name), entry) for name, entry in target.state.buffers.items()}
    found: dict[str, Value] = {**weights, **buffers}
    order = (key.fqn for key, e in manifest.tensors.items() if key.slot == WEIGHT and e.kind is not Kind.EXTRA)
    module = {name: found[name] for name in order}
    module |= {alias: found[owner] for alias, owner in manifest.aliases.items() if owner in found}
    return OrderedDict(module | tensors.restored(dict(target.extras.module)))


@dataclass(frozen=True, slots=True)
class GroupCutOptim:
    """Stages 1 and 2. Masters are saved without their padding, the optimizer's state with it."""

    target: Target

    def file(self, path: str, rank: int) -> FileLayout:
        tensors = Tensors(self.target.state.manifest)
        rows = [(flat, flat.cut.vector(rank)) for flat in self.target.flat_groups]
        states = [self._state(tensors, flat.group, vector) for flat, vector in rows]
        clip_grad = self.target.extras.own.get("clip_grad")
        own = {
            **_scaling(self.target),
            **({"clip_grad": clip_grad} if isinstance(clip_grad, int | float) else {}),
            "base_optimizer_state": _optimizer(self.target, tensors, states),
            "single_partition_of_fp32_groups": [
                tensors.vector(vector.trimmed(), flat.group, flat.group.masters) for flat, vector in rows
            ],
            "zero_stage": zero_stage(self.target.stage),
            "group_paddings": [vector.num_padding for _, vector in rows],
            "partition_count": [self.target.world_size] * len(rows),
            "ds_version": DS_VERSION,
            "param_slice_mappings": [_mapping(flat.group, vector) for flat, vector in rows],
        }
        return tensors.file(path, _optim_content(self.target, tensors, own))

    def _state(self, tensors: Tensors, group: Group, vector: Vector) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for slot in group.slots:
            is_whole = slot.name == MOMENTUM and is_muon(group.options) and self.target.has_whole_momentum
            held = vector.of_whole(group.numels) if is_whole else vector
            if held.numel:
                found[slot.name] = tensors.vector(held, group, slot)
        return found


@dataclass(frozen=True)
class ParamCutOptim:
    """Stage 3. Everything is padded, parameter by parameter, so that all ranks' vectors are equally long."""

    target: Target

    def file(self, path: str, rank: int) -> FileLayout:
        groups = [(flat.group, rows_of(flat.cut.vector(rank))) for flat in self.target.flat_groups]
        contents = [elements(rows, group, slot) for group, rows in groups for slot in (*group.slots, group.masters)]
        return self._form.filled(path, contents)

    @cached_property
    def _form(self) -> Form:
        tensors = Tensors(self.target.state.manifest)
        states, masters = [], []
        for flat in self.target.flat_groups:
            numel = flat.cut.vector(0).numel
            states.append({slot.name: tensors.hole(slot.dtype, numel) for slot in flat.group.slots})
            masters.append(tensors.hole(flat.group.masters.dtype, numel))
        own = {
            "zero_stage": zero_stage(self.target.stage),
            **_scaling(self.target),
            "partition_count": self.target.world_size,
            "optimizer_state_dict": _optimizer(self.target, tensors, states),
            "fp32_flat_groups": masters,
        }
        return tensors.form(_optim_content(self.target, tensors, own))


def _optim_content(target: Target, tensors: Tensors, own: dict[str, Value]) -> dict[str, Value]:
    config = tensors.restored(target.config)
    return {"optimizer_state_dict": own, "ds_config": config, "ds_version": DS_VERSION}


def _scaling(target: Target) -> dict[str, Value]:
    scaler = loss_scaler(target.extras.loss_scaler, target.state.dtype)
    return {"loss_scaler": scaler, "dynamic_loss_scale": scaler.attributes["dynamic"], "overflow": False}


def _optimizer(target: Target, tensors: Tensors, states: Sequence[dict[str, Value]]) -> dict[str, Value]:
    """torch's ``Optimizer.state_dict`` of vectors instead of parameters; ``states`` are their slots."""
    whole = [
        {name: tensors.scalar(key) for name, key in flat.group.scalars.items()} | state
        for flat, state in zip(target.flat_groups, states, strict=True)
    ]
    groups = []
    for number, group in enumerate(target.state.groups):
        vectors = [position for position, flat in enumerate(target.flat_groups) if flat.number == number]
        # Of torch's own Adagrad stage 3 runs one group. stage3.py initialize_optimizer_states makes a new Adagrad over
        # all vectors, and _rigid_load_state_dict then adds each a second time, so that a fresh engine refuses even its
        # own checkpoints unless each is listed twice.
        is_adagrad = {"lr_decay", "initial_accumulator_value"} <= group.options.keys()
        twice = target.stage == 3 and is_adagrad and len(target.state.groups) == 1
        groups.append({**tensors.restored(dict(group.options)), "params": vectors * 2 if twice else vectors})
    return {"state": {number: state for number, state in enumerate(whole) if state}, "param_groups": groups}


def _mapping(group: Group, vector: Vector) -> OrderedDict:
    """The place of each parameter in a rank's vector, which ``ds_to_universal`` reads."""
    columns = (vector.params, vector.stops - vector.starts, vector.offsets)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return OrderedDict({group.params[param]: fragment_address(numel, start) for param, numel, start in rows if numel})
