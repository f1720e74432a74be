"""``ls``: the checkpoints in a run's folder, which of them are complete, and what their files say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import (
    CkptError,
    IncompleteError,
    MalformedError,
    SourceNotFoundError,
    StoreError,
    UnsupportedError,
)
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.deepspeed.complete import needs_reader_check
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.runs.completeness import detect_format_name, find_file_problem, infer_world_size
from ckpt_tools.runs.report import RunCheckpoint, RunListing
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import (
    RunMember,
    find_members,
    is_checkpoint_file,
    is_checkpoint_name,
    is_deepspeed_tag,
)
from ckpt_tools.trainers.saved import RUN_ITSELF, SavedCheckpoint
from ckpt_tools.trainers.transformers import read_trainer_state

THREADS = 16
"""Threads that read headers of several checkpoints: a request to a distant store takes 10 to 30 ms."""


def list_checkpoints(source: Source, *, url: str) -> RunListing:
    """The checkpoints of the run that is ``source``, or the one checkpoint that it is itself.

    Raises:
        SourceNotFoundError: it holds none. StoreError: reading a header failed.
    """
    run_members = find_run_members(source, url)
    if not run_members:
        raise SourceNotFoundError(
            f"{url} holds no checkpoints: neither it nor a folder or file in it looks like one that a trainer writes"
        )
    with ThreadPoolExecutor(THREADS) as threads:
        describe = partial(_describe_member, source, url)
        return RunListing(url, tuple(threads.map(describe, run_members)))


def find_run_members(source: Source, url: str) -> list[RunMember]:
    """The checkpoints of a run, the newest first. If the run is itself a checkpoint, it is the only one, called
    ``.``."""
    files = dict(source.files)
    run_name = url.rstrip("/").rpartition("/")[2]
    run_members = find_members(files)
    inner_checkpoints = [member for member in run_members if member.is_numbered and not is_deepspeed_tag(member.name)]
    is_named_checkpoint = (
        is_checkpoint_name(run_name.removesuffix(".ckpt"))
        and not inner_checkpoints
        and any(map(is_checkpoint_file, files))
    )
    if is_named_checkpoint or (not run_members and any(is_checkpoint_file(path) for path in files)):
        is_file = len(files) == 1 and source.store.url.endswith(f"/{next(iter(files))}")
        return [RunMember(next(iter(files)), files) if is_file else RunMember(RUN_ITSELF, files, folder_name=run_name)]
    return run_members


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
        return None
    return None


def read_step(checkpoint: SavedCheckpoint) -> int | None:
    """The step in the content of the checkpoint; None if there is none, or it cannot be read. Raises StoreError."""
    try:
        return read_source(checkpoint.source, ReadOptions())[1].step
    except StoreError:
        raise
    except CkptError:
        return None


def read_plain_manifest(checkpoint: SavedCheckpoint) -> tuple[Format, Manifest]:
    """The format of the checkpoint and its manifest as the format's reader makes it. Raises CkptError."""
    reader = find_format(checkpoint.source)
    return reader, read_manifest(reader, checkpoint.source, ReadOptions())


def _describe_member(source: Source, url: str, member: RunMember) -> RunCheckpoint:
    checkpoint = member.to_saved_checkpoint(source)
    problem = find_problem(checkpoint)
    stated_step = read_trainer_state(checkpoint).get("global_step")
    step = stated_step if type(stated_step) is int else member.step
    times = [when for path in member.files if (when := source.store.modified_time(path)) is not None]
    is_itself = member.is_run or (member.is_file and source.store.url.endswith(f"/{member.name}"))
    return RunCheckpoint(
        name=member.name,
        url=url if is_itself else f"{url.rstrip('/')}/{member.name}",
        step=read_step(checkpoint) if step is None and problem is None else step,
        time=datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if times else None,
        num_files=len(member.files),
        file_bytes=sum(member.files.values()),
        format=detect_format_name(checkpoint),
        world_size=infer_world_size(checkpoint) if problem is None else None,
        problem=problem,
    )
