"""Native ZeRO checkpoints as manifests.

One pass over the headers: rank 0's optimizer file says the stage and the world size, the model file says names, shapes
and order, the other ranks' files say where their vectors lie. No tensor byte is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.values import brief
from ckpt_tools.core.wording import count
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import check_experts, check_parts
from ckpt_tools.formats.deepspeed.common.tags import folder_of
from ckpt_tools.formats.deepspeed.common.tensor_parallel import Rules
from ckpt_tools.formats.deepspeed.names import of_rank, tag_folders
from ckpt_tools.formats.deepspeed.zero_reader import locate, moe, pipeline, stage0, whole_names
from ckpt_tools.formats.deepspeed.zero_reader.contents import Contents
from ckpt_tools.formats.deepspeed.zero_reader.joining import Joining
from ckpt_tools.formats.deepspeed.zero_reader.locate import TagFiles
from ckpt_tools.formats.deepspeed.zero_reader.ranks import read_partitions
from ckpt_tools.stores.source import Source


def read(source: Source, options: ReadOptions) -> Manifest:
    folder = locate.choose_folder(source, options.tag)
    tags = locate.tag_files(source, folder)
    layers, experts = locate.layer_files(source, folder), locate.expert_files(source, folder)
    if layers and (experts.weights or experts.optim):
        raise UnsupportedError(
            "it is of a pipeline with experts, which is not supported", path=layers[0][min(layers[0])]
        )
    if layers:
        found = pipeline.read(source, tags, layers, _check_stage)
        return whole_names.whole(found, tags[0].models(0)[0])
    if experts.weights or experts.optim:
        return moe.read(source, tags, experts)
    parts = [_part(source, files) for files in tags]
    first = parts[0].model
    check_parts(first, len(parts))
    if len(parts) == 1:
        return parts[0].manifest
    rules = Rules.of(first.file.content.get("universal_checkpoint_info"), first.file.path)
    return Joining([part.manifest for part in parts], rules).manifest()


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    folder = folder_of(tag_folders(source.files), manifest.files)
    return locate.own_files(source.files, folder)


@dataclass(frozen=True, slots=True)
class _Part:
    """What the files of one rank of model parallelism hold, and its model's file."""

    manifest: Manifest
    model: ModelStates


def _part(source: Source, files: TagFiles) -> _Part:
    if not files.optim:
        return _without_zero(source, files)
    optim = OptimStates.of(File.open(source, files.optim[0]))
    paths = _model_paths(files, optim)
    model = ModelStates.of(File.open(source, paths[0]))
    _check_model(model, optim)
    partitions = read_partitions(source, files.optim, optim)
    return _Part(Contents(source, model, optim, paths, partitions).manifest(), model)


def _check_stage(files: TagFiles, model: ModelStates, optim: OptimStates) -> None:
    _check_count(files.optim, optim)
    _check_model(model, optim)


def _without_zero(source: Source, files: TagFiles) -> _Part:
    """A checkpoint of stage 0. Raises IncompleteError where it is of ZeRO, and its optimizer's files are missing."""
    file = File.open(source, (files.model or files.models(0))[0])
    if "param_shapes" not in file.content or file.content["param_shapes"] is not None:
        raise locate.no_optimizer(files)
    contents = stage0.Contents.of(file)
    check_experts(contents.model)
    return _Part(contents.manifest(), contents.model)


def _model_paths(files: TagFiles, optim: OptimStates) -> tuple[str, ...]:
    """The model's files; there are as many of each kind as ranks. Raises IncompleteError, MalformedError."""
    paths = files.models(optim.stage)
    _check_count(files.optim, optim)
    if optim.stage == 3:
        _check_count(paths, optim)
    return paths


def _check_count(paths: tuple[str, ...], optim: OptimStates) -> None:
    if len(set(optim.partition_counts)) > 1:
        raise IncompleteError(
            "its param groups are cut into different numbers of partitions, as those of experts are, and there are no "
            "files of experts (layer_0_expert_0_mp_rank_00_model_states.pt) beside it",
            path=optim.file.path,
        )
    if len(paths) < optim.world_size:
        missing = of_rank(paths[0], len(paths))
        raise IncompleteError(f"the file of this rank, one of {optim.world_size}, is missing", path=missing)
    if len(paths) > optim.world_size:
        raise MalformedError(
            f"the checkpoint is of {count(optim.world_size, 'rank')}; this file is of another one, perhaps from "
            "an earlier save",
            path=paths[optim.world_size],
        )


def _check_model(model: ModelStates, optim: OptimStates) -> None:
    check_experts(model)
    world_size = model.file.content.get("dp_world_size", optim.world_size)
    if world_size != optim.world_size:
        raise MalformedError(
            f"its dp_world_size is {brief(world_size)}, but that of the optimizer is {optim.world_size}",
            path=model.file.path,
        )
