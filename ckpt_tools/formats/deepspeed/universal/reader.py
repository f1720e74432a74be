"""Universal checkpoints as manifests: those of DeepSpeed's ``ds_to_universal`` from any stage, and ours.

One pass over the headers: the model's file has names, shapes and groups, each parameter's files have the places of its
states. No tensor byte is read.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import (
    DeepSpeedFile,
    ModelStates,
    collect_model_claims,
    count_pipeline_stages,
)
from ckpt_tools.formats.deepspeed.common.fused_experts import AutoEPLayers
from ckpt_tools.formats.deepspeed.common.model_file import check_experts, check_model_parts
from ckpt_tools.formats.deepspeed.common.tags import choose_tag, find_used_folder
from ckpt_tools.formats.deepspeed.names import (
    LATEST_UNIVERSAL,
    UNIVERSAL_MASTER_SLOT,
    find_universal_folders,
    is_model_file_name,
)
from ckpt_tools.formats.deepspeed.universal.contents import UniversalManifestBuilder
from ckpt_tools.formats.deepspeed.universal.states import SlotFileReader, find_universal_files
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.saved import get_parent_folder

_CONVERTER_SLOTS = (UNIVERSAL_MASTER_SLOT, "exp_avg", "exp_avg_sq", "step")
"""Slots with a file for every parameter, as ``ds_to_universal`` writes them."""


def read(source: Source, options: ReadOptions) -> Manifest:
    folders = find_universal_folders(source.files)
    folder = choose_tag(source, options.tag, folders, latest_file=LATEST_UNIVERSAL, description="universal checkpoint")
    files = find_universal_files(source, folder)
    first_file = DeepSpeedFile.open(source, files.model_paths[0])
    if count_pipeline_stages(first_file) > 1:
        raise UnsupportedError(
            "it is a universal checkpoint of a pipeline-parallel run, in which DeepSpeed leaves out the buffers "
            "and the frozen weights; convert the native checkpoint that it was made from",
            path=first_file.path,
        )
    model = ModelStates.of(first_file)
    autoep_layers = AutoEPLayers.of(first_file)
    expert_tensors = frozenset(autoep_layers.list_expert_tensors(model))
    if not expert_tensors:
        check_experts(model)
    model = autoep_layers.add_all_experts(model)
    tp_models = (model, *map(ModelStates.of, source.map_files(DeepSpeedFile.open, files.tp_model_paths)))
    check_model_parts(model, len(tp_models))
    has_fragments = any(map(prod, model.frozen_shapes.values()))
    rank_models, step_claims = [model], [claim for part in tp_models for claim in collect_model_claims(part.file)]
    model_paths = sorted(
        path
        for path in source.files
        if get_parent_folder(path) == folder and is_model_file_name(path.rpartition("/")[2])
    )
    opened_paths = (first_file.path, *files.tp_model_paths)
    other_paths = [path for path in dict.fromkeys((*files.model_paths[1:], *model_paths)) if path not in opened_paths]
    for file in source.map_files(DeepSpeedFile.open, other_paths):
        step_claims += collect_model_claims(file)
        rank_models += [ModelStates.of(file)] if has_fragments and file.path in files.model_paths else []
    manifest = UniversalManifestBuilder(
        files,
        tuple(rank_models),
        DeepSpeedFile.open(source, files.optimizer_path),
        SlotFileReader(source, expert_tensors=expert_tensors),
        tp_models,
    ).build_manifest()
    return replace(manifest, step_claims=(*manifest.step_claims, *step_claims))


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    """The files of the checkpoint; none if no file in the source names it.

    Besides the files that the manifest uses, these are copies of parameters without state and of buffers in ``zero/``.
    """
    folder = find_used_folder(find_universal_folders(source.files), manifest.files)
    if folder and LATEST_UNIVERSAL not in source.files:
        return frozenset()
    files, prefix = find_universal_files(source, folder), f"{folder}/" if folder else ""
    known_names = manifest.fqns | manifest.aliases.keys()
    slot_paths = {
        path
        for fqn, slots in files.slot_paths.items()
        for slot, path in slots.items()
        if path in manifest.files or (fqn in known_names and slot in _CONVERTER_SLOTS)
    }
    own_paths = [path for path in source.files if path.startswith(prefix)]
    model_paths = {path for path in own_paths if is_model_file_name(path.removeprefix(prefix))}
    other_paths = {files.optimizer_path, *([LATEST_UNIVERSAL] if folder else [])}
    return frozenset(model_paths | slot_paths | (source.files.keys() & other_paths))
