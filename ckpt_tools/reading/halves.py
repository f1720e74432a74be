"""A folder whose model and optimizer are checkpoints of two formats, joined by the names of the parameters.

NeMo Automodel writes ``model/`` through ``HuggingFaceStorageWriter`` and ``optim/`` as a DCP ``{"optim", "sched"}``
whose optimizer is flattened by name (components/checkpoint/checkpointing.py, stateful_wrappers.py). The model's names
may be those of Hugging Face, which differ from the optimizer's for some architectures: then nothing says which is
which, and the two are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, StateKey, StateTree, TensorEntry
from ckpt_tools.core.notes import Note, not_part
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import CkptError, UnsupportedError
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import read_manifest
from ckpt_tools.stores.source import Source, Store, StoreWrapper
from ckpt_tools.trainers.names import OPTIMIZER_HALF


def halves_prefix(source: Source) -> str | None:
    """Where the folders ``model`` and ``optim`` of the one such checkpoint lie, if there is one."""
    ends = (OPTIMIZER_HALF, f"/{OPTIMIZER_HALF}")
    found = [path.removesuffix(OPTIMIZER_HALF) for path in source.files if path == ends[0] or path.endswith(ends[1])]
    if len(found) != 1 or sum(path.rpartition("/")[2] == ".metadata" for path in source.files) != 1:
        return None
    folder = f"{found[0]}model/"
    files = [path[len(folder) :] for path in source.files if path.startswith(folder)]
    return found[0] if any("/" not in path and path.endswith(".safetensors") for path in files) else None


def read_halves(source: Source, prefix: str, options: ReadOptions, *, dcp: Format, safetensors: Format) -> Manifest:
    """The whole checkpoint.

    Raises:
        UnsupportedError: the optimizer knows parameters that the model does not have. FormatError: as the readers say.
    """
    optim = read_manifest(dcp, _part(source, f"{prefix}optim/"), options)
    model = _model(safetensors, source, f"{prefix}model/")
    _check_names(optim, model, prefix)
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
    return replace(joined, notes=(*joined.notes, *_beside(source, prefix, joined)))


def _model(reader: Format, source: Source, folder: str) -> Manifest:
    """The manifest of the model, with the names that its files have in the whole source."""
    try:
        manifest = read_manifest(reader, _inside(source, folder), ReadOptions())
    except CkptError as error:
        path = folder if error.path is None else f"{folder}{error.path}"
        raise type(error)(error.message, path=path, key=error.key) from error
    return replace(manifest, tensors={key: _moved(entry, folder) for key, entry in manifest.tensors.items()})


def _part(source: Source, prefix: str) -> Source:
    return replace(source, files={path: size for path, size in source.files.items() if path.startswith(prefix)})


def _inside(source: Source, prefix: str) -> Source:
    """The source whose root is the folder ``prefix``."""
    files = {path[len(prefix) :]: size for path, size in _part(source, prefix).files.items()}
    return Source(_Below(source.store, prefix), files)


@dataclass(frozen=True, slots=True)
class _Below(StoreWrapper):
    """A store whose root is a folder of another."""

    store: Store
    prefix: str

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.store.read_into(self.prefix + path, start, buffer)


def _moved(entry: TensorEntry, prefix: str) -> TensorEntry:
    return replace(entry, shards=entry.shards.below(prefix))


def _check_names(optim: Manifest, model: Manifest, prefix: str) -> None:
    """Raises UnsupportedError unless every parameter that the optimizer knows is a weight of the same shape."""
    if any(key.slot == WEIGHT for key in optim.of_kind(Kind.PARAMETER, Kind.BUFFER)):
        raise UnsupportedError("there are weights here and in the folder of the model", path=f"{prefix}optim/.metadata")
    state = optim.of_kind(Kind.STATE)
    unknown = sorted({key.fqn for key, entry in state.items() if not _fits(key, entry, model.tensors)})
    if unknown:
        raise UnsupportedError(
            f"the optimizer's parameters {listed(unknown)} are not in {prefix}model under these names and shapes (the "
            f"model was saved under other names, such as those of Hugging Face); name {prefix}model for the weights "
            "alone",
            path=f"{prefix}optim/.metadata",
        )


def _fits(key: StateKey, entry: TensorEntry, weights: Mapping[StateKey, Any]) -> bool:
    weight = weights.get(StateKey(key.fqn))
    return weight is not None and entry.shape in ((), (1,), weight.shape)


def _beside(source: Source, prefix: str, manifest: Manifest) -> list[Note]:
    """Notes on the files that are part of neither half."""
    used = manifest.files | {f"{prefix}{OPTIMIZER_HALF}"}
    left = [path for path in source.files if path.startswith(prefix) and path not in used]
    return [not_part(path) for path in left]
