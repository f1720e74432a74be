"""Refuses one file of a checkpoint that is a folder, by its name, and says which folder to name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.dcp.names import METADATA, is_of_dcp
from ckpt_tools.formats.deepspeed.names import MODEL, layer_name, model_name, optim_name
from ckpt_tools.formats.foreign import rank_in_name
from ckpt_tools.formats.megatron.names import COMMON_FILE, CONFIG_FILE
from ckpt_tools.formats.orbax.names import CHECKPOINT, TREE
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import PARTS
from ckpt_tools.trainers.lightning import META
from ckpt_tools.trainers.names import is_own

SINGLE_FILES = ("torch", "safetensors", "gguf", "npz")
"""Formats that are one file: named by the user, they read this file alone."""

_SHARD = re.compile(r".*-\d{5}-of-(\d{5})\.(?:safetensors|bin|gguf)")
_STATE = re.compile(r"(.+)/zero/[^/]+/[^/]+\.pt")

_MAX_ABOVE = 6
"""Folders above a file of Orbax' arrays."""

_KNOWN = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf", ".npz")

Exists = Callable[[str], bool]


def folder_of_one_file(url: str, source: Source, exists: Exists) -> str | None:
    """The folder of the checkpoint that ``url``, opened as ``source``, is one file of; None if it is all of it.

    ``exists`` tells whether a URL is a file. It is asked about names that only DeepSpeed, Megatron-Core and Orbax give
    to the files beside it.
    """
    folder, _, name = url.rpartition("/")
    if not folder or list(source.files) != [name]:
        return None
    if is_of_dcp(name) and name != METADATA:
        above, _, part = folder.rpartition("/")
        return above if re.fullmatch(PARTS, part) else folder
    if (state := _STATE.fullmatch(url)) is not None:
        return state[1]
    if (model := MODEL.fullmatch(name)) is not None:  # without ZeRO it is all of its rank, and with one rank of all
        return folder if any(exists(f"{folder}/{each}") for each in _beside_model_states(int(model["mp"]))) else None
    shard = _SHARD.fullmatch(name)
    is_shard = shard is not None and int(shard[1]) > 1
    if name in (COMMON_FILE, CONFIG_FILE, META):  # names that other files have too
        return folder if exists(f"{folder}/{METADATA}") else None
    if is_shard or name.endswith(("model_states.pt", "optim_states.pt")) or is_own(name) or rank_in_name(name):
        return folder
    return None if name.endswith(_KNOWN) or "://" in url else _orbax_folder(folder, exists)


def _beside_model_states(mp: int) -> Iterator[str]:
    """Files beside a rank's model file: one of them exists, unless one rank saved without ZeRO."""
    yield optim_name(0, mp)
    yield f"bf16_{optim_name(0, mp)}"
    yield layer_name(0, "-model_00")
    yield model_name(1 if mp == 0 else 0)


def _orbax_folder(folder: str, exists: Exists) -> str | None:
    """The outermost folder of Orbax around a file."""
    found = None
    for _ in range(_MAX_ABOVE):
        if any(exists(f"{folder}/{name}") for name in (CHECKPOINT, TREE)):
            found = folder
        folder = folder.rpartition("/")[0]
    return found


def refuse_one_file(folder: str, source: Source, format_name: str | None) -> tuple[Note, ...]:
    """A note on the other files of the checkpoint in ``folder`` if the user named the format of this file.

    Raises:
        UnsupportedError: the format was not named, so that the whole checkpoint is meant.
    """
    name = next(iter(source.files))
    if format_name not in SINGLE_FILES:
        raise UnsupportedError(f"this is one file of a checkpoint; name its folder {folder}", path=name)
    why = f"{name} is one file of a checkpoint, and {format_option('from_', format_name)} reads it alone"
    return (Note(Outcome.DROPPED, f"the other files of {folder}", why),)
