"""A checkpoint of verl's layout 2: weights and optimizer in folders of their own, which ``ckpt_contents.json`` names.

The optimizer has Megatron-Core's names. Weights in ``model/dist_ckpt`` have them too, and the two are joined. Weights
in ``model/huggingface`` have the hub's: the manifest is ``unjoined_state``, and ``reading.recipe_step`` joins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.manifest import Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.formats.index import get_readable_format, read_manifest
from ckpt_tools.formats.megatron.reader import read
from ckpt_tools.reading.halves import check_parameter_names, read_safetensors_folder, refuse_optimizer_weights
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.verl import CONTENTS_FILE, VerlParts


def read_verl_parts(source: Source, parts: VerlParts) -> tuple[Manifest, frozenset[str]]:
    """The whole checkpoint, and its files that hold no tensor.

    Raises:
        UnsupportedError: the optimizer knows parameters that the model does not have. FormatError: as the readers.
    """
    weights = _read_weights(source, parts)
    own_files = {
        each
        for each in source.files
        if each.startswith((parts.weights_folder, parts.optimizer_folder or parts.weights_folder))
    }
    extra_folder = f"{parts.base_folder}extra/"
    if any(each.startswith(extra_folder) for each in source.files):
        note = Note(Outcome.DROPPED, extra_folder[:-1], "the random states of ranks are not read")
        weights = replace(weights, notes=(*weights.notes, note))
    manifest = _set_step(weights, parts.step)
    if parts.optimizer_folder is not None:
        optimizer = read(_select_folder(source, parts.optimizer_folder), ReadOptions(), is_optimizer=True)
        manifest = _join_optimizer(manifest, optimizer, parts)
    return manifest, frozenset(own_files | {f"{parts.base_folder}{CONTENTS_FILE}"})


def _select_folder(source: Source, folder: str) -> Source:
    return replace(source, files={path: size for path, size in source.files.items() if path.startswith(folder)})


def _read_weights(source: Source, parts: VerlParts) -> Manifest:
    if parts.format == "safetensors":
        return read_safetensors_folder(source, parts.weights_folder)
    return read_manifest(get_readable_format(parts.format), _select_folder(source, parts.weights_folder), ReadOptions())


def _set_step(manifest: Manifest, step: int | None) -> Manifest:
    return manifest if step is None else replace(manifest, step=step, extra={**manifest.extra, "global_step": step})


def _join_optimizer(weights: Manifest, optimizer: Manifest, parts: VerlParts) -> Manifest:
    assert parts.optimizer_folder is not None, "there is an optimizer"
    weights_folder, optimizer_folder = parts.weights_folder[:-1], parts.optimizer_folder[:-1]
    refuse_optimizer_weights(optimizer, optimizer_folder)
    unjoined_state = ""
    if parts.format == "megatron":
        check_parameter_names(optimizer, weights, optimizer_folder, weights_folder)
    elif optimizer.select_kinds(Kind.STATE):
        where_optimizer = f"the optimizer in {optimizer_folder} under Megatron-Core's names"
        unjoined_state = f"weights in {weights_folder} are under Hugging Face's names, and {where_optimizer}"
    return replace(
        optimizer,
        tensors={**weights.tensors, **optimizer.tensors},
        aliases=weights.aliases,
        extra=_merge_extra(weights.extra, optimizer.extra),
        step=weights.step,
        notes=(*optimizer.notes, *weights.notes),
        archives=(*weights.archives, *optimizer.archives),
        literals={**weights.literals, **optimizer.literals},
        unjoined_state=unjoined_state,
    )


def _merge_extra(weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both, whose common state and objects of Megatron are those of one checkpoint."""
    megatron_entries = [each["megatron"] for each in (weights, optimizer) if "megatron" in each]
    if not megatron_entries:
        return {**optimizer, **weights}
    common = {name: value for each in megatron_entries for name, value in each["common"][0].items()}
    objects = {name: value for each in megatron_entries for name, value in dict(each["objects"]).items()}
    return {**optimizer, **weights, "megatron": {"common": (common,), "objects": tuple(objects.items())}}
