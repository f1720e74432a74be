"""The two model files: counters, scheduler and client state for DeepSpeed, frozen weights and buffers for readers.

engine.py ``_load_checkpoint``: with ``load_universal`` every rank opens ``mp_rank_00_model_states.pt`` (stages 1, 2) or
``zero_pp_rank_0_mp_rank_00_model_states.pt`` (stage 3), takes counters, scheduler and client state from it, and skips
``module``. So trained weights are there at size 0, as stage 3 itself writes them: every rank would read them for
nothing, and they are the casts of the masters. Frozen weights and buffers, which are nowhere else, are in the first
file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.layout import FileLayout
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.values import OrderedDict, Size, StoredTensor, Value
from ckpt_tools.formats.deepspeed.common.pickled_objects import DS_VERSION
from ckpt_tools.formats.deepspeed.common.tensor_rows import Tensors
from ckpt_tools.formats.deepspeed.common.training_state import TrainingState
from ckpt_tools.formats.deepspeed.common.written_extras import Extras
from ckpt_tools.formats.deepspeed.names import model_name, rank_model_name

UNIVERSAL_VERSION = 0.4
"""checkpoint/constants.py ``UNIVERSAL_CHECKPOINT_VERSION_VALUE``; only tensor-parallel loads look at it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What both files are made of."""

    state: TrainingState
    extras: Extras

    def layouts(self, prefix: str) -> list[FileLayout]:
        """The files of all stages, below ``prefix``."""
        return [
            self._file(prefix + model_name(), self._module),
            self._file(prefix + rank_model_name(0), lambda tensors: OrderedDict()),
        ]

    def _file(self, path: str, make_module: Any) -> FileLayout:
        tensors = Tensors(self.state.manifest)
        value = {"module": make_module(tensors), **self._names(), **self._counters(tensors)}
        value |= {name: tensors.restored(item) for name, item in self.extras.client_state.items()}
        return tensors.file(path, value)

    def _module(self, tensors: Tensors) -> OrderedDict:
        """Names in the model's order, and each tie after them under its other names."""
        trained = {name for group in self.state.groups for name in group.params}
        empty = tensors.add([], self.state.dtype, (0,))
        whole = {**self.state.frozen, **self.state.buffers}
        found: dict[str, Value] = {}
        for fqn in dict.fromkeys(key.fqn for key in self.state.manifest.tensors):
            if fqn in trained:
                found[fqn] = empty
            elif fqn in whole:
                found[fqn] = self._whole(tensors, fqn)
        found |= {alias: found[owner] for alias, owner in self.state.manifest.aliases.items() if owner in found}
        return OrderedDict({**found, **tensors.restored(self._module_values)})

    def _whole(self, tensors: Tensors, fqn: str) -> StoredTensor:
        return tensors.whole(StateKey(fqn), {**self.state.frozen, **self.state.buffers}[fqn])

    @property
    def _module_values(self) -> dict[str, Value]:
        """``_extra_state`` of modules, which is no tensor."""
        found = self.extras.own.get("module")
        return found if isinstance(found, dict) else {}

    def _names(self) -> dict[str, Value]:
        aliases, buffers = self.state.manifest.aliases, self.state.buffers
        return {
            "buffer_names": [*buffers, *(alias for alias, owner in aliases.items() if owner in buffers)],
            "optimizer": None,
            "param_shapes": [self._shapes(group.params) for group in self.state.groups],
            "frozen_param_shapes": self._shapes(tuple(self.state.frozen)),
            "frozen_param_fragments": None,
            "shared_params": {alias: owner for alias, owner in aliases.items() if owner not in buffers},
        }

    def _shapes(self, names: tuple[str, ...]) -> OrderedDict:
        return OrderedDict({name: Size(self.state.manifest.tensors[StateKey(name)].shape) for name in names})

    def _counters(self, tensors: Tensors) -> dict[str, Value]:
        found: dict[str, Value] = {
            "lr_scheduler": self.extras.lr_scheduler,
            "skipped_steps": 0,
            "global_steps": self.extras.global_steps,
            "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
            **self.extras.counters,
            "dp_world_size": self.state.manifest.world_size or 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": dict(self.extras.config),
            "ds_version": DS_VERSION,
        }
        return {name: tensors.restored(value) for name, value in found.items()}
