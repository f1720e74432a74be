"""The record of one trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_tools.trainers.saved import SavedCheckpoint

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source

EntryParser = Callable[[Any], Mapping[str, Any]]
"""From the content of a file to the entries of ``Manifest.extra`` that it adds."""

MetricItems = Iterable[tuple[str, Any]]
"""Metrics by name, with values that are not numbers too."""


@dataclass(frozen=True, slots=True)
class BestCheckpoints:
    """Checkpoints that a trainer's record calls the best, by their paths on the machine that wrote it."""

    record_name: str
    """The record in words: ``trainer_state.json of checkpoint-500``."""
    paths: Collection[str]

    @property
    def folder_names(self) -> frozenset[str]:
        """The last part of each path, also of one that ends in a slash or was written on Windows."""
        return frozenset(re.split(r"[/\\]", path.rstrip("/\\"))[-1] for path in self.paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRules:
    """Rules for writing a folder of the trainer again, so that the trainer resumes from it.

    ``dcp_folders`` matches the folders of its DCPs, and is empty if the folder is itself the one DCP. ``marker_file``
    is a file that tells the trainer from others. ``copied_files`` match paths in the folder that are copied as they
    are; a group is the rank, 0 if it matches nothing. ``resume_code`` is Python code that resumes from the folder
    ``{path}``. ``note_without_rank_files`` says how the trainer resumes without the files of ranks; if
    ``is_rank0_enough``, it takes those of rank 0.
    """

    dcp_folders: str
    copied_files: tuple[str, ...]
    resume_code: str = "# resume from {path} with the trainer"
    marker_file: str | None = None
    note_without_rank_files: str = ""
    is_rank0_enough: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHalves:
    """A checkpoint whose model and optimizer are checkpoints in folders of their own. Folders are prefixes of paths,
    which end in a slash unless they are empty; ``base_folder`` holds all of them.

    ``format`` is that of the optimizer and of the whole; safetensors if the optimizer is the file ``index_path``, which
    is the one that tells the halves. ``optimizer_folder`` is None then, and if there is no optimizer.
    """

    format: str
    index_path: str
    base_folder: str
    weights_folder: str
    weights_format: str
    optimizer_folder: str | None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer: its files by name, and what they say. Names are regular expressions, but for keys of
    ``entry_parsers``."""

    name: str
    entry_parsers: Mapping[str, EntryParser] = field(default_factory=dict)
    """Files beside the model whose content is read into the manifest."""
    own: str = ""
    """Files beside the model that only the trainer reads; the group, if any, is a rank."""
    optimizer: str = ""
    """Files with the optimizer of a model in a file beside them."""
    rank_file: str = ""
    """Files with one rank's part of a state: groups ``item``, ``rank``, and ``world`` or ``index``."""
    others: str = ""
    """Further names of files in its checkpoints, for ``prune``."""
    folders: str = ""
    """Names of folders in its checkpoints, for ``prune``."""
    last: str = ""
    """Files that it writes last; ``prune`` removes them first."""
    unfinished_marker: str | None = None
    """Format of the name of a file beside the checkpoint ``{title}`` that exists while it is written."""
    resume_rules: ResumeRules | None = None
    find_halves: Callable[[Source, str | None], CheckpointHalves | None] | None = None
    """The halves of a checkpoint that is to be read as the format of that name, None if the user named none. Raises
    CkptError."""
    find_problem: Callable[[SavedCheckpoint], str | None] | None = None
    """Why the checkpoint is not complete by the trainer's own marker; None if it is, or is another trainer's."""
    read_metrics: Callable[[SavedCheckpoint], MetricItems] | None = None
    """Metrics of the checkpoint by name; of the same name the last one counts."""
    read_best: Callable[[SavedCheckpoint], BestCheckpoints | None] | None = None
    """The checkpoints that the record in this one calls the best; None if it has no such record."""
