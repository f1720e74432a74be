"""A folder of NeMo Automodel: ``model/`` in safetensors and ``optim/`` as a DCP, joined by the parameters' names.

The model's names may be those of Hugging Face, which differ from the optimizer's for some architectures. Nothing says
then which is which, and the two are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, StateKey, StateTree, TensorEntry
from ckpt_tools.core.notes import Note, note_unrelated_files
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, UnsupportedError
from ckpt_tools.formats.index import get_readable_format, read_manifest
from ckpt_tools.messages.wording import join_names
from ckpt_tools.state_tree.parse import rename_master_slots
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import open_subfolder
from ckpt_tools.trainers.nemo import OPTIMIZER_INDEX


def find_automodel_prefix(source: Source) -> str | None:
    """The prefix of the folders ``model`` and ``optim`` of the one such checkpoint, if there is one."""
    index_suffixes = (OPTIMIZER_INDEX, f"/{OPTIMIZER_INDEX}")
    prefixes = [
        path.removesuffix(OPTIMIZER_INDEX)
        for path in source.files
        if path == index_suffixes[0] or path.endswith(index_suffixes[1])
    ]
    if len(prefixes) != 1 or sum(path.rpartition("/")[2] == ".metadata" for path in source.files) != 1:
        return None
    folder = f"{prefixes[0]}model/"
    files = [path[len(folder) :] for path in source.files if path.startswith(folder)]
    return prefixes[0] if any("/" not in path and path.endswith(".safetensors") for path in files) else None


def read_automodel(source: Source, prefix: str, options: ReadOptions) -> Manifest:
    """The whole checkpoint.

    Raises:
        UnsupportedError: the optimizer knows parameters that the model does not have. FormatError: as the readers.
    """
    folder = f"{prefix}optim/"
    files = {path: size for path, size in source.files.items() if path.startswith(folder)}
    optimizer = read_manifest(get_readable_format("dcp"), replace(source, files=files), options)
    model = read_safetensors_folder(source, f"{prefix}model/")
    refuse_optimizer_weights(optimizer, f"{prefix}optim/.metadata")
    check_parameter_names(optimizer, model, f"{prefix}optim/.metadata", f"{prefix}model")
    optimizer_tree = optimizer.tree or StateTree((), None)
    tree = StateTree(("model",), optimizer_tree.optim or ("optim",), optimizer_tree.is_flattened, optimizer_tree.extras)
    joined = replace(
        optimizer,
        tensors={**model.tensors, **optimizer.tensors},
        aliases=model.aliases,
        world_size=None,
        tree=tree,
        notes=(*optimizer.notes, *model.notes),
    )
    joined = rename_master_slots(joined)
    return replace(joined, notes=(*joined.notes, *_note_other_files(source, prefix, joined)))


def read_safetensors_folder(source: Source, folder: str) -> Manifest:
    """The model in safetensors in ``folder``, with the names that its files have in the whole source."""
    files = {path[len(folder) :]: size for path, size in source.files.items() if path.startswith(folder)}
    try:
        manifest = read_manifest(
            get_readable_format("safetensors"), open_subfolder(source, folder[:-1], files), ReadOptions()
        )
    except CkptError as error:
        path = folder if error.path is None else f"{folder}{error.path}"
        raise type(error)(error.message, path=path, key=error.key) from error
    return replace(manifest, tensors={key: _prefix_files(entry, folder) for key, entry in manifest.tensors.items()})


def _prefix_files(entry: TensorEntry, prefix: str) -> TensorEntry:
    return replace(entry, shards=entry.shards.with_file_prefix(prefix))


def refuse_optimizer_weights(optimizer: Manifest, path: str) -> None:
    """Raises UnsupportedError if the optimizer at ``path`` has weights beside it."""
    if any(key.slot == WEIGHT for key in optimizer.select_kinds(Kind.PARAMETER, Kind.BUFFER)):
        raise UnsupportedError("there are weights here and in the folder of the model", path=path)


def check_parameter_names(optimizer: Manifest, model: Manifest, path: str | None, folder: str) -> None:
    """Raises UnsupportedError unless every parameter that the optimizer at ``path`` knows is a weight of the same shape
    in ``folder``."""
    state = optimizer.select_kinds(Kind.STATE)
    unknown = sorted({key.fqn for key, entry in state.items() if not _is_state_of_weight(key, entry, model.tensors)})
    if unknown:
        raise UnsupportedError(
            f"the optimizer's parameters {join_names(unknown)} are not in {folder} under these names and shapes (the "
            f"model was saved under other names, such as those of Hugging Face); name {folder} for the weights alone",
            path=path,
        )


def _is_state_of_weight(key: StateKey, entry: TensorEntry, weights: Mapping[StateKey, Any]) -> bool:
    weight = weights.get(StateKey(key.fqn))
    return weight is not None and entry.shape in ((), (1,), weight.shape)


def _note_other_files(source: Source, prefix: str, manifest: Manifest) -> list[Note]:
    """Notes on the files that are part of neither half."""
    used = manifest.files | {f"{prefix}{OPTIMIZER_INDEX}"}
    left = [path for path in source.files if path.startswith(prefix) and path not in used]
    return [note_unrelated_files(path) for path in left]
