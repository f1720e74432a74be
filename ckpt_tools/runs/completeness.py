"""Is a checkpoint of a run complete, by the markers of the trainer and of the format that wrote it?

Rules judge names and sizes of files and a few header reads: those of all checkpoints here, those of trainers in
``trainers``, those of formats in ``formats/NAME/complete.py``. A rule returns a sentence if the save did not finish, or
if a file is missing or cut off; otherwise None, also for checkpoints that it is not about. No tensor is read, so a
damaged element is not found here: ``verify`` finds it.
"""

from __future__ import annotations

import re

from ckpt_tools.core.format_names import BUILTIN_FORMATS, FORMAT_BY_FILE_SUFFIX
from ckpt_tools.errors import FormatError, UnsafeError
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.builtin import FORMATS
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.names import combine_patterns, is_trainer_file, is_unfinished_marker
from ckpt_tools.trainers.run_folders import is_checkpoint_file
from ckpt_tools.trainers.saved import SavedCheckpoint

_WEIGHTLESS_FILE = re.compile(
    r"(?:optimizer|optim|scheduler|lr_scheduler|rng|data|train_state|optimizer_state)(?:_\d+)?\.(?:pt|pth|bin)"
)
"""Names of files without weights that several trainers use."""

_TENSORLESS_FILE = re.compile(
    r"(?:optim(?:izer)?|(?:lr_)?scheduler|rng|random|scaler|sampler|data(?:loader)?)(?:[-_=.].*)?"
)
"""Names of files of a step that need not hold tensors: those of an optimizer without state, of a scheduler."""

_NEVER_EMPTY_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".metadata", ".json")
"""Endings of files that are never empty."""


def find_file_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why it is not complete, in words; None if it is. Raises StoreError."""
    rules = (
        *(_check_name, _check_markers, _check_empty_files),
        *dict.fromkeys(trainer.find_problem for trainer in TRAINERS if trainer.find_problem is not None),
        *(each.problem for each in _list_detected_formats()),
        _check_tensors,
    )
    try:
        return next((text for rule in rules if (text := rule(checkpoint)) is not None), None)
    except (FormatError, UnsafeError) as error:
        return str(error)


def _check_name(checkpoint: SavedCheckpoint) -> str | None:
    name = checkpoint.name.rpartition("/")[2]
    return None if checkpoint.is_finished else f"the name {name} says that the save did not finish, or is under way"


def _check_markers(checkpoint: SavedCheckpoint) -> str | None:
    formats = (trainer.unfinished_marker for trainer in TRAINERS if trainer.unfinished_marker is not None)
    siblings = (checkpoint.find_sibling(each.format(title=checkpoint.base_name)) for each in formats)
    inner_markers = (path for path in checkpoint.files if is_unfinished_marker(path.rpartition("/")[2]))
    marker_path = next(inner_markers, None) or next(filter(None, siblings), None)
    return None if marker_path is None else f"the file {marker_path} marks it as unfinished"


def _check_empty_files(checkpoint: SavedCheckpoint) -> str | None:
    empty_paths = (path for path, size in checkpoint.files.items() if not size and path.endswith(_NEVER_EMPTY_SUFFIXES))
    path = next(empty_paths, None)
    return None if path is None else f"{path} is empty: the save or a copy of it did not finish"


def _check_tensors(checkpoint: SavedCheckpoint) -> str | None:
    """Finds the rest of a checkpoint whose weights are gone, or were not written yet, and a checkpoint whose files are
    whole, and none of those for weights holds a tensor. The first file that does ends the search."""
    model_files = [path for path in checkpoint.files if _may_hold_weights(path)]
    if not model_files and detect_format_name(checkpoint) in ("torch", "safetensors"):
        return "no file that holds the model's weights"
    paths = [path for path in model_files if not _TENSORLESS_FILE.fullmatch(path.rpartition("/")[2])]
    formats = _list_detected_formats()
    if not paths or not all(any(each.is_empty(checkpoint, path) for each in formats) for path in paths):
        return None
    return f"{paths[0]} holds no tensors" if len(paths) == 1 else f"{paths[0]} and its other files hold no tensors"


def _may_hold_weights(path: str) -> bool:
    name = path.rpartition("/")[2]
    is_weightless = name.endswith(".index.json") or is_trainer_file(name) or _WEIGHTLESS_FILE.fullmatch(name)
    return is_checkpoint_file(path) and not is_weightless


def detect_format_name(checkpoint: SavedCheckpoint) -> str:
    """The format by the names of files, as ``inspect`` reports it; ``deepspeed`` for every ZeRO stage."""
    detected_names = (each.name for each in _list_detected_formats() if each.is_named(checkpoint))
    names_by_suffix = (
        name
        for suffix, name in FORMAT_BY_FILE_SUFFIX.items()
        if any(path.endswith(suffix) for path in checkpoint.files)
    )
    return next(detected_names, None) or next(names_by_suffix, "torch")


def infer_world_size(checkpoint: SavedCheckpoint) -> int | None:
    """The number of ranks that wrote it, as the names of its files say."""
    rank_matches = (combine_patterns("own").fullmatch(name) for name in checkpoint.file_names)
    rank_sizes = (int(match[match.lastindex]) + 1 for match in rank_matches if match is not None and match.lastindex)
    return max([*(each.world_size_of(checkpoint) for each in _list_detected_formats()), *rank_sizes]) or None


def _list_detected_formats() -> list[Format]:
    """Built-in formats that are recognised by their files, in the order of detection."""
    return [each for each in FORMATS.values() if BUILTIN_FORMATS[each.name].signs]
