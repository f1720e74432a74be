"""The optimizer files, one a rank: masters, the optimizer's state, hyperparameters, loss scaler.

engine.py ``_save_zero_checkpoint``; stage_1_and_2.py and stage3.py ``state_dict``. Two keys of a native file are left
out: ``clip_grad`` where the source has none, because loading it overrules the config of the run that resumes, and
``param_alignment_paddings``, without which a file loads whatever ``parameter_alignment`` the run has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpt_tools.core.layout import FileLayout
from ckpt_tools.core.values import OrderedDict, Value
from ckpt_tools.formats.deepspeed.common.partition import MOMENTUM, Vector, is_muon
from ckpt_tools.formats.deepspeed.common.pickled_objects import DS_VERSION, fragment_address, loss_scaler, zero_stage
from ckpt_tools.formats.deepspeed.common.tensor_rows import Form, Tensors, elements, rows_of
from ckpt_tools.formats.deepspeed.common.training_state import Group
from ckpt_tools.formats.deepspeed.zero_writer.target import Target


@dataclass(frozen=True, slots=True)
class GroupCutOptim:
    """Stages 1 and 2. Masters are saved without their padding, the optimizer's state with it."""

    target: Target

    def file(self, path: str, rank: int) -> FileLayout:
        tensors = Tensors(self.target.state.manifest)
        rows = [(flat, flat.cut.vector(rank)) for flat in self.target.flat_groups]
        states = [self._state(tensors, flat.group, vector) for flat, vector in rows]
        own = {
            **_scaling(self.target),
            **_clipping(self.target),
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
        return tensors.file(path, _content(self.target, tensors, own))

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
        return tensors.form(_content(self.target, tensors, own))


def _content(target: Target, tensors: Tensors, own: dict[str, Value]) -> dict[str, Value]:
    config = tensors.restored(target.config)
    return {"optimizer_state_dict": own, "ds_config": config, "ds_version": DS_VERSION}


def _scaling(target: Target) -> dict[str, Value]:
    scaler = loss_scaler(target.extras.loss_scaler, target.state.dtype)
    return {"loss_scaler": scaler, "dynamic_loss_scale": scaler.attributes["dynamic"], "overflow": False}


def _clipping(target: Target) -> dict[str, Value]:
    clip_grad = target.extras.own.get("clip_grad")
    return {"clip_grad": clip_grad} if isinstance(clip_grad, int | float) else {}


def _optimizer(target: Target, tensors: Tensors, states: Sequence[dict[str, Value]]) -> dict[str, Value]:
    """What torch's ``Optimizer.state_dict`` gives over vectors instead of parameters; ``states`` are their slots."""
    whole = [
        {name: tensors.scalar(key) for name, key in flat.group.scalars.items()} | state
        for flat, state in zip(target.flat_groups, states, strict=True)
    ]
    groups = [_param_group(target, tensors, number) for number in range(len(target.state.groups))]
    return {"state": {number: state for number, state in enumerate(whole) if state}, "param_groups": groups}


def _param_group(target: Target, tensors: Tensors, number: int) -> dict[str, Value]:
    """A group's hyperparameters and the numbers of its vectors."""
    options = target.state.groups[number].options
    vectors = [position for position, flat in enumerate(target.flat_groups) if flat.number == number]
    if target.stage == 3 and _is_adagrad(target.state.groups):
        vectors *= 2
    return {**tensors.restored(dict(options)), "params": vectors}


def _is_adagrad(groups: Sequence[Group]) -> bool:
    """Whether torch's own Adagrad made the groups, of which stage 3 runs only one.

    stage3.py ``initialize_optimizer_states`` makes a new Adagrad over all vectors, and ``_rigid_load_state_dict`` then
    adds each a second time, so that a fresh engine refuses even its own checkpoints unless each is listed twice.
    """
    return len(groups) == 1 and {"lr_decay", "initial_accumulator_value"} <= groups[0].options.keys()


def _mapping(group: Group, vector: Vector) -> OrderedDict:
    """Where each parameter lies in a rank's vector: what ``ds_to_universal`` reads."""
    columns = (vector.params, vector.stops - vector.starts, vector.offsets)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return OrderedDict({group.params[param]: fragment_address(numel, start) for param, numel, start in rows if numel})
