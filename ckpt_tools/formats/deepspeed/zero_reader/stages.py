"""The files of a pipeline's stages, and those of its layers as the model of each stage.

``PipelineModule`` writes ``layer_03-model_states.pt``, a bare state dict, for each layer that is a module
(runtime/pipe/module.py ``save_state_dict``). Its parameters are called ``3.weight``. Tied layers share one module,
``tied_modules.<key>``, which every stage that uses it has for itself. The file has the number of a layer and not the
key. So a file that no parameter's name fits is compared with the tied modules: by its names and shapes, and by the
first elements of the masters, because a frozen layer could have the same names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.casts import CASTABLE, cast_into
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.values import StoredTensor, Value, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import check_experts
from ckpt_tools.formats.deepspeed.zero_reader.contents import ZeroManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.ranks import read_partitions
from ckpt_tools.formats.deepspeed.zero_reader.slice_mappings import (
    MAPPINGS_ENTRY,
    compute_flat_shapes,
    find_misfit,
    read_slice_mappings,
)
from ckpt_tools.formats.deepspeed.zero_reader.stage0 import SavedOptimizer, Stage0ManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import TagFiles
from ckpt_tools.stores.source import Source

TIED_PREFIX = "tied_modules."


@dataclass(frozen=True)
class StageFiles:
    """One stage's files without those of its layers, as the builder of its manifest, whose model has no tensors yet.

    With ``has_flat_shapes`` its parameters have flat shapes, as only their numbers of elements are known. A builder of
    stage 0 has an optimizer if that names its parameters.
    """

    builder: ZeroManifestBuilder | Stage0ManifestBuilder
    has_flat_shapes: bool = False

    @classmethod
    def of(cls, source: Source, number: int, files: TagFiles) -> StageFiles:
        """Opens ``files``, those of stage ``number``. Raises FormatError if one is missing or damaged."""
        # Literals of different stages must have different names.
        literal_prefix, path = f"stage{number}." if number else "", files.require_model_paths(0)[0]
        model = ModelStates.of_pipeline_stage(DeepSpeedFile.open(source, path))
        check_experts(model)
        if model.file.content.get("module") is not None:
            raise MalformedError("it holds a model, but there are files of a pipeline's layers beside it", path=path)
        if not files.optim_paths:
            return cls(Stage0ManifestBuilder(model, SavedOptimizer(model.file), literal_prefix=literal_prefix))
        optim = OptimStates.of(DeepSpeedFile.open(source, files.optim_paths[0]))
        if optim.stage > 1:
            raise MalformedError(f"it is of ZeRO-{optim.stage}, which no pipeline has", path=optim.file.path)
        partitions = read_partitions(source, files.optim_paths, optim)
        if model.param_shapes:
            return cls(ZeroManifestBuilder.of_all_ranks(source, model, optim, (path,), partitions, literal_prefix))
        mappings_by_rank = list(map(read_slice_mappings, source.map_files(DeepSpeedFile.open, files.optim_paths)))
        model = replace(model, param_shapes=compute_flat_shapes(mappings_by_rank))
        builder = ZeroManifestBuilder.of_all_ranks(source, model, optim, (path,), partitions, literal_prefix)
        builder.check_partitions()  # This tells more than a misfit.
        if misfit := find_misfit(builder.groups, partitions, mappings_by_rank):
            message = f"its {MAPPINGS_ENTRY} do not fit the partitions"
            raise MalformedError(message, path=misfit[0], key=misfit[1])
        return cls(builder, has_flat_shapes=True)

    @property
    def model(self) -> ModelStates:
        return self.builder.model

    @property
    def path(self) -> str:
        return self.model.file.path

    # Parameters as the files of the stage state them

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        return self.model.trainable

    @cached_property
    def names(self) -> set[str]:
        """Names of parameters and buffers."""
        return {*self.shapes, *self.model.buffers}

    def list_tied_modules(self) -> dict[str, set[str]]:
        """The names of each tied module of the stage, by its prefix, ``tied_modules.embed.``."""
        names_by_prefix: dict[str, set[str]] = {}
        for name in self.names:
            if name.startswith(TIED_PREFIX):
                key = name.removeprefix(TIED_PREFIX).split(".")[0]
                names_by_prefix.setdefault(f"{TIED_PREFIX}{key}.", set()).add(name)
        return names_by_prefix

    def find_master(self, name: str) -> ShardTable | None:
        """The masters of a parameter; None if there are none."""
        if not isinstance(self.builder, ZeroManifestBuilder) or name not in self.builder.param_intervals:
            return None
        return self.builder.partitions.masters.build_shard_table(self.builder.param_intervals[name])

    def build_manifest(self, model: ModelStates) -> Manifest:
        """The manifest of the stage as a checkpoint of its own; ``model`` has the tensors of its layers. Raises
        MalformedError if the optimizer without ZeRO does not fit them."""
        builder = self.builder
        if isinstance(builder, ZeroManifestBuilder):
            # The placements again, since the layers may have other shapes than the optimizer states.
            parts = (builder.optim, builder.model_paths, builder.partitions, builder.literal_prefix)
            return ZeroManifestBuilder.of_all_ranks(builder.source, model, *parts).build_manifest()
        manifest = replace(builder, model=model).build_manifest()
        if builder.optimizer.groups and not manifest.groups:
            raise MalformedError("the shapes of its optimizer's state are not those of the layers", path=self.path)
        return manifest


SAMPLE_ELEMENTS = 1024
"""Elements of a tied parameter that are compared with its masters."""


@dataclass
class PipelineLayers:
    """The files of all layers, by number, and those of the stages.

    ``build_models`` finds out which files belong to which stage: ``tied_files`` by the prefix of a tied module, and all
    others in ``stage_by_layer``.
    """

    source: Source
    layer_files: Mapping[int, DeepSpeedFile]
    stages: Sequence[StageFiles]
    tied_files: dict[str, DeepSpeedFile] = field(default_factory=dict)
    stage_by_layer: dict[int, int] = field(default_factory=dict)

    def build_models(self) -> list[ModelStates]:
        """Each stage's model with the tensors of its layers. Raises FormatError if they do not fit the stages."""
        # A layer that no stage names (all its parameters are frozen) is of the same stage as the layer before it.
        stage = 0
        for number in sorted(self.layer_files):
            named_stage = self._find_stage(number)
            prefix = None if named_stage is not None else self._find_tied_prefix(self.layer_files[number])
            stage = stage if named_stage is None else named_stage
            if prefix is None:
                self.stage_by_layer[number] = stage
            else:
                self.tied_files.setdefault(prefix, self.layer_files[number])
        return [self._build_model(number, stage) for number, stage in enumerate(self.stages)]

    def find_unnamed_files(self) -> Iterator[DeepSpeedFile]:
        """The files of layers without trained parameters or buffers, which no stage names. They could be of tied
        modules."""
        for number in self.stage_by_layer:
            values = self.layer_files[number].content.values()
            if self._find_stage(number) is None and any(isinstance(value, StoredTensor) for value in values):
                yield self.layer_files[number]

    def _find_stage(self, number: int) -> int | None:
        """The stage that has a parameter or buffer of the layer by name, ``3.weight``; None if there is none. Raises
        MalformedError if several have."""
        stages = [
            stage_number
            for stage_number, stage in enumerate(self.stages)
            if any(name.startswith(f"{number}.") for name in stage.names)
        ]
        if len(stages) > 1:
            raise MalformedError(
                f"stages {stages[0]} and {stages[1]} of the pipeline both have this layer",
                path=self.layer_files[number].path,
            )
        return stages[0] if stages else None

    def _find_tied_prefix(self, file: DeepSpeedFile) -> str | None:
        """The prefix of the tied module whose state dict is in ``file``; None if it is not that of a tied module."""
        for stage in self.stages:
            for prefix, names in stage.list_tied_modules().items():
                values = {name: file.content.get(name.removeprefix(prefix)) for name in names}
                if all(self._is_tied_value(stage, name, value, file) for name, value in values.items()):
                    return prefix
        return None

    def _is_tied_value(self, stage: StageFiles, name: str, value: Value, file: DeepSpeedFile) -> bool:
        """Whether ``value`` in ``file`` could be the tied parameter or buffer ``name`` of the stage."""
        if not isinstance(value, StoredTensor):
            return False
        if name not in stage.shapes:
            return True
        if stage.shapes[name] != ((value.numel,) if stage.has_flat_shapes else tuple(value.shape)):
            return False
        master = stage.find_master(name)
        return master is None or not value.numel or self._is_cast_of_master(file.build_shard_table(value), master)

    def _is_cast_of_master(self, weight: ShardTable, master: ShardTable) -> bool:
        """Whether the first elements of a weight are those of ``master``, cast to the weight's dtype, bit for bit. Also
        True if that cannot be computed."""
        if weight.dtype not in CASTABLE or master.dtype not in CASTABLE or weight.strides is not None:
            return True
        weight_bytes, master_bytes = read_first_elements(self.source, weight), read_first_elements(self.source, master)
        numel = min(len(weight_bytes) // weight.dtype.item_bytes, len(master_bytes) // master.dtype.item_bytes)
        cast_bytes = bytearray(numel * weight.dtype.item_bytes)
        master_elements = np.frombuffer(master_bytes[: numel * master.dtype.item_bytes], np.uint8)
        cast_into(master_elements, master.dtype, memoryview(cast_bytes), weight.dtype)
        return bytes(weight_bytes[: len(cast_bytes)]) == bytes(cast_bytes)

    # The model of a stage

    def _build_model(self, stage_number: int, stage: StageFiles) -> ModelStates:
        values = list(self._list_values(stage_number, stage))
        module = {name: value for name, value, _ in values}
        value_files = {name: file for name, _, file in values}
        if missing := stage.names - module.keys():
            raise IncompleteError("no file of a layer contains it", path=stage.path, key=min(missing))
        stored_shapes = {name: tuple(value.shape) for name, value in module.items() if isinstance(value, StoredTensor)}
        param_shapes = stage.model.param_shapes
        if stage.has_flat_shapes:
            param_shapes = tuple({name: stored_shapes.get(name, ()) for name in group} for group in param_shapes)
        return replace(stage.model, module=module, value_files=value_files, param_shapes=param_shapes)

    def _list_values(self, stage_number: int, stage: StageFiles) -> Iterator[tuple[str, Value, DeepSpeedFile]]:
        """Name, value and file of everything in a stage's model. Tied modules come first, as ``PipelineModule``
        registers them."""
        for prefix, file in self.tied_files.items():
            if prefix in stage.list_tied_modules():
                yield from ((prefix + _require_text_key(key, file), value, file) for key, value in file.content.items())
        for number, file in self.layer_files.items():
            if self.stage_by_layer.get(number) == stage_number:
                values = file.content.items()
                yield from ((f"{number}.{_require_text_key(key, file)}", value, file) for key, value in values)


def read_first_elements(source: Source, table: ShardTable) -> bytes:
    """The bytes of the first elements of a tensor, at most ``SAMPLE_ELEMENTS``, of its first shard alone."""
    first_row = int(np.argmin(table.starts[:, 0])) if len(table) > 1 else 0
    start, stop = int(table.byte_starts[first_row]), int(table.byte_stops[first_row])
    stop = min(stop, start + SAMPLE_ELEMENTS * table.dtype.item_bytes)
    return source.read(table.files[int(table.file_ids[first_row])], start, stop)


def _require_text_key(key: Value, file: DeepSpeedFile) -> str:
    if not isinstance(key, str):
        raise MalformedError(f"the state dict of a layer has the key {format_brief(key)}", path=file.path)
    return key
