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

from ckpt_tools.messages.wording import natural_sort_key
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import DCP_FOLDERS, DEEPSPEED_TAGS
from ckpt_tools.trainers.saved import RUN_ITSELF, SavedCheckpoint
from ckpt_tools.trainers.verl import CONTENTS_FILE

_KEY = r"(?:global[-_]?step|step|iter(?:ation)?|checkpoint|ckpt|epoch|ep|batch|ba)"
_NUMBER = rf"{_KEY}[-_=]?\d{{1,15}}"
_METRIC = r"[A-Za-z][\w/]{0,60}=[-+\d.eE]{1,30}"
_CHECKPOINT_NAME = re.compile(
    rf"(?:[A-Za-z][\w.]{{0,80}}?[-_.=])??(?:{_METRIC}[-_,]{{1,2}}){{0,4}}{_NUMBER}(?:[-_.=,]{{0,2}}{_NUMBER}|[-_,]{_METRIC}"
    r"|-v\d{1,6}|[-_]rank[-_]?\d{1,6}|_universal)*(?:-last)?(?:\.ckpt)?",
    re.IGNORECASE,
)
_LEADING_METRIC = re.compile(rf"(?<![\w/])(?!{_NUMBER}[-_,])(?:{_METRIC}[-_,]{{1,2}})")
"""A metric before the number, which does not say which checkpoint is later."""

_DEEPSPEED_TAG = re.compile(r"global_step\d+")

_UNFINISHED_NAME = re.compile(
    r"(?P<head>\.|_?tmp[-_.]|)(?P<core>.+?)(?P<tail>\.(?:partial|tmp|incomplete|unfinished)|\.orbax-checkpoint-tmp.*|)"
)

_CHECKPOINT_FILE = re.compile(
    r"\.metadata|__\d+\.metadata|__\d+_\d+\.distcp|.*_states\.pt|.*\.(?:safetensors|pt|pth|bin|ckpt|gguf|npz)"
    r"|.*\.(?:safetensors|bin)\.index\.json|_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|metadata\.pkl"
)
"""Files that every checkpoint has."""

_ORBAX_FILE = re.compile(r"(?:_CHECKPOINT_METADATA|[^/]+/(?:_METADATA|manifest\.ocdbt)|commit_success\.txt)")

_SINGLE_FILE = re.compile(r"(?P<stem>.+)\.(?P<suffix>pt|pth|ckpt|bin|safetensors)")
_PLAIN_STEMS = frozenset(("last", "best", "final", "latest"))

_ACCELERATE_FOLDER = re.compile(f"{DCP_FOLDERS}|{DEEPSPEED_TAGS}")

_STEP = re.compile(
    r"(?:^|[^a-z])(?:(?:global[-_]?)?step|iter(?:ation)?|checkpoint|ckpt|ba)[-_=]?0*(\d+)", re.IGNORECASE
)


LATEST = "latest"
"""The name of the newest checkpoint behind ``@``."""


@dataclass(frozen=True, slots=True)
class RunMember:
    """A checkpoint of a run: its path in the run, and its files by their paths in the run. A checkpoint that is one
    file has that path itself."""

    name: str
    files: Mapping[str, int]
    is_finished: bool = True
    """False if its name says that it is being written, or was when its saver was killed."""
    folder_name: str = ""
    """The name of the folder, if the run is itself one checkpoint and ``name`` is ``.``."""

    @property
    def base_name(self) -> str:
        """The last part of its path."""
        return self.folder_name or self.name.rpartition("/")[2]

    @property
    def is_file(self) -> bool:
        return self.name in self.files

    @property
    def is_run(self) -> bool:
        """Whether the run is itself this checkpoint."""
        return self.name == RUN_ITSELF

    @property
    def folder(self) -> str:
        """The folder of its files."""
        return get_parent_folder(self.name) if self.is_file else "" if self.is_run else self.name

    def to_saved_checkpoint(self, run: Source) -> SavedCheckpoint:
        """The checkpoint as the rules see it."""
        root = self.folder
        files = {path[len(root) + 1 :] if root else path: size for path, size in self.files.items()}
        return SavedCheckpoint(run, self.name, self.base_name, self.step, self.is_finished, root, files)

    @property
    def is_numbered(self) -> bool:
        """Whether its name says a step, an iteration or an epoch."""
        return is_checkpoint_name(self._plain_name)

    @property
    def step_key(self) -> str:
        """Its numbers, which are those of the other files of the same step too."""
        return " ".join(re.findall(r"\d+", self._plain_name))

    @property
    def _plain_name(self) -> str:
        core = strip_unfinished_marks(self.base_name)
        stem = _SINGLE_FILE.fullmatch(core) if self.is_file else None
        return core if stem is None else stem["stem"]

    @property
    def sort_key(self) -> tuple[bool, list[tuple[int, str]]]:
        """Later ones are larger. Names without a number come before all others."""
        return self.is_numbered, natural_sort_key(
            "/".join(_LEADING_METRIC.sub("", strip_unfinished_marks(part)) for part in self.name.split("/"))
        )

    @property
    def step(self) -> int | None:
        """The step that its name says, or the one of the folders in it."""
        for name in (self.folder_name or self.name, *sorted({get_parent_folder(path) for path in self.files}, key=len)):
            step = parse_step(name)
            if step is not None:
                return step
        return None


def parse_step(folder: str) -> int | None:
    """The step that the last name with one says: 242 of ``epoch=1-step=242``, 1000 of Orbax' ``1000``."""
    name = strip_unfinished_marks(folder.rpartition("/")[2])
    if name.isdecimal() and name.isascii():
        return int(name[:18])
    steps = _STEP.findall(folder)
    return int(steps[-1][:18]) if steps else None


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint: it says a step, an iteration or an epoch."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None or (name.isdecimal() and name.isascii())


def is_deepspeed_tag(folder: str) -> bool:
    """Whether the folder has the name that DeepSpeed gives to a tag."""
    return _DEEPSPEED_TAG.fullmatch(folder.rpartition("/")[2]) is not None


def strip_unfinished_marks(name: str) -> str:
    """``checkpoint-14`` of ``tmp-checkpoint-14``."""
    match = _UNFINISHED_NAME.fullmatch(name)
    return name if match is None else match["core"]


def is_checkpoint_file(path: str) -> bool:
    """True if it is a file that every checkpoint has."""
    return _CHECKPOINT_FILE.fullmatch(path.rpartition("/")[2]) is not None


def find_members(files: Mapping[str, int]) -> list[RunMember]:
    """The checkpoints in a run whose files are ``files``, but for the run itself; the newest first."""
    # 1. Folders named by a step are checkpoints: the outermost, unless it holds several such folders, and is a run.
    # 2. Every other folder with a checkpoint's file in it is one too, except folders that hold those of 1 or 3, and
    #    folders inside another one.
    # 3. Single files are those called *.ckpt or by a step, and `last`, `best` and the like of the same suffix beside
    #    them.
    # A hidden or unfinished folder around a checkpoint hides it; an unfinished name of its own says that it is not
    # finished.
    checkpoint_folders = _find_checkpoint_folders(files)
    verl_folders = {get_parent_folder(path) for path in files if path.rpartition("/")[2] == CONTENTS_FILE}
    is_finished_by_folder: dict[str, bool] = {}
    unnumbered_folders: set[str] = set()
    for folder in {get_parent_folder(path) for path in files if is_checkpoint_file(path)} - {""}:
        owner = next((each for each in iter_folder_chain(folder) if each in checkpoint_folders), None)
        if owner is None:
            whole_folder = next((each for each in ("", *iter_folder_chain(folder)) if each in verl_folders), folder)
            unnumbered_folders |= {whole_folder} if _is_visible(whole_folder) else set()
        elif _is_visible(get_parent_folder(owner)):
            is_finished_by_folder[owner] = not is_unfinished_name(owner.rpartition("/")[2])
    single_files = _find_single_files(files, is_finished_by_folder)
    unnumbered_folders = _drop_containers(
        unnumbered_folders - {get_parent_folder(path) for path in single_files}, is_finished_by_folder
    )
    finished_flags = [
        *is_finished_by_folder.items(),
        *((folder, True) for folder in unnumbered_folders),
        *((path, True) for path in single_files),
    ]
    files_by_name = _group_files(files, [name for name, _ in finished_flags])
    all_members = [RunMember(name, files_by_name[name], is_finished) for name, is_finished in finished_flags]
    return sorted(all_members, key=lambda member: member.sort_key, reverse=True)


def list_finished_checkpoints(files: Iterable[str]) -> list[str]:
    """The folders and files of finished checkpoints in a run whose files are ``files``, the newest first by the numbers
    in their names.

    A folder with a number that holds one checkpoint stands for it: ``epoch_12`` for ``epoch_12/global_step264``.
    """
    return [member.name for member in find_members(dict.fromkeys(files, 0)) if member.is_finished]


def suggest_checkpoint(files: Iterable[str], url: str) -> str:
    """The end of a message that several checkpoints were found: how to name one; nothing if that does not help."""
    checkpoint_names = list_finished_checkpoints(files)
    return f", or write {url}@{LATEST} or {url}@{checkpoint_names[0]}" if len(checkpoint_names) > 1 else ""


def find_other_checkpoints(files: Mapping[str, int], used_files: Collection[str]) -> list[RunMember]:
    """The checkpoints beside the one that holds ``used_files``: folders whose names say another step, the newest first.

    A tag of DeepSpeed's is not taken for another checkpoint: a trainer keeps one in each of its own, beside the model.
    """
    candidates = (
        each
        for each in find_members(files)
        if each.is_numbered and not each.is_file and not is_deepspeed_tag(each.name)
    )
    return [each for each in candidates if each.files.keys().isdisjoint(used_files)]


def list_other_checkpoint_files(files: Mapping[str, int], used_files: Collection[str]) -> frozenset[str]:
    """The files of ``find_other_checkpoints``."""
    return frozenset(path for each in find_other_checkpoints(files, used_files) for path in each.files)


def _find_checkpoint_folders(files: Iterable[str]) -> frozenset[str]:
    """The outermost folders with names of checkpoints. One that holds several such folders is a run."""
    all_folders = {
        each for path in files if is_checkpoint_file(path) for each in iter_folder_chain(get_parent_folder(path))
    }
    orbax_folders = {
        each
        for path in files
        for each in iter_folder_chain(get_parent_folder(path))
        if _ORBAX_FILE.fullmatch(path[len(each) + 1 :])
    }
    # Of candidates, those that hold several others directly are runs, and so are all folders around these:
    #     epoch_1/global_step10             epoch_1 is the checkpoint
    #     epoch_1/step_1, epoch_1/step_2    both steps are checkpoints, and epoch_1 is a run
    candidates = {each for each in all_folders if _is_checkpoint_folder(each, orbax_folders)}
    inner_folders: dict[str, set[str]] = {}
    for each in candidates:
        holders = [outer for outer in iter_folder_chain(get_parent_folder(each)) if outer in candidates]
        if holders:
            inner_folders.setdefault(holders[-1], set()).add(each)
    folders_of_several = {outer for outer, inner in inner_folders.items() if len(inner) > 1}
    runs = folders_of_several | {outer for each in folders_of_several for outer in iter_folder_chain(each)}
    outermost_folders = candidates - runs
    outermost_folders -= {
        each
        for each in outermost_folders
        if any(outer in outermost_folders for outer in iter_folder_chain(get_parent_folder(each)))
    }
    return frozenset(_widen_to_parent(each, all_folders) for each in outermost_folders)


def _is_checkpoint_folder(folder: str, orbax_folders: set[str]) -> bool:
    name = folder.rpartition("/")[2]
    plain_name = strip_unfinished_marks(name)
    if plain_name.isdecimal():
        return folder in orbax_folders or ".orbax-checkpoint-tmp" in name
    return is_checkpoint_name(plain_name) and (not name.startswith(".") or name != f".{plain_name}")


def _widen_to_parent(folder: str, all_folders: Iterable[str]) -> str:
    """A folder with a number that holds one tag alone stands for it: ``e_12`` for ``e_12/global_step264``."""
    parent = get_parent_folder(folder)
    siblings = [each for each in all_folders if each.startswith(f"{parent}/") and get_parent_folder(each) == parent]
    return parent if is_deepspeed_tag(folder) and siblings == [folder] and _has_number(parent) else folder


def _find_single_files(files: Iterable[str], checkpoint_folders: Iterable[str]) -> set[str]:
    """Checkpoints that are one file each: Lightning's ``.ckpt``, and files whose names say a step or an epoch."""
    matches = {path: match for path in files if (match := _SINGLE_FILE.fullmatch(path.rpartition("/")[2])) is not None}
    matches_outside = {
        path: match
        for path, match in matches.items()
        if not any(each in checkpoint_folders for each in iter_folder_chain(path))
    }
    visible_matches = {path: match for path, match in matches_outside.items() if _is_visible(get_parent_folder(path))}
    numbered_files = {
        path
        for path, match in visible_matches.items()
        if match["suffix"] == "ckpt" or _CHECKPOINT_NAME.fullmatch(match["stem"])
    }
    folders_and_suffixes = {(get_parent_folder(path), visible_matches[path]["suffix"]) for path in numbered_files}
    plain_stem_files = (path for path, match in visible_matches.items() if match["stem"] in _PLAIN_STEMS)
    return numbered_files | {
        path
        for path in plain_stem_files
        if (get_parent_folder(path), visible_matches[path]["suffix"]) in folders_and_suffixes
    }


def _drop_containers(folders: set[str], checkpoint_folders: Iterable[str]) -> set[str]:
    """``folders`` without folders that hold numbered checkpoints, which are runs, and without folders in a
    checkpoint."""
    # Folders of accelerate for models and optimizers are one checkpoint together: their parent.
    folders = {
        get_parent_folder(folder) if _ACCELERATE_FOLDER.fullmatch(folder.rpartition("/")[2]) else folder
        for folder in folders
    } - {""}
    folders -= {outer for owner in checkpoint_folders for outer in iter_folder_chain(get_parent_folder(owner))}
    folders -= {
        get_parent_folder(each) for each in folders if _has_number(each) and not _has_number(get_parent_folder(each))
    }
    return {
        folder
        for folder in folders
        if not any(outer in folders for outer in iter_folder_chain(get_parent_folder(folder)))
    }


def _group_files(files: Mapping[str, int], names: Iterable[str]) -> dict[str, dict[str, int]]:
    files_by_name: dict[str, dict[str, int]] = {name: {} for name in names}
    for path, size in files.items():
        for each in iter_folder_chain(path):
            if each in files_by_name:
                files_by_name[each][path] = size
    return files_by_name


def _is_visible(folder: str) -> bool:
    """Whether no part of it is hidden or unfinished."""
    return not any(is_unfinished_name(name) for name in folder.split("/") if name)


def is_unfinished_name(name: str) -> bool:
    return name != strip_unfinished_marks(name)


def iter_folder_chain(folder: str) -> Iterator[str]:
    """``a``, ``a/b`` and ``a/b/c`` of the last."""
    return accumulate(folder.split("/"), "{}/{}".format) if folder else iter(())


def get_parent_folder(path: str) -> str:
    return path.rpartition("/")[0]


def _has_number(folder: str) -> bool:
    return re.search(r"\d", folder.rpartition("/")[2]) is not None
