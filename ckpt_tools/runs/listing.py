"""``ls``: the checkpoints in a run's folder, which of them are complete, and what their files say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import (
    UNREADABLE,
    IncompleteError,
    MalformedError,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.deepspeed.complete import needs_reader_check
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.messages.showing import DisplayableResult, dataclass_to_json
from ckpt_tools.messages.wording import join_names
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.runs.completeness import detect_format_name, find_file_problem, infer_world_size
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import find_members, is_checkpoint_file, is_deepspeed_tag
from ckpt_tools.trainers.saved import RUN_ITSELF, SavedCheckpoint, get_parent_folder, is_checkpoint_name
from ckpt_tools.trainers.transformers import read_trainer_state

THREADS = 16
"""Threads that read headers of several checkpoints: a request to a distant store takes 10 to 30 ms."""


@dataclass(frozen=True, slots=True, repr=False)
class RunCheckpoint(DisplayableResult):
    """One checkpoint of a run.

    ``name`` is its path in the run, ``.`` if the run is itself one checkpoint. ``time`` is when its newest file was
    written (UTC). ``problem`` says why it is not complete, by the marker of the trainer that wrote it; None if it is.
    """

    SHOWN: ClassVar[tuple[str, ...]] = (
        "name",
        "step",
        "time",
        "file_bytes",
        "format",
        "world_size",
        "is_complete",
        "problem",
    )
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("is_complete",)

    name: str
    url: str
    step: int | None
    time: str | None
    num_files: int
    file_bytes: int
    format: str
    world_size: int | None
    problem: str | None

    @property
    def is_complete(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True, repr=False)
class RunListing(DisplayableResult):
    """The checkpoints of the run at ``source``, the newest first."""

    SHOWN: ClassVar[tuple[str, ...]] = ("source", "checkpoints", "num_complete", "latest")

    source: str
    checkpoints: Sequence[RunCheckpoint]

    @property
    def num_complete(self) -> int:
        return sum(each.is_complete for each in self.checkpoints)

    @property
    def latest(self) -> RunCheckpoint | None:
        """The newest that is complete: the one that ``RUN@latest`` means."""
        return next((each for each in self.checkpoints if each.is_complete), None)

    def to_json(self) -> dict[str, Any]:
        json_object = dataclass_to_json(self)
        return {**json_object, "latest": None if self.latest is None else self.latest.name}


def list_members(run: Source, url: str) -> list[tuple[SavedCheckpoint, RunCheckpoint]]:
    """The checkpoints of the run, each with what ``ls`` shows of it, the newest first. If the run is itself a
    checkpoint, it is the only one, called ``.``.

    Raises:
        SourceNotFoundError: it holds none. StoreError: reading a header failed.
    """
    run_name = url.rstrip("/").rpartition("/")[2]
    members = find_members(run)
    has_inner_steps = any(member.is_numbered and not is_deepspeed_tag(member.name) for member in members)
    is_step = is_checkpoint_name(run_name.removesuffix(".ckpt")) and not has_inner_steps
    if (is_step or not members) and any(map(is_checkpoint_file, run.files)):
        name = next(iter(run.files)) if run.is_one_file else RUN_ITSELF
        members = [SavedCheckpoint(run, name, run.files, folder_name="" if run.is_one_file else run_name)]
    if not members:
        raise SourceNotFoundError(
            f"{url} holds no checkpoints: neither it nor a folder or file in it looks like one that a trainer writes"
        )
    with ThreadPoolExecutor(THREADS) as threads:
        return list(zip(members, threads.map(partial(describe_checkpoint, url), members), strict=True))


def list_checkpoints(run: Source, *, url: str) -> RunListing:
    """The checkpoints of the run, or the one checkpoint that it is itself. Raises as ``list_members``."""
    return RunListing(url, tuple(shown for _, shown in list_members(run, url)))


def check_is_one_run(url: str, names: Iterable[str]) -> None:
    """Raises UsageError if the checkpoints of these ``names`` are of several runs: they lie in several folders."""
    folders = sorted({get_parent_folder(name) or url for name in names})
    if len(folders) > 1:
        raise UsageError(f"{url} holds checkpoints of several runs ({join_names(folders)}); name one of them")


def find_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why it is not complete, by its files or, if they do not show it, by its reader. Raises StoreError."""
    file_problem = find_file_problem(checkpoint)
    if file_problem is not None or not needs_reader_check(checkpoint):
        return file_problem
    try:
        read_source(checkpoint.source, ReadOptions())
    except (IncompleteError, MalformedError) as error:
        return str(error)
    except UnsupportedError:
        pass
    return None


def read_step(checkpoint: SavedCheckpoint) -> int | None:
    """The step in the content of the checkpoint; None if there is none, or it cannot be read. Raises StoreError."""
    try:
        return read_source(checkpoint.source, ReadOptions())[1].step
    except UNREADABLE:
        return None


def read_plain_manifest(checkpoint: SavedCheckpoint) -> tuple[Format, Manifest]:
    """The format of the checkpoint and its manifest as the format's reader makes it. Raises CkptError."""
    reader = find_format(checkpoint.source)
    return reader, read_manifest(reader, checkpoint.source, ReadOptions())


def describe_checkpoint(url: str, checkpoint: SavedCheckpoint) -> RunCheckpoint:
    """Row of ``ls`` about the checkpoint, in the run at ``url``. Raises StoreError."""
    store = checkpoint.run.store
    problem = find_problem(checkpoint)
    stated_step = read_trainer_state(checkpoint).get("global_step")
    step = stated_step if type(stated_step) is int else checkpoint.step
    times = [when for path in checkpoint.run_files if (when := store.modified_time(path)) is not None]
    is_itself = checkpoint.is_run or (checkpoint.is_file and store.url.endswith(f"/{checkpoint.name}"))
    return RunCheckpoint(
        name=checkpoint.name,
        url=url if is_itself else f"{url.rstrip('/')}/{checkpoint.name}",
        step=read_step(checkpoint) if step is None and problem is None else step,
        time=datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if times else None,
        num_files=len(checkpoint.run_files),
        file_bytes=sum(checkpoint.run_files.values()),
        format=detect_format_name(checkpoint),
        world_size=infer_world_size(checkpoint) if problem is None else None,
        problem=problem,
    )
