"""Checkpoints of a run, found by names of folders and files alone. Pure.

Trainers name a checkpoint by its step, iteration or epoch: ``checkpoint-500``, ``global_step500``, ``step-100``,
``iter_0000010``, ``epoch_1_step_200``, ``ep1-ba20``, ``epoch=1-step=242.ckpt``. The outermost folder of such a name is
the checkpoint, whatever folders are in it. A folder with another name is one if it holds files of a checkpoint itself.
Unfinished saves have names that say so: ``tmp-checkpoint-14``, ``.epoch_3.partial``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from ckpt_tools.core.wording import natural_sort_key
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import PARTS, TAGS
from ckpt_tools.trainers.saved import ITSELF, Saved
from ckpt_tools.trainers.verl import CONTENTS

_KEY = r"(?:global[-_]?step|step|iter(?:ation)?|checkpoint|ckpt|epoch|ep|batch|ba)"
_NUMBER = rf"{_KEY}[-_=]?\d{{1,15}}"
_METRIC = r"[A-Za-z][\w/]{0,60}=[-+\d.eE]{1,30}"
_NAMED = re.compile(
    rf"(?:[A-Za-z][\w.]{{0,80}}?[-_.=])??(?:{_METRIC}[-_,]{{1,2}}){{0,4}}{_NUMBER}(?:[-_.=,]{{0,2}}{_NUMBER}|[-_,]{_METRIC}"
    r"|-v\d{1,6}|[-_]rank[-_]?\d{1,6}|_universal)*(?:-last)?(?:\.ckpt)?",
    re.IGNORECASE,
)
_LEADING = re.compile(rf"(?<![\w/])(?!{_NUMBER}[-_,])(?:{_METRIC}[-_,]{{1,2}})")
"""A metric before the number, which does not say which checkpoint is later."""

_TAG = re.compile(r"global_step\d+")

_UNFINISHED = re.compile(
    r"(?P<head>\.|_?tmp[-_.]|)(?P<core>.+?)(?P<tail>\.(?:partial|tmp|incomplete|unfinished)|\.orbax-checkpoint-tmp.*|)"
)

_CARRIER = re.compile(
    r"\.metadata|__\d+\.metadata|__\d+_\d+\.distcp|.*_states\.pt|.*\.(?:safetensors|pt|pth|bin|ckpt|gguf|npz)"
    r"|.*\.(?:safetensors|bin)\.index\.json|_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|metadata\.pkl"
)
"""Files that every checkpoint has."""

_ORBAX = re.compile(r"(?:_CHECKPOINT_METADATA|[^/]+/(?:_METADATA|manifest\.ocdbt)|commit_success\.txt)")

_FILE = re.compile(r"(?P<stem>.+)\.(?P<suffix>pt|pth|ckpt|bin|safetensors)")
_PLAIN_STEMS = frozenset(("last", "best", "final", "latest"))

_PART = re.compile(f"{PARTS}|{TAGS}")
"""Folders of accelerate that are one checkpoint together."""

_STEP = re.compile(
    r"(?:^|[^a-z])(?:(?:global[-_]?)?step|iter(?:ation)?|checkpoint|ckpt|ba)[-_=]?0*(\d+)", re.IGNORECASE
)


LATEST = "latest"
"""The name of the newest checkpoint behind ``@``."""


@dataclass(frozen=True, slots=True)
class Member:
    """A checkpoint of a run: its path in the run, and its files by their paths in the run. A checkpoint that is one
    file has that path itself."""

    name: str
    files: Mapping[str, int]
    is_finished: bool = True
    """False if its name says that it is being written, or was when its saver was killed."""
    known_as: str = ""
    """The name of the folder, if the run is itself one checkpoint and ``name`` is ``.``."""

    @property
    def title(self) -> str:
        """The last part of its path."""
        return self.known_as or self.name.rpartition("/")[2]

    @property
    def is_file(self) -> bool:
        return self.name in self.files

    @property
    def is_run(self) -> bool:
        """Whether the run is itself this checkpoint."""
        return self.name == ITSELF

    @property
    def folder(self) -> str:
        """The folder of its files."""
        return parent_of(self.name) if self.is_file else "" if self.is_run else self.name

    def saved(self, run: Source) -> Saved:
        """The checkpoint as the rules see it."""
        root = self.folder
        files = {path[len(root) + 1 :] if root else path: size for path, size in self.files.items()}
        return Saved(run, self.name, self.title, self.step, self.is_finished, root, files)

    @property
    def is_numbered(self) -> bool:
        """Whether its name says a step, an iteration or an epoch."""
        return is_named(self._core)

    @property
    def number(self) -> str:
        """Its numbers, which are those of the other files of the same step too."""
        return " ".join(re.findall(r"\d+", self._core))

    @property
    def _core(self) -> str:
        core = core_of(self.title)
        stem = _FILE.fullmatch(core) if self.is_file else None
        return core if stem is None else stem["stem"]

    @property
    def order(self) -> tuple[bool, list[tuple[int, str]]]:
        """Later ones are larger. Names without a number come before all others."""
        return self.is_numbered, natural_sort_key(
            "/".join(_LEADING.sub("", core_of(part)) for part in self.name.split("/"))
        )

    @property
    def step(self) -> int | None:
        """The step that its name says, or the one of the folders in it."""
        for name in (self.known_as or self.name, *sorted({parent_of(path) for path in self.files}, key=len)):
            step = step_in(name)
            if step is not None:
                return step
        return None


def step_in(folder: str) -> int | None:
    """The step that the last name with one says: 242 of ``epoch=1-step=242``, 1000 of Orbax' ``1000``."""
    name = core_of(folder.rpartition("/")[2])
    if name.isdecimal() and name.isascii():
        return int(name[:18])
    steps = _STEP.findall(folder)
    return int(steps[-1][:18]) if steps else None


def is_named(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint: it says a step, an iteration or an epoch."""
    return _NAMED.fullmatch(name) is not None or (name.isdecimal() and name.isascii())


def is_tag(folder: str) -> bool:
    """Whether the folder has the name that DeepSpeed gives to a tag."""
    return _TAG.fullmatch(folder.rpartition("/")[2]) is not None


def core_of(name: str) -> str:
    """``checkpoint-14`` of ``tmp-checkpoint-14``."""
    match = _UNFINISHED.fullmatch(name)
    return name if match is None else match["core"]


def is_carrier(path: str) -> bool:
    """True if it is a file that every checkpoint has."""
    return _CARRIER.fullmatch(path.rpartition("/")[2]) is not None


def members(files: Mapping[str, int]) -> list[Member]:
    """The checkpoints in a run whose files are ``files``, but for the run itself; the newest first."""
    named = _named_folders(files)
    parted = {parent_of(path) for path in files if path.rpartition("/")[2] == CONTENTS}
    owners: dict[str, bool] = {}
    plain: set[str] = set()
    for folder in {parent_of(path) for path in files if is_carrier(path)} - {""}:
        owner = next((each for each in path_of(folder) if each in named), None)
        if owner is None:
            whole = next((each for each in ("", *path_of(folder)) if each in parted), folder)
            plain |= {whole} if _is_shown(whole) else set()
        elif _is_shown(parent_of(owner)):
            owners[owner] = not is_unfinished(owner.rpartition("/")[2])
    singles = _single_files(files, owners)
    plain = _without_containers(plain - {parent_of(path) for path in singles}, owners)
    found = [*owners.items(), *((folder, True) for folder in plain), *((path, True) for path in singles)]
    inside = _inside(files, [name for name, _ in found])
    everything = [Member(name, inside[name], is_finished) for name, is_finished in found]
    return sorted(everything, key=lambda member: member.order, reverse=True)


def checkpoints(files: Iterable[str]) -> list[str]:
    """The folders and files of finished checkpoints in a run whose files are ``files``, the newest first by the numbers
    in their names.

    A folder with a number that holds one checkpoint stands for it: ``epoch_12`` for ``epoch_12/global_step264``.
    """
    return [member.name for member in members(dict.fromkeys(files, 0)) if member.is_finished]


def proposal(files: Iterable[str], url: str) -> str:
    """The end of a message that several checkpoints were found: how to name one; nothing if that does not help."""
    found = checkpoints(files)
    return f", or write {url}@{LATEST} or {url}@{found[0]}" if len(found) > 1 else ""


def others_of(files: Mapping[str, int], used: Collection[str]) -> list[Member]:
    """The other checkpoints than the one that holds ``used``: folders whose names say another step, the newest first.

    A tag of DeepSpeed's is not taken for another checkpoint: a trainer keeps one in each of its own, beside the model.
    """
    found = (each for each in members(files) if each.is_numbered and not each.is_file and not is_tag(each.name))
    return [each for each in found if each.files.keys().isdisjoint(used)]


def files_of_others(files: Mapping[str, int], used: Collection[str]) -> frozenset[str]:
    """The files of ``others_of``."""
    return frozenset(path for each in others_of(files, used) for path in each.files)


def _named_folders(files: Iterable[str]) -> frozenset[str]:
    """The outermost folders with names of checkpoints. One that holds several such folders is a run."""
    every = {each for path in files if is_carrier(path) for each in path_of(parent_of(path))}
    orbax = {each for path in files for each in path_of(parent_of(path)) if _ORBAX.fullmatch(path[len(each) + 1 :])}
    candidates = {each for each in every if _is_candidate(each, orbax)}
    below: dict[str, set[str]] = {}
    for each in candidates:
        holders = [outer for outer in path_of(parent_of(each)) if outer in candidates]
        if holders:
            below.setdefault(holders[-1], set()).add(each)
    several = {outer for outer, inner in below.items() if len(inner) > 1}
    runs = several | {outer for each in several for outer in path_of(each)}
    kept = candidates - runs
    kept -= {each for each in kept if any(outer in kept for outer in path_of(parent_of(each)))}
    return frozenset(_alone(each, every) for each in kept)


def _is_candidate(folder: str, orbax: set[str]) -> bool:
    name = folder.rpartition("/")[2]
    core = core_of(name)
    if core.isdecimal():
        return folder in orbax or ".orbax-checkpoint-tmp" in name
    return is_named(core) and (not name.startswith(".") or name != f".{core}")


def _alone(folder: str, every: Iterable[str]) -> str:
    """A folder with a number that holds one tag alone stands for it: ``e_12`` for ``e_12/global_step264``."""
    parent = parent_of(folder)
    beside = [each for each in every if each.startswith(f"{parent}/") and parent_of(each) == parent]
    return parent if is_tag(folder) and beside == [folder] and _has_number(parent) else folder


def _single_files(files: Iterable[str], owners: Iterable[str]) -> set[str]:
    """Checkpoints that are one file each: Lightning's ``.ckpt``, and files whose names say a step or an epoch."""
    matches = {path: match for path in files if (match := _FILE.fullmatch(path.rpartition("/")[2])) is not None}
    free = {path: match for path, match in matches.items() if not any(each in owners for each in path_of(path))}
    shown = {path: match for path, match in free.items() if _is_shown(parent_of(path))}
    found = {path for path, match in shown.items() if match["suffix"] == "ckpt" or _NAMED.fullmatch(match["stem"])}
    kinds = {(parent_of(path), shown[path]["suffix"]) for path in found}
    beside = (path for path, match in shown.items() if match["stem"] in _PLAIN_STEMS)
    return found | {path for path in beside if (parent_of(path), shown[path]["suffix"]) in kinds}


def _without_containers(plain: set[str], owners: Iterable[str]) -> set[str]:
    """``plain`` without folders that hold numbered checkpoints, which are runs, and without folders in a checkpoint."""
    plain = {_whole(folder) for folder in plain} - {""}
    plain -= {outer for owner in owners for outer in path_of(parent_of(owner))}
    plain -= {parent_of(each) for each in plain if _has_number(each) and not _has_number(parent_of(each))}
    return {folder for folder in plain if not any(outer in plain for outer in path_of(parent_of(folder)))}


def _inside(files: Mapping[str, int], names: Iterable[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {name: {} for name in names}
    for path, size in files.items():
        for each in path_of(path):
            if each in found:
                found[each][path] = size
    return found


def _is_shown(folder: str) -> bool:
    """Whether no part of it is hidden or unfinished."""
    return not any(is_unfinished(name) for name in folder.split("/") if name)


def is_unfinished(name: str) -> bool:
    return name != core_of(name)


def path_of(folder: str) -> Iterator[str]:
    """``a``, ``a/b`` and ``a/b/c`` of the last."""
    return accumulate(folder.split("/"), "{}/{}".format) if folder else iter(())


def parent_of(path: str) -> str:
    return path.rpartition("/")[0]


def _has_number(folder: str) -> bool:
    return re.search(r"\d", folder.rpartition("/")[2]) is not None


def _whole(folder: str) -> str:
    """The folder that is one checkpoint with those beside ``folder``; nothing if that is the run itself."""
    return parent_of(folder) if _PART.fullmatch(folder.rpartition("/")[2]) else folder
