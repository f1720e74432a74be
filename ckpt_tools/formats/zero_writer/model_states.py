"""The model files: weights and buffers, names and shapes, counters and client state.

engine.py ``_save_checkpoint`` and ``_common_checkpoint_state``. Stages 1 and 2 have one file with whole weights. Stage
3 has one a rank, whose module holds empty tensors in the place of parameters, since ``load_checkpoint`` fills them from
the optimizer's masters, and this rank's part of each frozen one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.boxes import Box
from ckpt_tools.dtypes import DType
from ckpt_tools.formats.zero_writer.config import adapted
from ckpt_tools.formats.zero_writer.extras import Extras
from ckpt_tools.formats.zero_writer.objects import DS_VERSION
from ckpt_tools.formats.zero_writer.partition import ParamCut
from ckpt_tools.formats.zero_writer.state import Group, TrainingState
from ckpt_tools.formats.zero_writer.tensors import Tensors
from ckpt_tools.layout import FileLayout, Padding, Payload
from ckpt_tools.manifest import WEIGHT, Kind, StateKey, TensorEntry
from ckpt_tools.values import OrderedDict, Size, StoredTensor, Value


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the model files are made of; ``flat_groups`` are the param groups, or the sub-groups of stage 3, as they are
    flattened."""

    state: TrainingState
    extras: Extras
    flat_groups: tuple[Group, ...]
    stage: int
    world_size: int

    def file(self, path: str, rank: int) -> FileLayout:
        """The file of ``rank``; in stages 1 and 2 only rank 0 has one."""
        tensors = Tensors(self.state.manifest)
        module = self._module(tensors)
        value = self._model(tensors, module, rank) | self._counters(tensors)
        return tensors.file(path, value | tensors.restored(dict(self.extras.client_state)))

    # Weights and buffers

    def _module(self, tensors: Tensors) -> OrderedDict:
        manifest = self.state.manifest
        weights = self._cut_weights(tensors) if self.stage == 3 else self._whole_weights(tensors)
        buffers = {name: tensors.whole(StateKey(name), entry) for name, entry in self.state.buffers.items()}
        found = weights | buffers
        order = (key.fqn for key, e in manifest.tensors.items() if key.slot == WEIGHT and e.kind is not Kind.EXTRA)
        module: dict[str, Value] = {name: found[name] for name in order}
        module |= {alias: found[owner] for alias, owner in manifest.aliases.items() if owner in found}
        return OrderedDict(module | tensors.restored(_dict(self.extras.own.get("module"))))

    def _whole_weights(self, tensors: Tensors) -> dict[str, StoredTensor]:
        trained = {name: key for group in self.flat_groups for name, key in self._trained(group)}
        weights = {name: tensors.whole(key, self._weight(name)) for name, key in trained.items()}
        return weights | {name: tensors.whole(StateKey(name), entry) for name, entry in self.state.frozen.items()}

    def _trained(self, group: Group) -> list[tuple[str, StateKey]]:
        """The tensor that each weight of a group is read from: in fp32 it is its master."""
        if self.state.dtype is not DType.FLOAT32:
            return [(name, StateKey(name)) for name in group.params]
        return [(name, key or StateKey(name)) for name, key in zip(group.params, group.masters.keys, strict=True)]

    def _weight(self, name: str) -> TensorEntry:
        return self.state.manifest.tensors[StateKey(name)]

    def _cut_weights(self, tensors: Tensors) -> dict[str, StoredTensor]:
        """Empty tensors, all on one empty storage a type."""
        trained = {name: self._weight(name) for group in self.flat_groups for name in group.params}
        entries = trained | dict(self.state.frozen)
        empty = {dtype: tensors.add([], dtype, (0,)).storage for dtype in {e.dtype: None for e in entries.values()}}
        return {name: StoredTensor(empty[e.dtype], e.dtype, 0, (0,), (1,)) for name, e in entries.items()}

    # Names and shapes

    def _model(self, tensors: Tensors, module: OrderedDict, rank: int) -> dict[str, Value]:
        aliases, buffers = self.state.manifest.aliases, self.state.buffers
        return {
            "module": module,
            "buffer_names": [name for name in module if aliases.get(name, name) in buffers],
            "optimizer": None,
            "param_shapes": [OrderedDict(self._shapes(group.params)) for group in self.flat_groups],
            "frozen_param_shapes": None if self.stage == 1 else OrderedDict(self._shapes(self.state.frozen)),
            "shared_params": self._ties() if rank == 0 else {},
            "frozen_param_fragments": self._fragments(tensors, module, rank),
        }

    def _shapes(self, names: Mapping[str, TensorEntry] | tuple[str, ...]) -> dict[str, Size]:
        return {name: Size(self._weight(name).shape) for name in names}

    def _ties(self) -> dict[str, str]:
        """Of parameters; only rank 0 says."""
        return {alias: owner for alias, owner in self.state.manifest.aliases.items() if owner not in self.state.buffers}

    def _fragments(self, tensors: Tensors, module: OrderedDict, rank: int) -> OrderedDict | None:
        if self.stage == 1:
            return None
        if self.stage == 2:
            return OrderedDict({name: module[name] for name in self.state.frozen})
        return OrderedDict(self._frozen_pieces(tensors, rank))

    def _frozen_pieces(self, tensors: Tensors, rank: int) -> dict[str, StoredTensor]:
        """Stage 3 cuts a frozen parameter as it does the others, and keeps it in its own type."""
        frozen = self.state.frozen
        vector = ParamCut.of([entry.numel for entry in frozen.values()], self.world_size).vector(rank)
        columns = (vector.starts.tolist(), vector.stops.tolist(), vector.paddings.tolist())
        found = {}
        for (name, entry), start, stop, padding in zip(frozen.items(), *columns, strict=True):
            payload = Payload(StateKey(name), Box((start,), (stop,)), (entry.numel,), entry.dtype)
            zeros = Padding(padding * entry.dtype.item_bytes)
            found[name] = tensors.add([payload, zeros], entry.dtype, (stop - start + padding,))
        return found

    # Counters

    def _counters(self, tensors: Tensors) -> dict[str, Value]:
        """Without ``global_samples`` where the source does not say: DeepSpeed then takes steps times its batch size."""
        return {
            "lr_scheduler": tensors.restored(self.extras.lr_scheduler),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": self.extras.global_steps,
            **tensors.restored(dict(self.extras.counters)),
            "dp_world_size": self.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": tensors.restored(adapted(self.extras.config, self.stage, self.state.dtype)),
            "ds_version": DS_VERSION,
        }


def _dict(found: Value) -> dict[str, Value]:
    return found if isinstance(found, dict) else {}
