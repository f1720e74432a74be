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
from ckpt_tools.core.wording import join_names
from ckpt_tools.errors import CkptError, UnsupportedError
from ckpt_tools.formats.index import read_format, read_manifest
from ckpt_tools.formats.state_dict.masters import with_masters
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import open_subfolder
from ckpt_tools.trainers.nemo import OPTIMIZER_HALF


def halves_prefix(source: Source) -> str | None:
    """The prefix of the folders ``model`` and ``optim`` of the one such checkpoint, if there is one."""
    ends = (OPTIMIZER_HALF, f"/{OPTIMIZER_HALF}")
    found = [path.removesuffix(OPTIMIZER_HALF) for path in source.files if path == ends[0] or path.endswith(ends[1])]
    if len(found) != 1 or sum(path.rpartition("/")[2] == ".metadata" for path in source.files) != 1:
        return None
    folder = f"{found[0]}model/"
    files = [path[len(folder) :] for path in source.files if path.startswith(folder)]
    return found[0] if any("/" not in path and path.endswith(".safetensors") for path in files) else None


def read_halves(source: Source, prefix: str, options: ReadOptions) -> Manifest:
    """The whole checkpoint.

    Raises:
        UnsupportedError: the optimizer knows parameters that the model does not have. FormatError: as the readers.
    """
    folder = f"{prefix}optim/"
    files = {path: size for path, size in source.files.items() if path.startswith(folder)}
    optim = read_manifest(read_format("dcp"), replace(source, files=files), options)
    model = read_in(source, f"{prefix}model/")
    refuse_weights(optim, f"{prefix}optim/.metadata")
    check_names(optim, model, f"{prefix}optim/.metadata", f"{prefix}model")
    state = optim.tree or StateTree((), None)
    tree = StateTree(("model",), state.optim or ("optim",), state.is_flattened, state.extras)
    joined = replace(
        optim,
        tensors={**model.tensors, **optim.tensors},
        aliases=model.aliases,
        world_size=None,
        tree=tree,
        notes=(*optim.notes, *model.notes),
    )
    joined = with_masters(joined)
    return replace(joined, notes=(*joined.notes, *_beside(source, prefix, joined)))


def read_in(source: Source, folder: str) -> Manifest:
    """The model in safetensors in ``folder``, with the names that its files have in the whole source."""
    files = {path[len(folder) :]: size for path, size in source.files.items() if path.startswith(folder)}
    try:
        manifest = read_manifest(read_format("safetensors"), open_subfolder(source, folder[:-1], files), ReadOptions())
    except CkptError as error:
        path = folder if error.path is None else f"{folder}{error.path}"
        raise type(error)(error.message, path=path, key=error.key) from error
    return replace(manifest, tensors={key: _moved(entry, folder) for key, entry in manifest.tensors.items()})


def _moved(entry: TensorEntry, prefix: str) -> TensorEntry:
    return replace(entry, shards=entry.shards.with_file_prefix(prefix))


def refuse_weights(optim: Manifest, path: str) -> None:
    """Raises UnsupportedError if the optimizer at ``path`` has weights beside it."""
    if any(key.slot == WEIGHT for key in optim.select_kinds(Kind.PARAMETER, Kind.BUFFER)):
        raise UnsupportedError("there are weights here and in the folder of the model", path=path)


def check_names(optim: Manifest, model: Manifest, path: str | None, folder: str) -> None:
    """Raises UnsupportedError unless every parameter that the optimizer at ``path`` knows is a weight of the same shape
    in ``folder``."""
    state = optim.select_kinds(Kind.STATE)
    unknown = sorted({key.fqn for key, entry in state.items() if not _fits(key, entry, model.tensors)})
    if unknown:
        raise UnsupportedError(
            f"the optimizer's parameters {join_names(unknown)} are not in {folder} under these names and shapes (the "
            f"model was saved under other names, such as those of Hugging Face); name {folder} for the weights alone",
            path=path,
        )


def _fits(key: StateKey, entry: TensorEntry, weights: Mapping[StateKey, Any]) -> bool:
    weight = weights.get(StateKey(key.fqn))
    return weight is not None and entry.shape in ((), (1,), weight.shape)


def _beside(source: Source, prefix: str, manifest: Manifest) -> list[Note]:
    """Notes on the files that are part of neither half."""
    used = manifest.files | {f"{prefix}{OPTIMIZER_HALF}"}
    left = [path for path in source.files if path.startswith(prefix) and path not in used]
    return [note_unrelated_files(path) for path in left]
