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
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, model_claims, stages_of
from ckpt_tools.formats.deepspeed.common.fused_experts import Fused
from ckpt_tools.formats.deepspeed.common.model_file import check_experts, check_parts
from ckpt_tools.formats.deepspeed.common.tags import choose_tag, folder_of
from ckpt_tools.formats.deepspeed.names import LATEST_UNIVERSAL, MASTER_FILE, is_model, universal_folders
from ckpt_tools.formats.deepspeed.universal.contents import Contents
from ckpt_tools.formats.deepspeed.universal.states import Slots, universal_files
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import get_parent_folder

_SLOTS = (MASTER_FILE, "exp_avg", "exp_avg_sq", "step")
"""The files that ``ds_to_universal`` makes of every parameter."""


def read(source: Source, options: ReadOptions) -> Manifest:
    folders = universal_folders(source.files)
    folder = choose_tag(source, options.tag, folders, latest=LATEST_UNIVERSAL, what="universal checkpoint")
    files = universal_files(source, folder)
    first = File.open(source, files.model[0])
    if stages_of(first) > 1:
        raise UnsupportedError(
            "it is a universal checkpoint of a pipeline-parallel run, in which DeepSpeed leaves out the buffers "
            "and the frozen weights; convert the native checkpoint that it was made from",
            path=first.path,
        )
    model = ModelStates.of(first)
    fused = Fused.of(first)
    names = frozenset(fused.names(model))
    if not names:
        check_experts(model)
    model = fused.whole(model)
    parts = (model, *(ModelStates.of(File.open(source, path)) for path in files.model_parts))
    check_parts(model, len(parts))
    has_fragments = any(map(prod, model.frozen_shapes.values()))
    models, steps = [model], [claim for part in parts for claim in model_claims(part.file)]
    here = sorted(
        path for path in source.files if get_parent_folder(path) == folder and is_model(path.rpartition("/")[2])
    )
    for path in dict.fromkeys((*files.model[1:], *here)):
        if path in (first.path, *files.model_parts):
            continue
        file = File.open(source, path)
        steps += model_claims(file)
        models += [ModelStates.of(file)] if has_fragments and path in files.model else []
    found = Contents(
        files, tuple(models), File.open(source, files.optimizer), Slots(source, fused=names), parts
    ).manifest()
    return replace(found, step_claims=(*found.step_claims, *steps))


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    """The files of the checkpoint; none where no file in the source names it.

    Of parameters without state and of buffers, DeepSpeed leaves copies in ``zero/``.
    """
    folder = folder_of(universal_folders(source.files), manifest.files)
    if folder and LATEST_UNIVERSAL not in source.files:
        return frozenset()
    files, prefix = universal_files(source, folder), f"{folder}/" if folder else ""
    known = manifest.fqns | manifest.aliases.keys()
    states = {
        path
        for fqn, slots in files.states.items()
        for slot, path in slots.items()
        if path in manifest.files or (fqn in known and slot in _SLOTS)
    }
    models = {path for path in source.files if path.startswith(prefix) and is_model(path.removeprefix(prefix))}
    beside = {files.optimizer, *([LATEST_UNIVERSAL] if folder else [])}
    return frozenset(models | states | (source.files.keys() & beside))
