"""The model files: weights and buffers, names and shapes, counters and client state.

engine.py ``_save_checkpoint`` and ``_common_checkpoint_state``. Stages 1 and 2 have one file with whole weights. Stage
3 has one a rank, whose module holds empty tensors in the place of parameters, since ``load_checkpoint`` fills them from
the optimizer's masters, and this rank's part of each frozen one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, Padding, Payload, Segment
from ckpt_tools.core.manifest import WEIGHT, Kind, StateKey
from ckpt_tools.core.values import OrderedDict, Size, StoredTensor, Value
from ckpt_tools.formats.deepspeed.common.partition import ParamCut
from ckpt_tools.formats.deepspeed.common.pickled_objects import DS_VERSION
from ckpt_tools.formats.deepspeed.common.tensor_rows import Form, Tensors
from ckpt_tools.formats.deepspeed.common.training_state import TrainingState
from ckpt_tools.formats.deepspeed.zero_writer.target import Target


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Stages 1 and 2: one file, of rank 0. Stage 1 says nothing of frozen parameters but their weights."""

    target: Target

    def file(self, path: str) -> FileLayout:
        tensors = Tensors(self.target.state.manifest)
        weights = self._weights(tensors)
        frozen = {name: weights[name] for name in self.target.state.frozen}
        return tensors.file(path, _content(self.target, tensors, weights, frozen, rank=0))

    def _weights(self, tensors: Tensors) -> dict[str, StoredTensor]:
        state = self.target.state
        trained = [name for group in state.groups for name in group.params]
        found = {name: tensors.whole(_source(state, name), state.weight(name)) for name in trained}
        return found | {name: tensors.whole(StateKey(name), entry) for name, entry in state.frozen.items()}


def _source(state: TrainingState, name: str) -> StateKey:
    """What a trained weight is read from. In fp32 it is its master, of which it may be a rounded copy."""
    return state.master(name) if state.dtype is DType.FLOAT32 else StateKey(name)


@dataclass(frozen=True)
class CutModel:
    """Stage 3: one file a rank. They differ in the parts of frozen parameters, and in that only rank 0's names ties."""

    target: Target

    def file(self, path: str, rank: int) -> FileLayout:
        form = self._first_form if rank == 0 else self._other_form
        return form.filled(path, self._frozen_parts(rank))

    @cached_property
    def _first_form(self) -> Form:
        return self._form(rank=0)

    @cached_property
    def _other_form(self) -> Form:
        return self._form(rank=1)

    def _form(self, rank: int) -> Form:
        tensors = Tensors(self.target.state.manifest)
        frozen = self.target.state.frozen
        shares = self._frozen_cut.shares.tolist()
        parts = {name: tensors.hole(e.dtype, share) for (name, e), share in zip(frozen.items(), shares, strict=True)}
        return tensors.form(_content(self.target, tensors, self._empty_weights(tensors), parts, rank=rank))

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


def _content(
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
        "param_shapes": [OrderedDict(_shapes(state, flat.group.params)) for flat in target.flat_groups],
        "frozen_param_shapes": OrderedDict(_shapes(state, state.frozen)) if lists_frozen else None,
        "shared_params": _ties(state) if rank == 0 else {},
        "frozen_param_fragments": OrderedDict(frozen) if lists_frozen else None,
        **_counters(target, tensors),
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


def _shapes(state: TrainingState, names: Iterable[str]) -> dict[str, Size]:
    return {name: Size(state.weight(name).shape) for name in names}


def _ties(state: TrainingState) -> dict[str, str]:
    """Of parameters alone."""
    return {alias: owner for alias, owner in state.manifest.aliases.items() if owner not in state.buffers}


def _counters(target: Target, tensors: Tensors) -> dict[str, Value]:
    """Without ``global_samples``, ``data_sampler`` and ``random_ltd`` where the source does not have them: DeepSpeed
    then takes steps times its batch size, and a run with a data sampler or random-LTD starts these afresh. None would
    end in an error there."""
    extras = target.extras
    return {
        "lr_scheduler": tensors.restored(extras.lr_scheduler),
        "skipped_steps": 0,
        "global_steps": extras.global_steps,
        **tensors.restored(dict(extras.counters)),
        "dp_world_size": target.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": tensors.restored(target.config),
        "ds_version": DS_VERSION,
    }
