"""Native ZeRO checkpoints as manifests.

One pass over the headers: rank 0's optimizer file has the stage and the world size, the model file names, shapes and
order, the other ranks' files the places of their vectors. No tensor byte is read.
"""

from __future__ import annotations

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.fused_experts import AutoEPLayers
from ckpt_tools.formats.deepspeed.common.model_file import check_experts, check_model_parts
from ckpt_tools.formats.deepspeed.common.tags import choose_tag, find_used_folder
from ckpt_tools.formats.deepspeed.common.tensor_parallel import MergeRules
from ckpt_tools.formats.deepspeed.names import LATEST, RECOVERY_SCRIPTS, find_tag_folders, is_native_file_name
from ckpt_tools.formats.deepspeed.zero_reader import expert_runs, pipeline, stage0
from ckpt_tools.formats.deepspeed.zero_reader.contents import ZeroManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.joining import ManifestMerger
from ckpt_tools.formats.deepspeed.zero_reader.ranks import check_model_file, check_rank_count, read_partitions
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import TagFiles, TagFolder
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.saved import get_parent_folder


def read(source: Source, options: ReadOptions) -> Manifest:
    folders = find_tag_folders(source.files)
    folder = choose_tag(source, options.tag, folders, latest_file=LATEST, description="DeepSpeed checkpoint")
    tag = TagFolder.of(source, folder)
    if tag.layer_paths and tag.experts:
        path = tag.layer_paths[0][min(tag.layer_paths[0])]
        raise UnsupportedError("it is of a pipeline with experts, which is not supported", path=path)
    if tag.layer_paths:
        return pipeline.read(source, tag.mp_ranks, tag.layer_paths)
    if tag.experts:
        return expert_runs.read(source, tag.mp_ranks, tag.experts)
    parts = [_open_part(source, files) for files in tag.mp_ranks]
    first_model = parts[0].model
    check_model_parts(first_model, len(parts))
    if len(parts) == 1:
        return parts[0].build_manifest()
    rules = MergeRules.of(first_model.file.content.get("universal_checkpoint_info"), first_model.file.path)
    return ManifestMerger([part.build_manifest() for part in parts], rules).merge_manifests()


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    """The files of the checkpoint, and those that DeepSpeed writes beside it; none where no file in the source names
    it."""
    folder, paths = find_used_folder(find_tag_folders(source.files), manifest.files), source.files.keys()
    if folder and LATEST not in paths:
        return frozenset()
    tag_paths = [path for path in paths if get_parent_folder(path) == folder]
    native_paths = {path for path in tag_paths if is_native_file_name(path.rpartition("/")[2])}
    return frozenset(native_paths | ({LATEST, *RECOVERY_SCRIPTS} & paths if folder else set()))


def _open_part(source: Source, files: TagFiles) -> ZeroManifestBuilder | stage0.Stage0ManifestBuilder:
    if not files.optim_paths:
        model = stage0.open_stage0_model(source, files)
        check_experts(model)
        return stage0.Stage0ManifestBuilder(model, stage0.SavedOptimizer.of(model.file))
    optim = OptimStates.of(DeepSpeedFile.open(source, files.optim_paths[0]))
    model_paths = files.require_model_paths(optim.stage)
    check_rank_count(files.optim_paths, optim)
    if optim.stage == 3:
        check_rank_count(model_paths, optim)
    model = ModelStates.of(DeepSpeedFile.open(source, model_paths[0]))
    if (autoep_layers := AutoEPLayers.of(model.file)).layers:
        return expert_runs.open_stage3(source, files, model, optim, autoep_layers)
    check_model_file(model, optim)
    partitions = read_partitions(source, files.optim_paths, optim)
    return ZeroManifestBuilder.of_all_ranks(source, model, optim, model_paths, partitions)
