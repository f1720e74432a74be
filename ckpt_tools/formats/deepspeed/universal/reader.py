"""Universal checkpoints as manifests: those of DeepSpeed's ``ds_to_universal`` from any stage, and ours.

One pass over the headers: the model's file says names, shapes and groups, each parameter's files say where its states
lie. No tensor byte is read.
"""

from __future__ import annotations

from math import prod

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, stages_of
from ckpt_tools.formats.deepspeed.common.model_file import check_experts, check_parts
from ckpt_tools.formats.deepspeed.common.tags import folder_of
from ckpt_tools.formats.deepspeed.names import universal_folders
from ckpt_tools.formats.deepspeed.universal import locate
from ckpt_tools.formats.deepspeed.universal.contents import Contents
from ckpt_tools.formats.deepspeed.universal.states import Slots
from ckpt_tools.stores.source import Source


def read(source: Source, options: ReadOptions) -> Manifest:
    files = locate.universal_files(source, locate.choose_folder(source, options.tag))
    first = File.open(source, files.model[0])
    if stages_of(first) > 1:
        raise UnsupportedError(
            "it is a universal checkpoint of a pipeline-parallel run, in which DeepSpeed leaves out the buffers "
            "and the frozen weights; convert the native checkpoint that it was made from",
            path=first.path,
        )
    model = ModelStates.of(first)
    check_experts(model)
    parts = (model, *(ModelStates.of(File.open(source, path)) for path in files.model_parts))
    check_parts(model, len(parts))
    others = files.model[1:] if _has_fragments(model) else ()
    models = (model, *(ModelStates.of(File.open(source, path)) for path in others))
    optimizer = File.open(source, files.optimizer)
    return Contents(files, models, optimizer, Slots(source), parts).manifest()


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    folder = folder_of(universal_folders(source.files), manifest.files)
    used = manifest.files | manifest.fqns | manifest.aliases.keys()
    return locate.own_files(source.files, locate.universal_files(source, folder), folder, used)


def _has_fragments(model: ModelStates) -> bool:
    return any(prod(shape) for shape in model.frozen_shapes.values())
