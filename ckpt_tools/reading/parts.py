"""A checkpoint of verl's layout 2: weights and optimizer in folders of their own, which ``ckpt_contents.json`` names.

The optimizer has Megatron-Core's names. Weights in ``model/dist_ckpt`` have them too, and the two are joined. Weights
in ``model/huggingface`` have the hub's: the manifest is ``parted``, and ``reading.recipe_step`` joins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.manifest import Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.formats.index import read_format, read_manifest
from ckpt_tools.formats.megatron.reader import read
from ckpt_tools.reading.halves import check_names, read_in, refuse_weights
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.verl import CONTENTS, Parts


def read_parts(source: Source, parts: Parts) -> tuple[Manifest, frozenset[str]]:
    """The whole checkpoint, and its files that hold no tensor.

    Raises:
        UnsupportedError: the optimizer knows parameters that the model does not have. FormatError: as the readers.
    """
    weights = _weights(source, parts)
    own = {each for each in source.files if each.startswith((parts.weights, parts.optimizer or parts.weights))}
    extra = f"{parts.home}extra/"
    if any(each.startswith(extra) for each in source.files):
        note = Note(Outcome.DROPPED, extra[:-1], "the random states of ranks are not read")
        weights = replace(weights, notes=(*weights.notes, note))
    found = _with_step(weights, parts.step)
    if parts.optimizer is not None:
        optim = read(_below(source, parts.optimizer), is_optimizer=True)
        found = _together(found, optim, parts)
    return found, frozenset(own | {f"{parts.home}{CONTENTS}"})


def _below(source: Source, folder: str) -> Source:
    return replace(source, files={path: size for path, size in source.files.items() if path.startswith(folder)})


def _weights(source: Source, parts: Parts) -> Manifest:
    if parts.format == "safetensors":
        return read_in(source, parts.weights)
    return read_manifest(read_format(parts.format), _below(source, parts.weights), ReadOptions())


def _with_step(manifest: Manifest, step: int | None) -> Manifest:
    return manifest if step is None else replace(manifest, step=step, extra={**manifest.extra, "global_step": step})


def _together(weights: Manifest, optim: Manifest, parts: Parts) -> Manifest:
    assert parts.optimizer is not None, "there is an optimizer"
    here, there = parts.weights[:-1], parts.optimizer[:-1]
    refuse_weights(optim, there)
    unjoined_state = ""
    if parts.format == "megatron":
        check_names(optim, weights, there, here)
    elif optim.select_kinds(Kind.STATE):
        of_optimizer = f"the optimizer in {there} under Megatron-Core's names"
        unjoined_state = f"weights in {here} are under Hugging Face's names, and {of_optimizer}"
    return replace(
        optim,
        tensors={**weights.tensors, **optim.tensors},
        aliases=weights.aliases,
        extra=_entries(weights.extra, optim.extra),
        step=weights.step,
        notes=(*optim.notes, *weights.notes),
        archives=(*weights.archives, *optim.archives),
        literals={**weights.literals, **optim.literals},
        unjoined_state=unjoined_state,
    )


def _entries(weights: Mapping[str, Any], optim: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both, whose common state and objects of Megatron are those of one checkpoint."""
    found = [each["megatron"] for each in (weights, optim) if "megatron" in each]
    if not found:
        return {**optim, **weights}
    common = {name: value for each in found for name, value in each["common"][0].items()}
    objects = {name: value for each in found for name, value in dict(each["objects"]).items()}
    return {**optim, **weights, "megatron": {"common": (common,), "objects": tuple(objects.items())}}
