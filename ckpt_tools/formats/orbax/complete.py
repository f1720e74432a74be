"""Whether a save of Orbax has finished, by names."""

from __future__ import annotations

from ckpt_tools.formats.orbax.names import (
    CHECKPOINT_FILE,
    COMMIT_FILE,
    DELETION_MARKER,
    OCDBT_MANIFEST,
    TREE_FILE,
    VERSION_1_MARKER,
    find_unfinished,
)
from ckpt_tools.trainers.saved import SavedCheckpoint, get_parent_folder


def is_orbax(saved: SavedCheckpoint) -> bool:
    return any(name == OCDBT_MANIFEST or name.startswith(CHECKPOINT_FILE) for name in saved.file_names)


def problem(saved: SavedCheckpoint) -> str | None:
    """Reason why the checkpoint is not complete: a temporary folder, no metadata, or no mark of the commit. None if
    there is no sign of that."""
    unfinished_folder = find_unfinished(saved.files)
    if unfinished_folder is not None:
        path, mark = unfinished_folder
        return f"{path.partition(mark)[0]} is a temporary folder: the save did not finish"
    if DELETION_MARKER in saved.files:
        return f"{DELETION_MARKER}: the deletion of an item did not finish"
    if not is_orbax(saved):
        return None
    tree_folders, database_folders = (
        {get_parent_folder(path) for path in saved.files if f"/{path}".endswith(f"/{name}")}
        for name in (TREE_FILE, OCDBT_MANIFEST)
    )
    # Each process has a store below that of its item.
    undescribed_folders = [
        folder
        for folder in database_folders - tree_folders
        if not folder.rpartition("/")[2].startswith("ocdbt.process")
    ]
    if undescribed_folders:
        return f"no {TREE_FILE} in {min(undescribed_folders)}: the save did not finish"
    if CHECKPOINT_FILE in saved.files:
        times = saved.read_json_object(saved.path_in_run(CHECKPOINT_FILE))
        if times.get("init_timestamp_nsecs") is not None and times.get("commit_timestamp_nsecs") is None:
            return f"{CHECKPOINT_FILE} has no time of commit: the save did not finish"
    elif VERSION_1_MARKER in saved.files or TREE_FILE not in saved.file_names:
        return f"no {CHECKPOINT_FILE if VERSION_1_MARKER in saved.files else TREE_FILE}: the save did not finish"
    # A folder gets its name when it is whole; old versions write no file at the top. Object stores cannot rename: there
    # this file, which is written last, is in each checkpoint of the run.
    committed_parents = [
        get_parent_folder(get_parent_folder(path)) for path in saved.run.files if path.endswith(f"/{COMMIT_FILE}")
    ]
    if COMMIT_FILE in saved.files or not saved.root or get_parent_folder(saved.root) not in committed_parents:
        return None
    return f"no {COMMIT_FILE}, which other checkpoints of the run have: the save did not finish"
