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
from ckpt_tools.formats.deepspeed.complete import is_shown_by_reading
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.runs.completeness import format_of, problem_of, world_size_of
from ckpt_tools.runs.report import RunCheckpoint, RunListing
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import Member, is_carrier, is_named, is_tag, members
from ckpt_tools.trainers.saved import ITSELF, Saved
from ckpt_tools.trainers.transformers import trainer_state

THREADS = 16
"""Threads that read headers of several checkpoints: a request to a distant store takes 10 to 30 ms."""


def listing(source: Source, *, url: str) -> RunListing:
    """The checkpoints of the run that is ``source``, or the one checkpoint that it is itself.

    Raises:
        SourceNotFoundError: it holds none. StoreError: reading a header failed.
    """
    found = found_in(source, url)
    if not found:
        raise SourceNotFoundError(
            f"{url} holds no checkpoints: neither it nor a folder or file in it looks like one that a trainer writes"
        )
    with ThreadPoolExecutor(THREADS) as threads:
        shown = partial(_shown, source, url)
        return RunListing(url, tuple(threads.map(shown, found)))


def found_in(source: Source, url: str) -> list[Member]:
    """The checkpoints of a run, the newest first; or the one that it is itself, whose name is ``.``."""
    files = dict(source.files)
    name = url.rstrip("/").rpartition("/")[2]
    found = members(files)
    inner = [member for member in found if member.is_numbered and not is_tag(member.name)]
    is_one = is_named(name.removesuffix(".ckpt")) and not inner and any(map(is_carrier, files))
    if is_one or (not found and any(is_carrier(path) for path in files)):
        is_file = len(files) == 1 and source.store.url.endswith(f"/{next(iter(files))}")
        return [Member(next(iter(files)), files) if is_file else Member(ITSELF, files, known_as=name)]
    return found


def problem_in(saved: Saved) -> str | None:
    """Why it is not complete, by its files or, if they do not show it, by its reader. Raises StoreError."""
    found = problem_of(saved)
    if found is not None or not is_shown_by_reading(saved):
        return found
    try:
        _enriched(saved)
    except (IncompleteError, MalformedError) as error:
        return str(error)
    except UnsupportedError:
        return None
    return None


def step_of(saved: Saved) -> int | None:
    """The step that the checkpoint itself says; None if it does not, or cannot be read. Raises StoreError."""
    try:
        return _enriched(saved).step
    except StoreError:
        raise
    except CkptError:
        return None


def read(saved: Saved) -> tuple[Format, Manifest]:
    """The checkpoint by its reader. Raises CkptError."""
    found = find_format(saved.source)
    return found, read_manifest(found, saved.source, ReadOptions())


def _enriched(saved: Saved) -> Manifest:
    return read_source(saved.source, ReadOptions())[1]


def _shown(source: Source, url: str, member: Member) -> RunCheckpoint:
    saved = member.saved(source)
    problem = problem_in(saved)
    stated = trainer_state(saved).get("global_step")
    step = stated if type(stated) is int else member.step
    is_itself = member.is_run or (member.is_file and source.store.url.endswith(f"/{member.name}"))
    return RunCheckpoint(
        name=member.name,
        url=url if is_itself else f"{url.rstrip('/')}/{member.name}",
        step=step_of(saved) if step is None and problem is None else step,
        time=_time(source, member),
        num_files=len(member.files),
        file_bytes=sum(member.files.values()),
        format=format_of(saved),
        world_size=world_size_of(saved) if problem is None else None,
        problem=problem,
    )


def _time(source: Source, member: Member) -> str | None:
    times = [when for path in member.files if (when := source.store.modified_time(path)) is not None]
    return datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if times else None
