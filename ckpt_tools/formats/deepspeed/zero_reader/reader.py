"""Native ZeRO checkpoints as manifests.

One pass over the headers: rank 0's optimizer file has the stage and the world size, the model file names, shapes and
order, the other ranks' files the places of their vectors. No tensor byte is read.
"""

from __future__ import annotations

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.values import format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.fused_experts import Fused
from ckpt_tools.formats.deepspeed.common.model_file import check_experts, check_parts
from ckpt_tools.formats.deepspeed.common.tags import choose_tag, folder_of
from ckpt_tools.formats.deepspeed.common.tensor_parallel import Rules
from ckpt_tools.formats.deepspeed.names import LATEST, SCRIPTS, is_native, tag_folders
from ckpt_tools.formats.deepspeed.zero_reader import autoep, locate, moe, pipeline, stage0
from ckpt_tools.formats.deepspeed.zero_reader.contents import Contents
from ckpt_tools.formats.deepspeed.zero_reader.joining import Joining
from ckpt_tools.formats.deepspeed.zero_reader.locate import TagFiles
from ckpt_tools.formats.deepspeed.zero_reader.ranks import read_partitions
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import get_parent_folder


def read(source: Source, options: ReadOptions) -> Manifest:
    folder = choose_tag(source, options.tag, tag_folders(source.files), latest=LATEST, what="DeepSpeed checkpoint")
    tags = locate.tag_files(source, folder)
    layers, experts = locate.layer_files(source, folder), locate.expert_files(source, folder)
    if layers and (experts.weights or experts.optim):
        raise UnsupportedError(
            "it is of a pipeline with experts, which is not supported", path=layers[0][min(layers[0])]
        )
    if layers:
        return pipeline.read(source, tags, layers, _check_stage)
    if experts.weights or experts.optim:
        fused = Fused.of(File.open(source, tags[0].models(0)[0]))
        return autoep.read(source, tags, experts, fused) if fused.layers else moe.read(source, tags, experts)
    parts = [_part(source, files) for files in tags]
    first = parts[0].model
    check_parts(first, len(parts))
    if len(parts) == 1:
        return parts[0].manifest()
    rules = Rules.of(first.file.content.get("universal_checkpoint_info"), first.file.path)
    return Joining([part.manifest() for part in parts], rules).manifest()


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    """The files of the checkpoint, and those that DeepSpeed writes beside it; none where no file in the source names
    it."""
    folder, paths = folder_of(tag_folders(source.files), manifest.files), source.files.keys()
    if folder and LATEST not in paths:
        return frozenset()
    inside = {path for path in paths if get_parent_folder(path) == folder and is_native(path.rpartition("/")[2])}
    return frozenset(inside | ({LATEST, *SCRIPTS} & paths if folder else set()))


def _part(source: Source, files: TagFiles) -> Contents | stage0.Contents:
    if not files.optim:
        model = ModelStates.without_zero(stage0.open_whole(source, files))
        check_experts(model)
        return stage0.Contents(model, stage0.Saved.of(model.file))
    optim = OptimStates.of(File.open(source, files.optim[0]))
    paths = files.models(optim.stage)
    _check_count(files.optim, optim)
    if optim.stage == 3:
        _check_count(paths, optim)
    model = ModelStates.of(File.open(source, paths[0]))
    if (fused := Fused.of(model.file)).layers:
        return autoep.partitioned(source, files, model, optim, fused)
    _check_model(model, optim)
    return Contents(source, model, optim, paths, read_partitions(source, files.optim, optim))


def _check_stage(files: TagFiles, model: ModelStates, optim: OptimStates) -> None:
    _check_count(files.optim, optim)
    _check_model(model, optim)


def _check_count(paths: tuple[str, ...], optim: OptimStates) -> None:
    if len(set(optim.partition_counts)) > 1:
        raise IncompleteError(
            "its param groups are cut into different numbers of partitions, as those of experts are, and there are no "
            "files of experts (layer_0_expert_0_mp_rank_00_model_states.pt) beside it",
            path=optim.file.path,
        )
    locate.check_count(paths, optim.world_size)


def _check_model(model: ModelStates, optim: OptimStates) -> None:
    check_experts(model)
    if optim.own.get(autoep.GROUPS) is not None:
        raise UnsupportedError(
            "its experts are partitioned over groups of their own (AutoEP), and the model's file has no "
            "ds_autoep_layers",
            path=optim.file.path,
        )
    world_size = model.file.content.get("dp_world_size", optim.world_size)
    if world_size != optim.world_size:
        raise MalformedError(
            f"its dp_world_size is {format_brief(world_size)}, but that of the optimizer is {optim.world_size}",
            path=model.file.path,
        )
