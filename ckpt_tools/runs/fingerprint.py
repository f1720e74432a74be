"""The public ``fingerprint``: the state of a checkpoint's files, which differs once one of them has changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools.arguments import api_function
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import FormatError, IncompleteError, UnsafeError, UsageError
from ckpt_tools.reading.model_files import is_model_file
from ckpt_tools.runs.opening import open_checkpoint, resolve_checkpoint_url
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.output_names import DIGESTS_NAME, is_marker
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, open_source
from ckpt_tools.trainers.names import is_unfinished_marker
from ckpt_tools.trainers.run_folders import is_checkpoint_file, is_deepspeed_tag, list_other_checkpoint_files
from ckpt_tools.trainers.saved import get_parent_folder, iter_folder_chain

REMOVED_FILE_VERSION = "gone"
"""The state of a file that was removed after it was listed."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of the files of the checkpoint at ``url``. Two that are equal: none of the files was written, replaced,
    added or removed in between.

    ``files`` has a text for each file: size, times of writing and of the change, and inode; in a store, what it says of
    them, such as the ETag. ``changed`` is when the last of them changed, in seconds since 1970 by the clock of the file
    system; None for stores.
    """

    src: str | Path = field(compare=False)
    url: str
    files: Mapping[str, str] = field(repr=False)
    changed: float | None
    _tensor_files: frozenset[str] | None = field(repr=False, compare=False)
    """The files with tensors; None if they are not known."""

    def again(self, *, storage_options: Mapping[str, Any] | None = None) -> Fingerprint:
        """The state now, for which no file is read, unless ``RUN@latest`` means another checkpoint now.

        Raises:
            SourceNotFoundError, StoreError: as ``fingerprint``.
        """
        url = resolve_checkpoint_url(self.src, storage_options)
        if str(url) != self.url:
            return fingerprint(self.src, storage_options=storage_options)
        states = _read_file_states(open_source(url, storage_options))
        return _build_fingerprint(self.src, url, states, self._tensor_files)


@api_function
def fingerprint(src: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> Fingerprint:
    """The state of the files of the checkpoint at ``src``, also of one that cannot be read. Only headers are read.

    Look before and after reading a checkpoint that another program may replace: if the two differ, what was read may be
    of neither. Files of other checkpoints in the same folder and logs do not count; unfinished copies do.

    Args:
        src, storage_options: As for ``inspect``.

    Returns:
        A ``Fingerprint``, to be compared with that of ``again()``.

    Raises:
        SourceNotFoundError: nothing is at ``src``.
        StoreError: the disk or the network failed.

    Example:
        >>> import ckpt_tools
        >>> before = ckpt_tools.fingerprint("run")
        >>> before == before.again()
        True
    """
    url = resolve_checkpoint_url(src, storage_options)
    states = _read_file_states(open_source(url, storage_options))  # before anything is read
    tensor_files = _list_tensor_files(url, storage_options) if len(states) > 1 else frozenset(states)
    return _build_fingerprint(src, url, states, tensor_files)


def _list_tensor_files(url: str | Path, storage_options: StorageOptions) -> frozenset[str] | None:
    """The files with tensors; None for a checkpoint that is damaged, or needs the name of a tree or a tag."""
    try:
        return open_checkpoint(url, ReadOptions(), storage_options=storage_options).manifest.stored_files
    except (FormatError, UnsafeError, UsageError):
        return None


def _read_file_states(source: Source) -> dict[str, tuple[str, float | None]]:
    """The version of every file, and when it changed."""
    states: dict[str, tuple[str, float | None]] = {}
    for path in {**source.files, **source.store.list_hidden()}:
        try:
            states[path] = source.store.version(path), source.store.changed_time(path)
        except IncompleteError:
            states[path] = REMOVED_FILE_VERSION, None
    return states


def _build_fingerprint(
    src: str | Path,
    url: str | Path,
    states: Mapping[str, tuple[str, float | None]],
    tensor_files: frozenset[str] | None,
) -> Fingerprint:
    # Counted are files whose names are those of a checkpoint, and all files with tensors. Files of the run's other
    # checkpoints and of other tags are not, once it is known which files are read. If it is not known, all of them
    # count, so that no change is missed.
    counted = {path for path in states if _is_part_of_checkpoint(path) or path in (tensor_files or ())}
    if tensor_files is not None:
        counted -= list_other_checkpoint_files(Source(MemoryStore(), dict.fromkeys(states, 0)), tensor_files)
        counted.difference_update(_iter_other_tag_files(states, tensor_files))
    times = [when for path in counted if (when := states[path][1]) is not None]
    files = {path: states[path][0] for path in sorted(counted)}
    return Fingerprint(src, str(url), files, max(times, default=None), tensor_files)


def _is_part_of_checkpoint(path: str) -> bool:
    """Whether a file may belong to the checkpoint by its name, or is an unfinished copy, whose name is hidden."""
    name = path.rpartition("/")[2]
    is_unfinished = is_unfinished_marker(name) or any(part.startswith(".") for part in path.split("/"))
    return is_unfinished or is_checkpoint_file(path) or is_marker(path) or is_model_file(name) or name == DIGESTS_NAME


def _iter_other_tag_files(files: Collection[str], tensor_files: Collection[str]) -> Iterator[str]:
    """Files in folders of DeepSpeed's tags that hold none of ``tensor_files``."""
    parents = {get_parent_folder(path) for path in files}
    tags = {folder for parent in parents for folder in iter_folder_chain(parent) if is_deepspeed_tag(folder)}
    unread_prefixes = tuple(f"{tag}/" for tag in tags if not any(path.startswith(f"{tag}/") for path in tensor_files))
    return (path for path in files if path.startswith(unread_prefixes))
