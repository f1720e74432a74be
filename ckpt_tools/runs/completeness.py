"""Is a checkpoint of a run complete, by the markers of the trainer and of the format that wrote it?

Rules judge names and sizes of files and a few header reads: those of all checkpoints here, those of trainers in
``trainers``, those of formats in ``formats/NAME/complete.py``. A rule returns a sentence if the save did not finish, or
if a file is missing or cut off; otherwise None, also for checkpoints that it is not about. No tensor is read, so a
damaged element is not found here: ``verify`` finds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ckpt_tools.core.format_names import BUILTIN_FORMATS, FORMAT_BY_FILE_SUFFIX
from ckpt_tools.errors import FormatError, UnsafeError
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import built_in
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.names import is_own, marks_unfinished, pattern
from ckpt_tools.trainers.run_folders import is_carrier
from ckpt_tools.trainers.saved import Saved

_WITHOUT_WEIGHTS = re.compile(
    r"(?:optimizer|optim|scheduler|lr_scheduler|rng|data|train_state|optimizer_state)(?:_\d+)?\.(?:pt|pth|bin)"
)
"""Names of files without weights that several trainers use."""

_BESIDE = re.compile(r"(?:optim(?:izer)?|(?:lr_)?scheduler|rng|random|scaler|sampler|data(?:loader)?)(?:[-_=.].*)?")
"""Names of files of a step that need not hold tensors: those of an optimizer without state, of a scheduler."""

_EMPTY = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".metadata", ".json")
"""Endings of files that are never empty."""


def problem_of(saved: Saved) -> str | None:
    """Why it is not complete, in words; None if it is. Raises StoreError."""
    try:
        return next((text for rule in _rules() if (text := rule(saved)) is not None), None)
    except (FormatError, UnsafeError) as error:
        return str(error)


def _rules() -> Iterator[Callable[[Saved], str | None]]:
    yield from (_name, _marker, _empty)
    yield from dict.fromkeys(trainer.problem for trainer in TRAINERS if trainer.problem is not None)
    yield from (each.problem for each in _detected())
    yield from (_weightless, _tensorless)


def _name(saved: Saved) -> str | None:
    if saved.is_finished:
        return None
    return f"the name {saved.name.rpartition('/')[2]} says that the save did not finish, or is under way"


def _marker(saved: Saved) -> str | None:
    forms = (trainer.unfinished.format(title=saved.title) for trainer in TRAINERS if trainer.unfinished is not None)
    inside = (path for path in saved.files if marks_unfinished(path.rpartition("/")[2]))
    found = next(inside, None) or next(filter(None, map(saved.beside, forms)), None)
    return None if found is None else f"the file {found} marks it as unfinished"


def _empty(saved: Saved) -> str | None:
    found = next((path for path, size in saved.files.items() if not size and path.endswith(_EMPTY)), None)
    return None if found is None else f"{found} is empty: the save or a copy of it did not finish"


def _weightless(saved: Saved) -> str | None:
    """Finds the rest of a checkpoint whose weights are gone, or were not written yet."""
    if format_of(saved) not in ("torch", "safetensors"):
        return None
    return None if any(_of_model(saved)) else "no file that holds the model's weights"


def _tensorless(saved: Saved) -> str | None:
    """Finds a checkpoint whose files are whole, and none of those for weights holds a tensor. The first one that does
    ends the search."""
    found = [path for path in _of_model(saved) if not _BESIDE.fullmatch(path.rpartition("/")[2])]
    formats = _detected()
    if not found or not all(any(each.is_empty(saved, path) for each in formats) for path in found):
        return None
    return f"{found[0]} holds no tensors" if len(found) == 1 else f"{found[0]} and its other files hold no tensors"


def _of_model(saved: Saved) -> Iterator[str]:
    """Files that may hold weights, by their names."""
    for path in saved.files:
        name = path.rpartition("/")[2]
        is_weights = is_carrier(path) and not path.endswith(".index.json")
        if is_weights and not is_own(name) and not _WITHOUT_WEIGHTS.fullmatch(name):
            yield path


def format_of(saved: Saved) -> str:
    """The format by the names of files, as ``inspect`` reports it; ``deepspeed`` for every ZeRO stage."""
    named = (each.name for each in _detected() if each.is_named(saved))
    ending = (
        name for suffix, name in FORMAT_BY_FILE_SUFFIX.items() if any(path.endswith(suffix) for path in saved.files)
    )
    return next(named, None) or next(ending, "torch")


def world_size_of(saved: Saved) -> int | None:
    """The number of ranks that wrote it, as the names of its files say."""
    own = (pattern("own").fullmatch(name) for name in saved.names)
    of_trainer = (int(match[match.lastindex]) + 1 for match in own if match is not None and match.lastindex)
    return max([*(each.world_size_of(saved) for each in _detected()), *of_trainer]) or None


def _detected() -> list[Format]:
    """Built-in formats that are recognised by their files, in the order of detection."""
    return [each for each in built_in() if BUILTIN_FORMATS[each.name].signs]
