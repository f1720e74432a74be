"""The checkpoints of a run, found by names of folders and files alone.

1. Folders named by a step are checkpoints: the outermost, unless it holds several such folders, and is a run.
2. Every other folder with a checkpoint's file in it is one too, except folders that hold those of 1 or 3, and folders
   inside another one, and ``optimizer`` beside a model.
3. Single files are those called ``*.ckpt`` or by a step, and ``last``, ``best`` and the like of the same suffix beside
   them.

A hidden or unfinished folder around a checkpoint hides it; an unfinished name of its own says that it is not finished.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import DCP_FOLDERS, DEEPSPEED_TAGS, LEROBOT_FOLDERS
from ckpt_tools.trainers.saved import (
    SINGLE_FILE,
    SavedCheckpoint,
    get_parent_folder,
    is_checkpoint_name,
    is_unfinished_name,
    iter_folder_chain,
    strip_unfinished_marks,
)
from ckpt_tools.trainers.transformers import OPTIMIZER_FOLDER
from ckpt_tools.trainers.verl import CONTENTS_FILE

LATEST = "latest"
"""The name of the newest checkpoint behind ``@``."""

_DEEPSPEED_TAG = re.compile(r"global_step\d+")

_CHECKPOINT_FILE = re.compile(
    r"\.metadata|__\d+\.metadata|__\d+_\d+\.distcp|.*_states\.pt|.*\.(?:safetensors|pt|pth|bin|ckpt|gguf|npz)"
    r"|.*\.(?:safetensors|bin)\.index\.json|_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|metadata\.pkl"
)
"""Files that every checkpoint has."""

_STEP_FILE = re.compile(
    r"(?:_CHECKPOINT_METADATA|[^/]+/(?:_METADATA|manifest\.ocdbt)|commit_success\.txt|pretrained_model/config\.json)"
)
"""Files in a folder of Orbax or of lerobot, whose name is the step alone."""

_PLAIN_STEMS = frozenset(("last", "best", "final", "latest"))

_ACCELERATE_FOLDER = re.compile(rf"(?:.*/)?(?:{DCP_FOLDERS}|{DEEPSPEED_TAGS})")


def is_deepspeed_tag(folder: str) -> bool:
    """Whether the folder has the name that DeepSpeed gives to a tag."""
    return _DEEPSPEED_TAG.fullmatch(folder.rpartition("/")[2]) is not None


def is_checkpoint_file(path: str) -> bool:
    """True if it is a file that every checkpoint has."""
    return _CHECKPOINT_FILE.fullmatch(path.rpartition("/")[2]) is not None


def find_members(run: Source) -> list[SavedCheckpoint]:
    """The checkpoints in a run, but for the run itself; the newest first by the numbers in their names."""
    folders = {get_parent_folder(path) for path in run.files if is_checkpoint_file(path)}
    folders -= {"", OPTIMIZER_FOLDER} if "" in folders else {""}
    numbered_folders = _find_numbered_folders(run.files)
    verl_folders = {get_parent_folder(path) for path in run.files if path.rpartition("/")[2] == CONTENTS_FILE}
    is_finished_by_name: dict[str, bool] = {}
    other_folders: set[str] = set()
    for folder in folders:
        owner = next((each for each in iter_folder_chain(folder) if each in numbered_folders), None)
        if owner is None:
            other_folders.add(next((each for each in ("", *iter_folder_chain(folder)) if each in verl_folders), folder))
        elif _is_visible(get_parent_folder(owner)):
            is_finished_by_name[owner] = not is_unfinished_name(owner.rpartition("/")[2])
    single_files = _find_single_files(run.files, is_finished_by_name)
    other_folders = set(filter(_is_visible, other_folders)) - {get_parent_folder(path) for path in single_files}
    other_folders = _drop_containers(other_folders, is_finished_by_name)
    is_finished_by_name |= dict.fromkeys((*other_folders, *single_files), True)
    files_by_name: dict[str, dict[str, int]] = {name: {} for name in is_finished_by_name}
    for path, size in run.files.items():
        for each in iter_folder_chain(path):
            if each in files_by_name:
                files_by_name[each][path] = size
    members = (SavedCheckpoint(run, name, files_by_name[name], done) for name, done in is_finished_by_name.items())
    return sorted(members, key=lambda member: member.sort_key, reverse=True)


def suggest_checkpoint(run: Source) -> str:
    """The end of a message that several checkpoints were found: how to name one; nothing if that does not help."""
    finished_names, url = [each.name for each in find_members(run) if each.is_finished], run.store.url
    return f", or write {url}@{LATEST} or {url}@{finished_names[0]}" if len(finished_names) > 1 else ""


def find_other_checkpoints(run: Source, used_files: Collection[str]) -> list[SavedCheckpoint]:
    """The checkpoints beside the one that holds ``used_files``: folders whose names say another step, the newest first.

    A tag of DeepSpeed's is not taken for another checkpoint: a trainer keeps one in each of its own, beside the model.
    """
    return [
        each
        for each in find_members(run)
        if each.is_numbered and not each.is_file and not is_deepspeed_tag(each.name)
        if each.run_files.keys().isdisjoint(used_files)
    ]


def list_other_checkpoint_files(run: Source, used_files: Collection[str]) -> frozenset[str]:
    """The files of ``find_other_checkpoints``."""
    return frozenset(path for each in find_other_checkpoints(run, used_files) for path in each.run_files)


def _find_numbered_folders(files: Iterable[str]) -> frozenset[str]:
    """The outermost folders with names of checkpoints. One that holds several such folders is a run."""
    all_folders = {
        each for path in files if is_checkpoint_file(path) for each in iter_folder_chain(get_parent_folder(path))
    }
    step_folders = {
        each for path in files for each in _iter_holders(path) if _STEP_FILE.fullmatch(path[len(each) + 1 :])
    }
    # Of candidates, those that hold several others directly are runs, and so are all folders around these:
    #     epoch_1/global_step10             epoch_1 is the checkpoint
    #     epoch_1/step_1, epoch_1/step_2    both steps are checkpoints, and epoch_1 is a run
    candidates = {each for each in all_folders if _is_numbered_folder(each, step_folders)}
    inner_folders: dict[str, set[str]] = {}
    for each in candidates:
        holders = [outer for outer in _iter_holders(each) if outer in candidates]
        if holders:
            inner_folders.setdefault(holders[-1], set()).add(each)
    for outer, inner in inner_folders.items():
        if len(inner) > 1:
            candidates -= {outer, *_iter_holders(outer)}
    outermost_folders = _keep_outermost(candidates)
    return frozenset(_widen_to_parent(each, all_folders) for each in outermost_folders)


def _is_numbered_folder(folder: str, step_folders: Collection[str]) -> bool:
    name = folder.rpartition("/")[2]
    plain_name = strip_unfinished_marks(name)
    if plain_name.isdecimal():
        return folder in step_folders or ".orbax-checkpoint-tmp" in name
    return is_checkpoint_name(plain_name) and name != f".{plain_name}"


def _widen_to_parent(folder: str, all_folders: Iterable[str]) -> str:
    """A folder with a number that holds one tag alone stands for it: ``e_12`` for ``e_12/global_step264``."""
    parent = get_parent_folder(folder)
    siblings = [each for each in all_folders if each.startswith(f"{parent}/") and get_parent_folder(each) == parent]
    return parent if is_deepspeed_tag(folder) and siblings == [folder] and _has_number(parent) else folder


def _find_single_files(files: Iterable[str], checkpoint_folders: Collection[str]) -> set[str]:
    """Checkpoints that are one file each: Lightning's ``.ckpt``, and files whose names say a step or an epoch."""
    matches = {
        path: match
        for path in files
        if (match := SINGLE_FILE.fullmatch(path.rpartition("/")[2])) is not None
        and not any(each in checkpoint_folders for each in iter_folder_chain(path))
        and _is_visible(get_parent_folder(path))
    }
    numbered_files = {
        path
        for path, match in matches.items()
        if match["suffix"] == "ckpt" or (is_checkpoint_name(match["stem"]) and not match["stem"].isdecimal())
    }
    folders_and_suffixes = {(get_parent_folder(path), matches[path]["suffix"]) for path in numbered_files}
    return numbered_files | {
        path
        for path, match in matches.items()
        if match["stem"] in _PLAIN_STEMS and (get_parent_folder(path), match["suffix"]) in folders_and_suffixes
    }


def _drop_containers(folders: Collection[str], checkpoint_folders: Iterable[str]) -> set[str]:
    """``folders`` without folders that hold numbered checkpoints, which are runs, and without folders in a
    checkpoint."""
    whole_folders = {_find_whole_folder(each, folders) for each in folders} - {""}
    whole_folders -= {outer for owner in checkpoint_folders for outer in _iter_holders(owner)}
    whole_folders -= {
        parent for each in whole_folders if _has_number(each) and not _has_number(parent := get_parent_folder(each))
    }
    return _keep_outermost(whole_folders)


def _find_whole_folder(folder: str, folders: Collection[str]) -> str:
    """The folder of the checkpoint: accelerate's for models and optimizers are one together, and so are lerobot's."""
    if _ACCELERATE_FOLDER.fullmatch(folder):
        folder = get_parent_folder(folder)
    parent, _, name = folder.rpartition("/")
    is_of_lerobot = name in LEROBOT_FOLDERS and f"{parent}/{LEROBOT_FOLDERS[1]}".lstrip("/") in folders
    return parent if is_of_lerobot else folder


def _keep_outermost(folders: Collection[str]) -> set[str]:
    return {each for each in folders if not any(outer in folders for outer in _iter_holders(each))}


def _iter_holders(path: str) -> Iterator[str]:
    """The folders around ``path``, the outermost first."""
    return iter_folder_chain(get_parent_folder(path))


def _is_visible(folder: str) -> bool:
    """Whether no part of it is hidden or unfinished."""
    return not any(is_unfinished_name(name) for name in folder.split("/") if name)


def _has_number(folder: str) -> bool:
    return re.search(r"\d", folder.rpartition("/")[2]) is not None
