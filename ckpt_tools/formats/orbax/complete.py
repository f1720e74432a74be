"""Whether a save of Orbax has finished, by names."""

from __future__ import annotations

from ckpt_tools.formats.orbax.names import CHECKPOINT, COMMITTED, DELETION, MANIFEST, MARKER, TREE, unfinished
from ckpt_tools.trainers.run_folders import get_parent_folder
from ckpt_tools.trainers.saved import SavedCheckpoint


def is_orbax(saved: SavedCheckpoint) -> bool:
    return any(name == MANIFEST or name.startswith(CHECKPOINT) for name in saved.file_names)


def problem(saved: SavedCheckpoint) -> str | None:
    """Why it is not complete: a temporary folder, no metadata, or no mark of the commit."""
    pending = unfinished(saved.files)
    if pending is not None:
        path, mark = pending
        return f"{path.partition(mark)[0]} is a temporary folder: the save did not finish"
    if DELETION in saved.files:
        return f"{DELETION}: the deletion of an item did not finish"
    if not is_orbax(saved):
        return None
    trees, stores = (
        {get_parent_folder(path) for path in saved.files if f"/{path}".endswith(f"/{name}")}
        for name in (TREE, MANIFEST)
    )
    # Each process has a store below that of its item.
    bare = sorted(folder for folder in stores - trees if not folder.rpartition("/")[2].startswith("ocdbt.process"))
    if bare:
        return f"no {TREE} in {bare[0]}: the save did not finish"
    if CHECKPOINT in saved.files:
        times = saved.read_json_object(saved.path_in_run(CHECKPOINT))
        if times.get("init_timestamp_nsecs") is not None and times.get("commit_timestamp_nsecs") is None:
            return f"{CHECKPOINT} has no time of commit: the save did not finish"
    elif MARKER in saved.files or TREE not in saved.file_names:
        return f"no {CHECKPOINT if MARKER in saved.files else TREE}: the save did not finish"
    # A folder gets its name when it is whole; old versions write no file at the top. Object stores cannot rename: there
    # this file, which is written last, is in each checkpoint of the run.
    marked = [get_parent_folder(get_parent_folder(path)) for path in saved.run.files if path.endswith(f"/{COMMITTED}")]
    if COMMITTED in saved.files or not saved.root or get_parent_folder(saved.root) not in marked:
        return None
    return f"no {COMMITTED}, which other checkpoints of the run have: the save did not finish"
