"""The optimizer files, one a rank: masters, the optimizer's state, hyperparameters, loss scaler.

engine.py ``_save_zero_checkpoint``; stage_1_and_2.py and stage3.py ``state_dict``. Two keys of a native file are left
out where the source does not say, since DeepSpeed then keeps its own: ``clip_grad``, which would overrule the config
of the run that resumes; and always ``param_alignment_paddings``, without which a file of stage 1 or 2 loads whatever
``zero_optimization.parameter_alignment`` the run has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.formats.zero_writer.config import adapted
from ckpt_tools.formats.zero_writer.extras import Extras
from ckpt_tools.formats.zero_writer.objects import DS_VERSION, fragment_address, loss_scaler, zero_stage
from ckpt_tools.formats.zero_writer.partition import Cut, Vector
from ckpt_tools.formats.zero_writer.state import Group, TrainingState
from ckpt_tools.formats.zero_writer.tensors import Tensors
from ckpt_tools.layout import FileLayout
from ckpt_tools.values import OrderedDict, Value


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters in the order in which they are flattened, how they are shared out, and the number of their param
    group."""

    group: Group
    cut: Cut
    number: int


@dataclass(frozen=True, slots=True)
class OptimFiles:
    """What the optimizer files are made of."""

    state: TrainingState
    extras: Extras
    flat_groups: tuple[FlatGroup, ...]
    stage: int
    world_size: int

    def file(self, path: str, rank: int) -> FileLayout:
        tensors = Tensors(self.state.manifest)
        vectors = [flat.cut.vector(rank) for flat in self.flat_groups]
        own = self._cut_params(tensors, vectors) if self.stage == 3 else self._cut_groups(tensors, vectors)
        config = tensors.restored(adapted(self.extras.config, self.stage, self.state.dtype))
        return tensors.file(path, {"optimizer_state_dict": own, "ds_config": config, "ds_version": DS_VERSION})

    def _cut_groups(self, tensors: Tensors, vectors: Sequence[Vector]) -> dict[str, Value]:
        """Stages 1 and 2. Masters are saved without their padding, the optimizer's state with it."""
        clip_grad = self.extras.own.get("clip_grad")
        return {
            **self._scaling(),
            **({"clip_grad": clip_grad} if isinstance(clip_grad, int | float) else {}),
            "base_optimizer_state": self._optimizer(tensors, vectors),
            "single_partition_of_fp32_groups": self._masters(tensors, [vector.trimmed() for vector in vectors]),
            "zero_stage": zero_stage(self.stage),
            "group_paddings": [vector.num_padding for vector in vectors],
            "partition_count": [self.world_size] * len(vectors),
            "ds_version": DS_VERSION,
            "param_slice_mappings": [_mapping(f, v) for f, v in zip(self.flat_groups, vectors, strict=True)],
        }

    def _cut_params(self, tensors: Tensors, vectors: Sequence[Vector]) -> dict[str, Value]:
        """Stage 3. Everything is padded, parameter by parameter."""
        return {
            "zero_stage": zero_stage(self.stage),
            **self._scaling(),
            "partition_count": self.world_size,
            "optimizer_state_dict": self._optimizer(tensors, vectors),
            "fp32_flat_groups": self._masters(tensors, vectors),
        }

    def _scaling(self) -> dict[str, Value]:
        scaler = loss_scaler(self.extras.loss_scaler, self.state.dtype)
        return {"loss_scaler": scaler, "dynamic_loss_scale": scaler.attributes["dynamic"], "overflow": False}

    def _masters(self, tensors: Tensors, vectors: Sequence[Vector]) -> list[Value]:
        found = zip(self.flat_groups, vectors, strict=True)
        return [tensors.vector(vector, flat.group, flat.group.masters) for flat, vector in found]

    def _optimizer(self, tensors: Tensors, vectors: Sequence[Vector]) -> dict[str, Value]:
        """What torch's ``Optimizer.state_dict`` gives over flat groups instead of parameters."""
        found = zip(self.flat_groups, vectors, strict=True)
        states = {number: _state(tensors, flat.group, vector) for number, (flat, vector) in enumerate(found)}
        return {
            "state": {number: state for number, state in states.items() if state},
            "param_groups": [self._param_group(tensors, number) for number in range(len(self.state.groups))],
        }

    def _param_group(self, tensors: Tensors, number: int) -> dict[str, Value]:
        options = self.state.groups[number].options
        flats = [position for position, flat in enumerate(self.flat_groups) if flat.number == number]
        if self.stage == 3 and _is_adagrad(self.state.groups):
            flats *= 2
        return {**tensors.restored(dict(options)), "params": flats}


def _is_adagrad(groups: Sequence[Group]) -> bool:
    """Whether torch's own Adagrad made the groups, of which stage 3 runs only one.

    stage3.py ``initialize_optimizer_states`` makes a new Adagrad over all flat groups, and ``_rigid_load_state_dict``
    then adds each a second time, so that a fresh engine refuses even its own checkpoints unless each is listed twice.
    """
    return len(groups) == 1 and {"lr_decay", "initial_accumulator_value"} <= groups[0].options.keys()


def _state(tensors: Tensors, group: Group, vector: Vector) -> dict[str, Value]:
    scalars = {name: tensors.scalar(key) for name, key in group.scalars.items()}
    return scalars | {slot.name: tensors.vector(vector, group, slot) for slot in group.slots}


def _mapping(flat: FlatGroup, vector: Vector) -> OrderedDict:
    """Where each parameter lies in a rank's vector: what ``ds_to_universal`` reads."""
    columns = (vector.params, vector.stops - vector.starts, vector.offsets)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    params = flat.group.params
    return OrderedDict({params[param]: fragment_address(numel, start) for param, numel, start in rows if numel})
