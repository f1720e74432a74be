"""Questions about a file's name, answered by the records of all trainers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache

from ckpt_tools.trainers import accelerate, transformers
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.record import Meaning

_UNFINISHED = re.compile(r"(?i)(?:^|[._-])(?:in[_-]?progress|incomplete|unfinished)(?:[._-]|$)")
"""Markers that savers write first and remove last."""

_OF_RANKS = re.compile(r".*_rank_\d.*\.pt|.*_rank\d.*\.bin")
"""Each rank's part of something."""

_OF_OPTIMIZER = re.compile(r"(?i)(?:.*[^a-z])?(?:opt(?=_states?)|optim(?:s|izers?)?)(?:[^a-z].*)?")
"""A part of a path that says optimizer; one that says model too can hold either."""

_TEXTS = (".json", ".jsonl", ".yaml", ".yml", ".txt", ".md", ".py", ".csv")

_RANK_FILES = tuple(re.compile(trainer.rank_file) for trainer in TRAINERS if trainer.rank_file)
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MEANINGS = {name: meaning for trainer in TRAINERS for name, meaning in trainer.reads.items()}


@cache
def pattern(*fields: str) -> re.Pattern[str]:
    """One pattern of these fields of all trainers."""
    parts = (str(getattr(trainer, field)) for trainer in TRAINERS for field in fields)
    return re.compile("|".join(filter(None, parts)))


def is_own(name: str) -> bool:
    """Whether a trainer gives this name to a small file beside the model, and to nothing else."""
    return meaning_of(name) is not None or pattern("own", "optimizer").fullmatch(name) is not None


def is_unread(name: str) -> bool:
    """Whether only the trainer reads a file of this name: its own state, or a part of a rank."""
    return pattern("own", "optimizer").fullmatch(name) is not None or _OF_RANKS.fullmatch(name) is not None


def is_beside(name: str) -> bool:
    """True if a file of this name accompanies a model and does not hold one."""
    return meaning_of(name) is not None or is_unread(name)


def is_optimizer(name: str) -> bool:
    """Whether a file has the name of the optimizer of a model beside it."""
    return pattern("optimizer").fullmatch(name) is not None


def holds_optimizer(path: str) -> bool:
    """Whether a file in a checkpoint holds an optimizer by its name or the name of a folder around it, whichever
    trainer wrote it."""
    parts = path.split("/")
    is_named = any(_OF_OPTIMIZER.fullmatch(part) and "model" not in part.lower() for part in parts)
    return is_named and not path.lower().endswith(_TEXTS)


def optimizer_of(files: Collection[str]) -> str | None:
    """The file with the optimizer of the model in a folder; None if there is none."""
    last = accelerate.last_model(files)
    names = (f"optimizer_{last}.bin",) if last else (accelerate.OPTIMIZER, transformers.OPTIMIZER)
    return next((name for name in names if name in files and len(files) > 1), None)


def meaning_of(name: str) -> Meaning | None:
    """Entries that a file of this name adds to the manifest; None if it is not read."""
    return _MEANINGS.get(name)


def marks_unfinished(name: str) -> bool:
    """Whether a file of this name says that a checkpoint is unfinished."""
    return _UNFINISHED.search(name) is not None


def rank_file(path: str) -> re.Match[str] | None:
    """The match of a name that says its rank, as verl's and accelerate's do, with the groups ``item``, ``rank``, and
    ``world`` or ``index``. Other files of ranks are known by what they hold."""
    name = path.rpartition("/")[2]
    return next((match for form in _RANK_FILES if (match := form.fullmatch(name)) is not None), None)


def is_candidate(path: str) -> bool:
    """Whether a file could be a rank's: one of torch's, and not one that is known to be a trainer's own."""
    name = path.rpartition("/")[2]
    return name.endswith(_SUFFIXES) and (rank_file(name) is not None or not is_own(name))


def are_those_of_ranks(paths: Iterable[str]) -> bool:
    """Whether files at the top are those of ranks, by their names: one alone could be a whole state."""
    return sum("/" not in path and rank_file(path) is not None for path in paths) > 1


def worlds(paths: Iterable[str]) -> set[int]:
    """World sizes in the names."""
    found = (world_of(match) for path in paths if (match := rank_file(path)) is not None)
    return {world for world in found if world is not None}


def world_of(match: re.Match[str]) -> int | None:
    """The world size in the name of a rank's file; verl's has one."""
    world = match.groupdict().get("world")
    return None if world is None else int(world)
