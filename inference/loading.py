"""From a consolidated model file to a model: safetensors (one file, or shards with their index) or torch ``.pt``.

Names are strict: a file with a weight too many or too few is refused. A ``.pt`` file is read with
``weights_only=True``, so opening an unknown file runs none of its code.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ckpt_tools.errors import FormatError, SourceNotFoundError, UnsafeError

from .files import INDEX_FILE, SAFETENSORS_SUFFIX, SINGLE_FILE, check_model_path, consolidate_command
from .training_package import models


def load_model(path: Path) -> nn.Module:
    """The model with the weights of ``path``, in evaluation mode.

    Raises ``SourceNotFoundError``, ``UnsafeError`` for an index that points out of its folder, and ``FormatError`` for
    whatever else is wrong with the file.
    """
    state = read_state_dict(path)
    model = models.build_model()
    _check_names(path, expected=model.state_dict(), found=state)
    model.load_state_dict(state)
    return model.eval()


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a model file or folder by fqn."""
    check_model_path(path)
    if path.is_dir():
        return _read_folder(path)
    return _read_safetensors(path) if path.suffix == SAFETENSORS_SUFFIX else _read_torch(path)


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX_FILE).is_file():
        return _read_sharded(folder)
    return _read_safetensors(folder / SINGLE_FILE)


def _read_sharded(folder: Path) -> dict[str, Tensor]:
    """All tensors of all shards that the index names; the index and the shards have to agree on where each lies."""
    weight_map = _weight_map(folder / INDEX_FILE)
    state: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        shard = _read_safetensors(_inside(folder, name))
        if shard.keys() != {fqn for fqn, file in weight_map.items() if file == name}:
            raise FormatError(f"{folder / name} does not hold the tensors that {INDEX_FILE} says it does")
        state |= shard
    return state


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{index} is not an index of safetensors shards ({error!r})") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FormatError(f"{index} has a weight_map that does not map names to files")
    return weight_map


def _inside(folder: Path, name: str) -> Path:
    """A shard's path. File names in an index come from outside: one with a folder in it is refused."""
    if "/" in name or name in ("", ".", ".."):
        raise UnsafeError(f"{folder / INDEX_FILE} names the shard {name!r}, which is not a file in its own folder")
    return folder / name


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"the shard {path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path} is not a whole safetensors file ({error})") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FormatError(f"{path} holds more than tensors, so it is not opened: loading it could run code") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise FormatError(f"{path} is not a whole torch file ({error})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise FormatError(
            f"{path} is not a flat state dict of tensors; make a model file of it first: {consolidate_command(path)}"
        )
    return state


def _check_names(path: Path, *, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Raise ``FormatError`` that names the first tensor which is missing, unknown or of another shape."""
    for kind, names in (("lacks", expected.keys() - found.keys()), ("has the unknown", found.keys() - expected.keys())):
        if names:
            raise FormatError(f"{path} {kind} tensor {min(names)} ({len(names)} in all): it is of another model")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise FormatError(
                f"{path} has {name} of shape {list(found[name].shape)} where the model has {list(tensor.shape)}"
            )
