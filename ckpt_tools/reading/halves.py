"""A checkpoint whose model and optimizer are checkpoints in folders of their own, joined by the parameters' names.

NeMo Automodel and a distributed save of transformers have weights in safetensors and a DCP of the optimizer; verl's
layout 2 names its folders in ``ckpt_contents.json``, and its optimizer has Megatron-Core's names. The record of the
trainer finds the halves.

Weights in safetensors may have the names of Hugging Face, which differ from the optimizer's for some architectures.
Nothing says beside a DCP then which is which, and the two are refused. verl's manifest is ``unjoined_state``, and
``reading.recipe_step`` joins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, StateKey, StateTree, TensorEntry
from ckpt_tools.core.notes import Note, Outcome, note_unrelated_files
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, UnsupportedError
from ckpt_tools.formats.index import get_readable_format, read_manifest
from ckpt_tools.messages.wording import join_names
from ckpt_tools.state_tree.parse import rename_master_slots
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import open_subfolder
from ckpt_tools.trainers.record import CheckpointHalves


def read_halves(source: Source, halves: CheckpointHalves, options: ReadOptions) -> tuple[Manifest, frozenset[str]]:
    """The whole checkpoint, and its files that hold no tensor.

    Raises:
        UnsupportedError: the optimizer knows parameters that the model does not have. FormatError: as the readers.
    """
    weights = _read_weights(source, halves)
    if halves.format == "safetensors":
        return _read_weights_beside_file(source, halves, weights, options)
    if halves.format == "dcp":
        return _read_weights_beside_dcp(source, halves, weights, options)
    return _read_verl(source, halves, weights)


def _read_weights(source: Source, halves: CheckpointHalves) -> Manifest:
    """The model, with the names that its files have in the whole source."""
    folder, reader = halves.weights_folder, get_readable_format(halves.weights_format)
    if halves.weights_format != "safetensors":
        return read_manifest(reader, source.select_below(folder), ReadOptions())
    files = {path.removeprefix(folder): size for path, size in source.select_below(folder).files.items()}
    try:
        manifest = read_manifest(reader, open_subfolder(source, folder[:-1], files), ReadOptions())
    except CkptError as error:
        path = folder if error.path is None else f"{folder}{error.path}"
        raise type(error)(error.message, path=path, key=error.key) from error
    return replace(manifest, tensors={key: each.with_file_prefix(folder) for key, each in manifest.tensors.items()})


def _read_weights_beside_file(
    source: Source, halves: CheckpointHalves, weights: Manifest, options: ReadOptions
) -> tuple[Manifest, frozenset[str]]:
    from ckpt_tools.reading.optimizer_file import join_optimizer_file

    joined = join_optimizer_file(weights, source, halves.index_path, options)
    folders = {path.partition("/")[0] for path in source.files if "/" in path}
    other_folders = sorted(each for each in folders if not any(file.startswith(f"{each}/") for file in joined.files))
    why = "it is beside the model and not read; name this folder for what is in it"
    other_notes = (Note(Outcome.DROPPED, each, why) for each in other_folders)
    return replace(joined, notes=(*joined.notes, *other_notes)), frozenset([halves.index_path])


def _read_weights_beside_dcp(
    source: Source, halves: CheckpointHalves, weights: Manifest, options: ReadOptions
) -> tuple[Manifest, frozenset[str]]:
    assert halves.optimizer_folder is not None, "its index is there"
    dcp = get_readable_format("dcp")
    optimizer = read_manifest(dcp, source.select_below(halves.optimizer_folder), options)
    joined = _join_optimizer(weights, optimizer, halves.index_path)
    check_parameter_names(optimizer, weights, halves.index_path, halves.weights_folder[:-1])
    inner_tree = optimizer.tree or StateTree((), None)
    tree = StateTree(("model",), inner_tree.optim or ("optim",), inner_tree.is_flattened, inner_tree.extras)
    joined = rename_master_slots(replace(joined, world_size=None, tree=tree))
    other_files = source.select_below(halves.base_folder).files.keys() - joined.files - {halves.index_path}
    if halves.weights_folder == halves.base_folder:  # files at the top go along with the model
        other_files = {path for path in other_files if "/" in path.removeprefix(halves.base_folder)}
    other_notes = (note_unrelated_files(path) for path in source.files if path in other_files)
    return replace(joined, notes=(*joined.notes, *other_notes)), frozenset()


def _read_verl(source: Source, halves: CheckpointHalves, weights: Manifest) -> tuple[Manifest, frozenset[str]]:
    from ckpt_tools.formats.megatron.reader import read

    own_files = {halves.index_path, *source.select_below(halves.weights_folder).files}
    extra_folder = f"{halves.base_folder}extra"
    if source.select_below(f"{extra_folder}/").files:
        note = Note(Outcome.DROPPED, extra_folder, "the random states of ranks are not read")
        weights = replace(weights, notes=(*weights.notes, note))
    if halves.step is not None:
        weights = replace(weights, step=halves.step, extra={**weights.extra, "global_step": halves.step})
    if halves.optimizer_folder is None:
        return weights, frozenset(own_files)
    optimizer_source = source.select_below(halves.optimizer_folder)
    optimizer = read(optimizer_source, ReadOptions(), is_optimizer=True)
    weights_folder, optimizer_folder = halves.weights_folder[:-1], halves.optimizer_folder[:-1]
    joined = _join_optimizer(weights, optimizer, optimizer_folder)
    unjoined_state = ""
    if halves.weights_format == halves.format:
        check_parameter_names(optimizer, weights, optimizer_folder, weights_folder)
    elif optimizer.select_kinds(Kind.STATE):
        where_optimizer = f"the optimizer in {optimizer_folder} under Megatron-Core's names"
        unjoined_state = f"weights in {weights_folder} are under Hugging Face's names, and {where_optimizer}"
    extra = _merge_extra(weights.extra, optimizer.extra)
    joined = replace(joined, extra=extra, step=weights.step, unjoined_state=unjoined_state)
    return joined, frozenset(own_files | optimizer_source.files.keys())


def _join_optimizer(weights: Manifest, optimizer: Manifest, optimizer_path: str) -> Manifest:
    """The manifest of both, with the entries of the optimizer. Raises UnsupportedError if that has weights too."""
    if any(key.slot == WEIGHT for key in optimizer.select_kinds(Kind.PARAMETER, Kind.BUFFER)):
        raise UnsupportedError("there are weights here and in the folder of the model", path=optimizer_path)
    return replace(
        optimizer,
        tensors={**weights.tensors, **optimizer.tensors},
        aliases=weights.aliases,
        notes=(*optimizer.notes, *weights.notes),
        archives=(*weights.archives, *optimizer.archives),
        literals={**weights.literals, **optimizer.literals},
    )


def _merge_extra(weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both, whose common state and objects of Megatron are those of one checkpoint."""
    megatron_entries = [each["megatron"] for each in (weights, optimizer) if "megatron" in each]
    if not megatron_entries:
        return {**optimizer, **weights}
    common = {name: value for each in megatron_entries for name, value in each["common"][0].items()}
    objects = {name: value for each in megatron_entries for name, value in dict(each["objects"]).items()}
    return {**optimizer, **weights, "megatron": {"common": (common,), "objects": tuple(objects.items())}}


def check_parameter_names(optimizer: Manifest, model: Manifest, path: str | None, folder: str) -> None:
    """Raises UnsupportedError unless every parameter that the optimizer at ``path`` knows is a weight of the same shape
    in ``folder``."""

    def is_state_of_weight(key: StateKey, entry: TensorEntry) -> bool:
        weight = model.tensors.get(StateKey(key.fqn))
        return weight is not None and entry.shape in ((), (1,), weight.shape)

    state = optimizer.select_kinds(Kind.STATE)
    unknown = sorted({key.fqn for key, entry in state.items() if not is_state_of_weight(key, entry)})
    if unknown:
        advice = f"name {folder}" if folder else f"add {format_option('from_', 'safetensors')}"
        raise UnsupportedError(
            f"the optimizer's parameters {join_names(unknown)} are not in {folder or 'the model'} under these names "
            "and shapes (the model was saved under other names, such as those of Hugging Face, or a file of it is "
            f"missing); {advice} for the weights alone",
            path=path,
        )
