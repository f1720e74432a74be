"""Refuses one file of a checkpoint that is a folder, by its name, and says which folder to name."""

from __future__ import annotations

import re
from collections.abc import Callable

from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.dcp.names import METADATA, is_dcp_file
from ckpt_tools.formats.deepspeed.names import MODEL_FILE, layer_file_name, model_file_name, optim_file_name
from ckpt_tools.formats.megatron.names import COMMON_FILE, CONFIG_FILE
from ckpt_tools.formats.orbax.names import CHECKPOINT_FILE, TREE_FILE
from ckpt_tools.state_tree.incomplete_state import describe_rank_in_name
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import DCP_FOLDERS
from ckpt_tools.trainers.lerobot import STATE_FOLDER
from ckpt_tools.trainers.lightning import META
from ckpt_tools.trainers.names import is_trainer_file
from ckpt_tools.trainers.torch_checkpointing import INDEX

SINGLE_FILES = ("torch", "safetensors", "gguf", "npz")
"""Formats that are one file: named by the user, they read this file alone."""

_SHARD_FILE = re.compile(r".*-\d{5}-of-(\d{5})\.(?:safetensors|bin|gguf)")
_RANK_SHARD_FILE = re.compile(r"shard-(\d{5})(-model-\d{5}-of-\d{5}\.safetensors)")
_MANAGED_FILE = re.compile(r".+_\d+\.safetensors")
"""A rank's of torch_checkpointing, with pieces that its index alone places; other models have such names too."""

_UNIVERSAL_FILE = re.compile(r"(.+)/zero/[^/]+/[^/]+\.pt")

_MAX_ORBAX_DEPTH = 6
"""Folders above a file of Orbax' arrays."""

_SINGLE_FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf", ".npz")

UrlExists = Callable[[str], bool]


def find_folder_of_file(url: str, source: Source, url_exists: UrlExists) -> str | None:
    """The folder of the checkpoint that ``url``, opened as ``source``, is one file of; None if it is all of it.

    ``url_exists`` tells whether a URL is a file. It is asked about names that only DCP, DeepSpeed, Megatron-Core,
    Orbax and torch_checkpointing give to the files beside it.
    """
    folder, _, name = url.rpartition("/")
    if not folder or list(source.files) != [name]:
        return None
    if is_dcp_file(name) and name != METADATA:
        outer_folder, _, folder_name = folder.rpartition("/")
        return outer_folder if re.fullmatch(DCP_FOLDERS, folder_name) else folder
    if (universal_match := _UNIVERSAL_FILE.fullmatch(url)) is not None:
        return universal_match[1]
    if (model_match := MODEL_FILE.fullmatch(name)) is not None:
        # Without ZeRO it is all of its rank, and with one rank of all: then none of these files is beside it.
        rank = int(model_match["mp"])
        siblings = (
            optim_file_name(0, rank),
            f"bf16_{optim_file_name(0, rank)}",
            layer_file_name(0, "-model_00"),
            model_file_name(1 if rank == 0 else 0),
        )
        return folder if any(url_exists(f"{folder}/{each}") for each in siblings) else None
    shard_match = _SHARD_FILE.fullmatch(name)
    is_shard = shard_match is not None and int(shard_match[1]) > 1
    if (rank_match := _RANK_SHARD_FILE.fullmatch(name)) is not None:  # each rank counts its own files
        is_shard |= int(rank_match[1]) > 1 or url_exists(f"{folder}/shard-00002{rank_match[2]}")
    is_shard |= _MANAGED_FILE.fullmatch(name) is not None and url_exists(f"{folder}/{INDEX}")
    if name in (COMMON_FILE, CONFIG_FILE, META):  # names that other files have too
        return folder if url_exists(f"{folder}/{METADATA}") else None
    is_of_rank = name.endswith(("model_states.pt", "optim_states.pt")) or describe_rank_in_name(name)
    if is_shard or is_of_rank or is_trainer_file(name):
        return folder.removesuffix(f"/{STATE_FOLDER}")
    return None if name.endswith(_SINGLE_FILE_SUFFIXES) or "://" in url else _find_orbax_folder(folder, url_exists)


def _find_orbax_folder(folder: str, url_exists: UrlExists) -> str | None:
    """The outermost folder of Orbax around a file."""
    outermost_folder = None
    for _ in range(_MAX_ORBAX_DEPTH):
        if any(url_exists(f"{folder}/{name}") for name in (CHECKPOINT_FILE, TREE_FILE)):
            outermost_folder = folder
        folder = folder.rpartition("/")[0]
    return outermost_folder


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
