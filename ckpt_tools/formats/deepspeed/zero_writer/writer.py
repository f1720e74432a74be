"""A manifest as a native ZeRO checkpoint for any number of ranks.

The files of a rank are made on demand: a thousand ranks of a thousand parameters are millions of intervals, and a
conversion works through the files one after the other.

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
from ckpt_tools.core.layout import (
    FileLayout,
    FileLayoutCache,
    FileSpec,
    Layout,
    LazyFile,
    Literal,
    Padding,
    Payload,
    Segment,
)
from ckpt_tools.core.limits import check_ranks_by_elements
from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.core.values import OrderedDict, StoredTensor, Value
from ckpt_tools.formats.deepspeed.common.partition import (
    MUON_MOMENTUM_SLOT,
    GroupPartition,
    ParamPartition,
    VectorLayout,
    is_muon,
    round_robin_order,
    split_sub_groups,
)
from ckpt_tools.formats.deepspeed.common.pickled_objects import (
    DS_VERSION,
    make_fragment_address,
    make_loss_scaler,
    make_zero_stage,
)
from ckpt_tools.formats.deepspeed.common.tags import validate_tag
from ckpt_tools.formats.deepspeed.common.tensor_rows import (
    FileTemplate,
    TorchFileBuilder,
    build_vector_segments,
    list_vector_rows,
    make_counters,
)
from ckpt_tools.formats.deepspeed.common.training_state import TrainingGroup, TrainingState
from ckpt_tools.formats.deepspeed.common.written_extras import DeepSpeedExtras, PartitionSettings, adapt_config
from ckpt_tools.formats.deepspeed.names import (
    LATEST,
    model_file_name,
    optim_file_name,
    rank_model_file_name,
    split_expert_name,
)
from ckpt_tools.state_tree.frozen_or_buffer import note_guesses


def layout(manifest: Manifest, options: WriteOptions, stage: int) -> Layout:
    """Raises UnsupportedError if the weights have no dtype that DeepSpeed trains in; UsageError for a tag that cannot
    name a folder, or for too many ranks."""
    check_ranks_by_elements(manifest, options.world_size)
    target = ZeroTarget.of(manifest, stage, options.world_size)
    tag = validate_tag(options.tag or target.extras.tag, latest_file=LATEST)
    state = target.state
    notes = [*state.notes, *target.extras.notes]
    if stage == 3:  # Only this stage stores frozen parameters and buffers in different ways.
        notes += note_guesses(state.guessed_names, state.frozen, state.buffers)
    if any(split_expert_name(key.fqn) for key in manifest.tensors):
        why = (
            "they are in the model's file, and a job with deepspeed.moe stops without files of experts; load it in a "
            "model of the same names without deepspeed.moe, or convert to universal"
        )
        notes.append(Note(Outcome.KEPT, "experts", why))
    return Layout(ZeroFiles.of(tag, target).list_files(), tuple(notes), uncast_buffers=state.buffers.keys())


@dataclass(frozen=True, slots=True)
class ZeroFiles:
    """The files of a checkpoint by number: first the model's, then the optimizer's of each rank. ``latest``, which
    makes the checkpoint valid, is the last file and has no number."""

    tag: str
    target: ZeroTarget
    model_writer: WholeModelWriter | PartitionedModelWriter
    optim_writer: GroupOptimWriter | ParamOptimWriter

    @classmethod
    def of(cls, tag: str, target: ZeroTarget) -> ZeroFiles:
        if target.stage == 3:
            return cls(tag, target, PartitionedModelWriter(target), ParamOptimWriter(target))
        return cls(tag, target, WholeModelWriter(target), GroupOptimWriter(target))

    def list_files(self) -> list[FileSpec]:
        """All files in order; those of ranks are made on demand."""
        cache = FileLayoutCache(self.build_file)
        numbers = range(self.num_model_files + self.target.world_size)
        rank_files = [
            LazyFile(self._make_path(n), cache.get_layout(self._find_same_size_file(n)).size_bytes, n, cache)
            for n in numbers
        ]
        return [*rank_files, FileLayout(LATEST, (Literal(self.tag.encode()),))]

    def build_file(self, number: int) -> FileLayout:
        path = self._make_path(number)
        if number >= self.num_model_files:
            return self.optim_writer.build_file(path, number - self.num_model_files)
        return self.model_writer.build_file(path, number)

    @property
    def num_model_files(self) -> int:
        return self.target.world_size if isinstance(self.model_writer, PartitionedModelWriter) else 1

    def _find_same_size_file(self, number: int) -> int:
        """The number of a file of the same size, which is built in place of this one to know its size.

        In stage 3 the files of ranks differ in their elements, and in size only by the number of digits of the rank in
        their names, which the zip repeats, and in that rank 0 names the ties. So rank 0, 1, 10, 100 ... are built.
        """
        if self.target.stage < 3:
            return number
        first = self.num_model_files if number >= self.num_model_files else 0
        rank = number - first
        return first + (10 ** (len(str(rank)) - 1) if rank else 0)

    def _make_path(self, number: int) -> str:
        rank = number - self.num_model_files
        if rank >= 0:  # engine.py _get_zero_ckpt_prefix
            prefix = "bf16_" if self.target.state.dtype is DType.BFLOAT16 else ""
            return f"{self.tag}/{prefix}{optim_file_name(rank)}"
        is_partitioned = isinstance(self.model_writer, PartitionedModelWriter)
        return f"{self.tag}/{rank_model_file_name(number) if is_partitioned else model_file_name()}"


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters in the order in which they are flattened, their partition, and the number of their param group."""

    group: TrainingGroup
    partition: GroupPartition | ParamPartition
    group_number: int


@dataclass(frozen=True, slots=True)
class ZeroTarget:
    """The training state flattened for a stage and a number of ranks. ``flat_groups`` are the vectors of a rank: one a
    param group, or in stage 3 one a sub-group. ``has_whole_momentum`` says that Muon's have whole parameters."""

    state: TrainingState
    extras: DeepSpeedExtras
    flat_groups: tuple[FlatGroup, ...]
    stage: int
    world_size: int
    has_whole_momentum: bool = False

    @classmethod
    def of(cls, manifest: Manifest, stage: int, world_size: int) -> ZeroTarget:
        state = TrainingState.of(manifest)
        extras = DeepSpeedExtras.of(manifest, state.dtype)
        settings = PartitionSettings.of(extras.config, stage, state.dtype)
        flat_groups: list[FlatGroup] = []
        for number, group in enumerate(state.groups):
            if stage < 3:
                order = round_robin_order(len(group.params), world_size if settings.is_round_robin else 1)
                part = group.select_positions(order)
                flat_groups.append(FlatGroup(part, GroupPartition.of(part.numels, world_size), number))
            else:
                shares = ParamPartition.of(group.numels, world_size).shares.tolist()
                for positions in split_sub_groups(shares, settings.sub_group_size):
                    part = group.select_positions(positions)
                    flat_groups.append(FlatGroup(part, ParamPartition.of(part.numels, world_size), number))
        return cls(state, extras, tuple(flat_groups), stage, world_size, settings.has_whole_momentum)

    @property
    def config(self) -> dict[str, Value]:
        return adapt_config(self.extras.config, self.stage, self.state.dtype)


@dataclass(frozen=True, slots=True)
class WholeModelWriter:
    """Stages 1 and 2: one file, of rank 0. Stage 1 has the weights of frozen parameters and does not list them."""

    target: ZeroTarget

    def build_file(self, path: str, rank: int) -> FileLayout:
        state = self.target.state
        builder = TorchFileBuilder(state.manifest)
        # In fp32 a trained weight is read from its master; its own value may be a rounded copy of it.
        find_source_key = state.find_master_key if state.dtype is DType.FLOAT32 else StateKey
        trained = [name for group in state.groups for name in group.params]
        weights = {name: builder.add_whole_tensor(find_source_key(name), state.get_weight(name)) for name in trained}
        frozen = {name: builder.add_whole_tensor(StateKey(name), entry) for name, entry in state.frozen.items()}
        return builder.build_file(path, _build_model_content(self.target, builder, weights | frozen, frozen, rank=rank))


@dataclass(frozen=True)
class PartitionedModelWriter:
    """Stage 3: one file a rank. They differ in the parts of frozen parameters, and in that only rank 0's names ties."""

    target: ZeroTarget

    def build_file(self, path: str, rank: int) -> FileLayout:
        first_template, other_template = self._templates
        return (first_template if rank == 0 else other_template).fill_holes(path, self._build_frozen_parts(rank))

    @cached_property
    def _templates(self) -> tuple[FileTemplate, FileTemplate]:
        """Those of rank 0 and of all others, which differ in holes alone: two pickles for a thousand files."""
        return self._build_template(rank=0), self._build_template(rank=1)

    def _build_template(self, rank: int) -> FileTemplate:
        builder = TorchFileBuilder(self.target.state.manifest)
        frozen = self.target.state.frozen
        shares = zip(frozen.items(), self._frozen_partition.shares.tolist(), strict=True)
        frozen_parts = {name: builder.add_hole(entry.dtype, share) for (name, entry), share in shares}
        weights = self._make_empty_weights(builder)
        return builder.build_template(_build_model_content(self.target, builder, weights, frozen_parts, rank=rank))

    def _make_empty_weights(self, builder: TorchFileBuilder) -> dict[str, StoredTensor]:
        """Empty tensors in place of all weights, on one storage a dtype: a storage for each would be most of the
        file."""
        state = self.target.state
        trained = {name: state.get_weight(name) for group in state.groups for name in group.params}
        entries = {**trained, **state.frozen}
        dtypes = dict.fromkeys(entry.dtype for entry in entries.values())
        storage_by_dtype = {dtype: builder.add_tensor([], dtype, (0,)).storage for dtype in dtypes}
        return {name: StoredTensor(storage_by_dtype[e.dtype], e.dtype, 0, (0,), (1,)) for name, e in entries.items()}

    @cached_property
    def _frozen_partition(self) -> ParamPartition:
        return ParamPartition.of([entry.numel for entry in self.target.state.frozen.values()], self.target.world_size)

    def _build_frozen_parts(self, rank: int) -> list[list[Segment]]:
        """The contents of a rank's holes: its part of each frozen parameter, in the dtype of that."""
        vector_layout = self._frozen_partition.lay_out_rank(rank)
        columns = (vector_layout.starts.tolist(), vector_layout.stops.tolist(), vector_layout.paddings.tolist())
        frozen_segments: list[list[Segment]] = []
        for (name, entry), start, stop, padding in zip(self.target.state.frozen.items(), *columns, strict=True):
            payload = Payload(StateKey(name), Box((start,), (stop,)), (entry.numel,), entry.dtype)
            frozen_segments.append([payload, Padding(padding * entry.dtype.item_bytes)])
        return frozen_segments


def _build_model_content(
    target: ZeroTarget,
    builder: TorchFileBuilder,
    weights: Mapping[str, StoredTensor],
    frozen: Mapping[str, StoredTensor],
    *,
    rank: int,
) -> dict[str, Value]:
    """The dictionary of a model file. ``weights`` are the tensors in ``module``, ``frozen`` the fragments of frozen
    parameters. Stage 1 does not list frozen parameters, nor does a checkpoint of weights alone, whose ``module`` has
    everything."""
    state = target.state
    module = _build_module(target, builder, weights)
    lists_frozen = target.stage > 1 and bool(state.manifest.groups)
    return {
        "module": module,
        "buffer_names": [name for name in module if state.manifest.aliases.get(name, name) in state.buffers],
        "optimizer": None,
        "param_shapes": [state.make_param_shapes(flat.group.params) for flat in target.flat_groups],
        "frozen_param_shapes": state.make_param_shapes(state.frozen) if lists_frozen else None,
        "shared_params": state.ties if rank == 0 else {},
        "frozen_param_fragments": OrderedDict(frozen) if lists_frozen else None,
        **make_counters(target.extras, builder, target.world_size, target.config),
        **builder.add_referenced_tensors(dict(target.extras.client_state)),
    }


def _build_module(target: ZeroTarget, builder: TorchFileBuilder, weights: Mapping[str, StoredTensor]) -> OrderedDict:
    """The model's state dict: tensors in the order of the source, then ties under their other names, then values that
    are not tensors."""
    manifest = target.state.manifest
    buffers = {name: builder.add_whole_tensor(StateKey(name), entry) for name, entry in target.state.buffers.items()}
    value_by_name: dict[str, Value] = {**weights, **buffers}
    module = {name: value_by_name[name] for name in manifest.weights}
    module |= {alias: value_by_name[owner] for alias, owner in manifest.aliases.items() if owner in value_by_name}
    return OrderedDict(module | builder.add_referenced_tensors(dict(target.extras.module)))


@dataclass(frozen=True, slots=True)
class GroupOptimWriter:
    """Optimizer files of stages 1 and 2. Masters are saved without their padding, the optimizer's state with it."""

    target: ZeroTarget

    def build_file(self, path: str, rank: int) -> FileLayout:
        builder = TorchFileBuilder(self.target.state.manifest)
        group_vectors = [(flat, flat.partition.lay_out_rank(rank)) for flat in self.target.flat_groups]
        states = [self._build_state(builder, flat.group, vector) for flat, vector in group_vectors]
        clip_grad = self.target.extras.deepspeed_entries.get("clip_grad")
        state_dict = {
            **_make_scaler_entries(self.target),
            **({"clip_grad": clip_grad} if isinstance(clip_grad, int | float) else {}),
            "base_optimizer_state": _build_optimizer_state_dict(self.target, builder, states),
            "single_partition_of_fp32_groups": [
                builder.add_vector(vector.drop_padding(), flat.group, flat.group.masters)
                for flat, vector in group_vectors
            ],
            "zero_stage": make_zero_stage(self.target.stage),
            "group_paddings": [vector.num_padding for _, vector in group_vectors],
            "partition_count": [self.target.world_size] * len(group_vectors),
            "ds_version": DS_VERSION,
            "param_slice_mappings": [_make_slice_mapping(flat.group, vector) for flat, vector in group_vectors],
        }
        return builder.build_file(path, _build_optim_content(self.target, builder, state_dict))

    def _build_state(self, builder: TorchFileBuilder, group: TrainingGroup, vector: VectorLayout) -> dict[str, Value]:
        slot_tensors: dict[str, Value] = {}
        for slot in group.slots:
            is_whole = slot.name == MUON_MOMENTUM_SLOT and is_muon(group.options) and self.target.has_whole_momentum
            slot_layout = vector.cover_whole_parameters(group.numels) if is_whole else vector
            if slot_layout.numel:
                slot_tensors[slot.name] = builder.add_vector(slot_layout, group, slot)
        return slot_tensors


@dataclass(frozen=True)
class ParamOptimWriter:
    """Optimizer files of stage 3. Every parameter's share is padded, so that the vectors of all ranks are equally
    long."""

    target: ZeroTarget

    def build_file(self, path: str, rank: int) -> FileLayout:
        flats = self.target.flat_groups
        group_rows = [(flat.group, list_vector_rows(flat.partition.lay_out_rank(rank))) for flat in flats]
        hole_contents = [
            build_vector_segments(rows, group, slot)
            for group, rows in group_rows
            for slot in (*group.slots, group.masters)
        ]
        return self._template.fill_holes(path, hole_contents)

    @cached_property
    def _template(self) -> FileTemplate:
        builder = TorchFileBuilder(self.target.state.manifest)
        states, masters = [], []
        for flat in self.target.flat_groups:
            numel = flat.partition.lay_out_rank(0).numel
            states.append({slot.name: builder.add_hole(slot.dtype, numel) for slot in flat.group.slots})
            masters.append(builder.add_hole(flat.group.masters.dtype, numel))
        state_dict = {
            "zero_stage": make_zero_stage(self.target.stage),
            **_make_scaler_entries(self.target),
            "partition_count": self.target.world_size,
            "optimizer_state_dict": _build_optimizer_state_dict(self.target, builder, states),
            "fp32_flat_groups": masters,
        }
        return builder.build_template(_build_optim_content(self.target, builder, state_dict))


def _build_optim_content(
    target: ZeroTarget, builder: TorchFileBuilder, state_dict: dict[str, Value]
) -> dict[str, Value]:
    config = builder.add_referenced_tensors(target.config)
    return {"optimizer_state_dict": state_dict, "ds_config": config, "ds_version": DS_VERSION}


def _make_scaler_entries(target: ZeroTarget) -> dict[str, Value]:
    scaler = make_loss_scaler(target.extras.loss_scaler, target.state.dtype)
    return {"loss_scaler": scaler, "dynamic_loss_scale": scaler.attributes["dynamic"], "overflow": False}


def _build_optimizer_state_dict(
    target: ZeroTarget, builder: TorchFileBuilder, slot_states: Sequence[dict[str, Value]]
) -> dict[str, Value]:
    """torch's ``Optimizer.state_dict`` with vectors in place of parameters; ``slot_states`` are the slots of each."""
    vector_states = [
        {name: builder.add_scalar(key) for name, key in flat.group.scalars.items()} | state
        for flat, state in zip(target.flat_groups, slot_states, strict=True)
    ]
    groups = []
    for number, group in enumerate(target.state.groups):
        vector_numbers = [position for position, flat in enumerate(target.flat_groups) if flat.group_number == number]
        # Of torch's own Adagrad stage 3 runs one group. stage3.py initialize_optimizer_states makes a new Adagrad over
        # all vectors, and _rigid_load_state_dict then adds each a second time, so that a fresh engine refuses even its
        # own checkpoints unless each is listed twice.
        is_adagrad = {"lr_decay", "initial_accumulator_value"} <= group.options.keys()
        must_list_twice = target.stage == 3 and is_adagrad and len(target.state.groups) == 1
        groups.append(
            {
                **builder.add_referenced_tensors(dict(group.options)),
                "params": vector_numbers * 2 if must_list_twice else vector_numbers,
            }
        )
    return {"state": {number: state for number, state in enumerate(vector_states) if state}, "param_groups": groups}


def _make_slice_mapping(group: TrainingGroup, vector_layout: VectorLayout) -> OrderedDict:
    """The place of each parameter in a rank's vector, which ``ds_to_universal`` reads."""
    columns = (vector_layout.params, vector_layout.stops - vector_layout.starts, vector_layout.offsets)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    params = group.params
    return OrderedDict({params[i]: make_fragment_address(numel, start) for i, numel, start in rows if numel})
