"""Refuses one file of a checkpoint that is a folder, by its name, and says which folder to name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import option
from ckpt_tools.core.wording import without_secrets
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.foreign import rank_in_name
from ckpt_tools.formats.megatron.names import COMMON_FILE, CONFIG_FILE
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import PARTS
from ckpt_tools.trainers.names import is_own

SINGLE_FILES = ("torch", "safetensors", "gguf", "npz")
"""Formats that are one file: named by the user, they read this file alone."""

_FOLDER_OF = (
    re.compile(rf"(.+)/{PARTS}/__\d+(?:_\d+\.distcp|\.metadata)"),
    re.compile(r"(.+)/__\d+(?:_\d+\.distcp|\.metadata)"),
    re.compile(r"(.+)/zero/[^/]+/[^/]+\.pt"),
    re.compile(r"(.+)/(?!mp_rank_\d+_model)[^/]*(?:model|optim)_states\.pt"),
)
"""URLs of files of DCP, universal and DeepSpeed, each with the folder of the checkpoint."""

_WITHOUT_ZERO = re.compile(r"mp_rank_(\d+)_model_states\.pt")
"""Without ZeRO it holds the whole state of its rank, and with one rank it is the checkpoint."""

_SHARD = re.compile(r".*-\d{5}-of-(\d{5})\.(?:safetensors|bin|gguf)")

_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA")
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
    known = next((match[1] for pattern in _FOLDER_OF if (match := pattern.fullmatch(url)) is not None), None)
    if known is not None:
        return known
    shard = _SHARD.fullmatch(name)
    is_shard = shard is not None and int(shard[1]) > 1
    if is_shard or is_own(name) or rank_in_name(name) is not None:
        return folder
    if (rank := _WITHOUT_ZERO.fullmatch(name)) is not None:
        return folder if any(exists(f"{folder}/{each}") for each in _beside_model_states(rank[1])) else None
    if name in (COMMON_FILE, CONFIG_FILE) and exists(f"{folder}/.metadata"):
        return folder
    return None if name.endswith(_KNOWN) or "://" in url else _orbax_folder(folder, exists)


def _beside_model_states(rank: str) -> Iterator[str]:
    """Files beside a rank's model file: one of them exists, unless one rank saved without ZeRO."""
    yield f"zero_pp_rank_0_mp_rank_{rank}_optim_states.pt"
    yield f"bf16_zero_pp_rank_0_mp_rank_{rank}_optim_states.pt"
    yield "layer_00-model_00-model_states.pt"
    yield f"mp_rank_{1 if int(rank) == 0 else 0:02d}_model_states.pt"


def _orbax_folder(folder: str, exists: Exists) -> str | None:
    """The outermost folder of Orbax around a file."""
    found = None
    for _ in range(_MAX_ABOVE):
        if any(exists(f"{folder}/{name}") for name in _ORBAX):
            found = folder
        folder = folder.rpartition("/")[0]
    return found


def refuse_one_file(folder: str, source: Source, format_name: str | None) -> tuple[Note, ...]:
    """A note on the other files of the checkpoint in ``folder`` if the user named the format of this file.

    Raises:
        UnsupportedError: the format was not named, so that the whole checkpoint is meant.
    """
    name = next(iter(source.files))
    folder = without_secrets(folder)
    if format_name not in SINGLE_FILES:
        raise UnsupportedError(f"this is one file of a checkpoint; name its folder {folder}", path=name)
    why = f"{name} is one file of a checkpoint, and {option('from_', format_name)} reads it alone"
    return (Note(Outcome.DROPPED, f"the other files of {folder}", why),)
