"""Writes one folder from which DeepSpeed resumes in stages 1, 2 and 3, at any world size.

DeepSpeed's own converter writes shaped dicts for stages 1 and 2 or bare flat tensors for stage 3, and neither loads in
the other. But the loader of stage 3 takes the dicts too, and needs only ``optimizer_state_dict`` in
``optimizer_state.pt``, which those of stages 1 and 2 ignore: stage3.py ``load_hp_checkpoint_state``, base_optimizer.py
``load_hp_checkpoint_state_from_checkpoint_dir``. docs/formats/universal.md says what each restores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ckpt_tools.core.boxes import Box, Shape, contiguous_strides
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, Layout, Literal, Padding, Payload, Segment, merge_literals
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, ParamGroup, StateKey
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.core.values import OrderedDict, StorageRef, StoredTensor, Value
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.deepspeed.common.pickled_objects import DS_VERSION, is_active_scaler, make_loss_scaler
from ckpt_tools.formats.deepspeed.common.tags import validate_tag
from ckpt_tools.formats.deepspeed.common.tensor_rows import TorchFileBuilder, make_counters
from ckpt_tools.formats.deepspeed.common.training_state import TrainingState
from ckpt_tools.formats.deepspeed.common.written_extras import DeepSpeedExtras
from ckpt_tools.formats.deepspeed.names import (
    LATEST_UNIVERSAL,
    OPTIMIZER_STATE_FILE,
    UNIVERSAL_MASTER_SLOT,
    model_file_name,
    rank_model_file_name,
    split_expert_name,
)
from ckpt_tools.formats.deepspeed.universal.loader_limits import (
    STEP_SLOT,
    correct_scaler_notes,
    drop_unportable_state,
    make_loader_notes,
    select_shared_options,
)
from ckpt_tools.formats.deepspeed.universal.states import IS_EXPERT_FIELD
from ckpt_tools.serialization.torch_zip import get_archive_root, make_archive_segments
from ckpt_tools.stores.source import check_file_name

UNIVERSAL_VERSION = 0.4
"""checkpoint/constants.py ``UNIVERSAL_CHECKPOINT_VERSION_VALUE``; only tensor-parallel loads look at it."""

MAX_FOLDER_BYTES = 255

_PARAMETER_FOLDER = re.compile(r"(?!\.)(?!.*\.pt\Z)[^\\\0]+", re.DOTALL)
"""A folder of a parameter: hidden ones are not listed, and the files in others end in ``.pt``."""


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    """Raises UnsupportedError if the weights have no dtype that DeepSpeed trains in, or a name that cannot be a folder;
    UsageError for a tag that cannot name a folder."""
    grouped_manifest = manifest
    if not manifest.groups:
        # Without groups, all parameters are one group without hyperparameters.
        weights = tuple(key.fqn for key in manifest.select_kinds(Kind.PARAMETER) if key.slot == WEIGHT)
        grouped_manifest = replace(manifest, groups=(ParamGroup(weights, {}),))
    state = TrainingState.of(grouped_manifest)
    extras = DeepSpeedExtras.of(manifest, state.dtype)
    state = replace(state, groups=drop_unportable_state(state.groups))
    tag = validate_tag(options.tag or extras.tag, latest_file=LATEST_UNIVERSAL)
    output = _UniversalOutput(state, extras, f"{tag}/", has_source_groups=bool(manifest.groups))
    files = [
        *output.build_parameter_files(),
        output.build_optimizer_file(),
        *output.build_model_files(),
        FileLayout(LATEST_UNIVERSAL, (Literal(tag.encode()),)),
    ]
    notes = (*state.notes, *correct_scaler_notes(extras.notes), *make_loader_notes(state, extras))
    return Layout(files, notes, uncast_buffers=state.buffers.keys())


@dataclass(frozen=True, slots=True)
class _UniversalOutput:
    """Builds the files of a tag folder, whose paths start with ``prefix``. ``has_source_groups`` says whether the
    source has param groups."""

    state: TrainingState
    extras: DeepSpeedExtras
    prefix: str
    has_source_groups: bool

    def build_parameter_files(self) -> Iterator[FileLayout]:
        """The files of the master, the slots and the step of each parameter."""
        for group in self.state.groups:
            named_slots = [(UNIVERSAL_MASTER_SLOT, group.masters), *((slot.name, slot) for slot in group.slots)]
            for position, fqn in enumerate(group.params):
                box = Box.whole(self.state.get_weight(fqn).shape)
                is_expert = split_expert_name(fqn) is not None
                for name, slot in named_slots:
                    path, key = self._make_path(fqn, name), slot.keys[position]
                    # Zeros where the parameter has no such slot and others of its group have.
                    elements = (
                        Padding(box.numel * slot.dtype.item_bytes)
                        if key is None
                        else Payload(key, box, box.shape, slot.dtype)
                    )
                    template = _build_slot_segments(get_archive_root(path), box.shape, slot.dtype, is_expert)
                    segments = (elements if isinstance(segment, Payload) else segment for segment in template)
                    yield FileLayout(path, tuple(segments))
                if STEP_SLOT in group.scalars:
                    builder = TorchFileBuilder(self.state.manifest)
                    step = builder.add_scalar(group.scalars[STEP_SLOT])
                    yield builder.build_file(self._make_path(fqn, STEP_SLOT), step)

    def _make_path(self, fqn: str, slot: str) -> str:
        path = check_file_name(f"{self.prefix}zero/{fqn}/{slot}.pt")
        folders = fqn.split("/")
        if not all(_PARAMETER_FOLDER.fullmatch(each) and len(each.encode()) <= MAX_FOLDER_BYTES for each in folders):
            why = f"the tensor is called {fqn!r:.80}, which cannot be a folder of universal; rename it with"
            raise UnsupportedError(f"{why} {format_option('rename')}")
        return path

    def build_optimizer_file(self) -> FileLayout:
        """``optimizer_state.pt``: ``param_groups`` are for stages 1 and 2, ``optimizer_state_dict`` with one step for
        stage 3."""
        builder = TorchFileBuilder(self.state.manifest)
        options = [dict(group.options) for group in self.state.groups]
        steps = [group.scalars[STEP_SLOT] for group in self.state.groups if STEP_SLOT in group.scalars]
        value = {
            **self._make_scaler_entries(builder),
            "ds_version": DS_VERSION,
            "param_groups": [builder.add_referenced_tensors({**one, "params": [i]}) for i, one in enumerate(options)],
            "optimizer_state_dict": {
                "state": {0: {STEP_SLOT: builder.add_scalar(steps[0])} if steps else {}},
                "param_groups": [builder.add_referenced_tensors({**select_shared_options(options), "params": [0]})],
            },
        }
        if not self.has_source_groups:
            # Stages 1 and 2 load as many groups as they find here: enough for a job that has any number of them.
            value["param_groups"] = [{"params": []}] * sum(len(group.params) for group in self.state.groups)
        return builder.build_file(self.prefix + OPTIMIZER_STATE_FILE, value)

    def build_model_files(self) -> Iterator[FileLayout]:
        """The two model files, for stages 1 and 2 and for stage 3.

        engine.py ``_load_checkpoint``: with ``load_universal`` every rank takes counters, scheduler and client state
        from one of them and skips ``module``. So trained weights are there at size 0, as stage 3 itself writes them:
        every rank would read them for nothing, and they are the casts of the masters. Frozen weights and buffers, which
        are nowhere else, are in the first file alone.
        """
        state, aliases = self.state, self.state.manifest.aliases
        universal_info = {"universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION}}
        for name in (model_file_name(), rank_model_file_name(0)):
            builder = TorchFileBuilder(state.manifest)
            value = {
                "module": self._build_module(builder) if name == model_file_name() else OrderedDict(),
                "buffer_names": [*state.buffers, *(alias for alias, name in aliases.items() if name in state.buffers)],
                "optimizer": None,
                "param_shapes": [state.make_param_shapes(group.params) for group in state.groups],
                "frozen_param_shapes": state.make_param_shapes(state.frozen),
                "frozen_param_fragments": None,
                "shared_params": state.ties,
                **universal_info,
                **make_counters(self.extras, builder, state.manifest.world_size or 1, self.extras.config),
                **builder.add_referenced_tensors(dict(self.extras.client_state)),
            }
            yield builder.build_file(self.prefix + name, value)

    def _build_module(self, builder: TorchFileBuilder) -> OrderedDict:
        """The model's state dict: tensors in the order of the source, then ties under their other names, then values
        that are not tensors. Trained weights are empty."""
        trained = {name for group in self.state.groups for name in group.params}
        empty_tensor = builder.add_tensor([], self.state.dtype, (0,))
        whole_entries = {**self.state.frozen, **self.state.buffers}
        value_by_name: dict[str, Value] = {}
        for fqn in dict.fromkeys(key.fqn for key in self.state.manifest.tensors):
            if fqn in trained:
                value_by_name[fqn] = empty_tensor
            elif fqn in whole_entries:
                value_by_name[fqn] = builder.add_whole_tensor(StateKey(fqn), whole_entries[fqn])
        value_by_name |= {
            alias: value_by_name[owner]
            for alias, owner in self.state.manifest.aliases.items()
            if owner in value_by_name
        }
        return OrderedDict({**value_by_name, **builder.add_referenced_tensors(dict(self.extras.module))})

    def _make_scaler_entries(self, builder: TorchFileBuilder) -> dict[str, Value]:
        """Those of ``overflow``, ``clip_grad`` and the loss scaler that the source has; the job keeps its own for any
        other."""
        deepspeed_entries, dtype = self.extras.deepspeed_entries, self.state.dtype
        entries: dict[str, Value] = {
            name: deepspeed_entries[name]
            for name in ("overflow", "clip_grad")
            if deepspeed_entries.get(name) is not None
        }
        source_scaler, is_fp16 = self.extras.loss_scaler, dtype is DType.FLOAT16
        if source_scaler is not None and is_active_scaler(source_scaler) == is_fp16:
            scaler = make_loss_scaler(source_scaler, dtype)
            is_dynamic = isinstance(scaler.state, dict) and scaler.state.get("dynamic") is True
            entries |= {"loss_scaler": builder.add_referenced_tensors(scaler), "dynamic_loss_scale": is_dynamic}
        return entries


@lru_cache(maxsize=4096)
def _build_slot_segments(root: str, shape: Shape, dtype: DType, is_expert: bool) -> tuple[Segment, ...]:
    """The segments of a slot's file of this shape and dtype. The one that is a ``Payload`` stands for the elements,
    which differ from parameter to parameter.

    ``cat_dim`` is that of ds_to_universal.py ``merge_tp_slices`` without tensor parallelism. A job with several
    expert-parallel ranks would take the experts of rank 0 on all of them; the mark without a number of experts makes it
    stop (universal_checkpoint.py ``load_hp_checkpoint_state``).
    """
    storage_ref = StorageRef.of_elements("0", dtype, prod(shape))
    tensor = StoredTensor(storage_ref, dtype, 0, shape, contiguous_strides(shape))
    content: dict[str, Any] = {"cat_dim": 0, "param": tensor, **({IS_EXPERT_FIELD: True} if is_expert else {})}
    placeholder = Payload(StateKey(""), Box.whole(shape), shape, dtype)
    return tuple(merge_literals(make_archive_segments(content, {"0": [placeholder]}, root=root)))
