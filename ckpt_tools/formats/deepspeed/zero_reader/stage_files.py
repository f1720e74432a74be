"""The files of one stage of a pipeline, without those of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.errors import MalformedError
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
        mappings_by_rank = [read_slice_mappings(DeepSpeedFile.open(source, each)) for each in files.optim_paths]
        model = replace(model, param_shapes=compute_flat_shapes(mappings_by_rank))
        builder = ZeroManifestBuilder.of_all_ranks(source, model, optim, (path,), partitions, literal_prefix)
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
        manifest = replace(self.builder, model=model).build_manifest()
        if isinstance(self.builder, Stage0ManifestBuilder) and self.builder.optimizer.groups and not manifest.groups:
            raise MalformedError("the shapes of its optimizer's state are not those of the layers", path=self.path)
        return manifest
