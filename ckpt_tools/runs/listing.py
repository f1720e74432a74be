"""A run's folder: the checkpoints in it, and which of them ``RUN@latest``, ``RUN@step=N`` or ``RUN@NAME`` means.

``formats.run_folders`` finds them by their names, and ``formats.completeness`` says whether one is complete. ``ls``,
``prune`` and names behind ``@`` share both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ckpt_tools.core.announcements import tell
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.run_folders import (
    ITSELF,
    LATEST,
    Member,
    is_carrier,
    is_named,
    is_tag,
    members,
    parent_of,
    step_in,
)
from ckpt_tools.core.wording import newest
from ckpt_tools.errors import (
    CkptError,
    IncompleteError,
    MalformedError,
    SourceNotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.reading.trainer_files import with_trainer_files
from ckpt_tools.runs.completeness import (
    MAX_NAME_BYTES,
    Saved,
    format_of,
    is_shown_by_reading,
    problem_of,
    trainer_state,
    world_size_of,
)
from ckpt_tools.runs.report import RunCheckpoint, RunListing
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.within import part_of

Opened = Callable[[str | Path], Source]

_NAMING = frozenset({LATEST, "latest_universal"})

THREADS = 16
"""That read headers of several checkpoints at once: a request to a distant store takes 10 to 30 ms."""


def resolved(url: str | Path, opened: Opened) -> str | Path:
    """``url``; or the checkpoint that it means, if it is a run and a name behind ``@``, and nothing is called so.

    Raises:
        SourceNotFoundError: the run holds no such checkpoint. UsageError: the name is empty. CkptError: as ``opened``
        raises.
    """
    run, _, name = str(url).rpartition("@")
    if not _is_folder(run):
        return url
    run = run.rstrip("/") or run
    try:
        opened(url)
    except SourceNotFoundError as error:
        try:
            source = opened(run)
        except SourceNotFoundError:
            raise error from None
        if not name.strip("/"):
            raise UsageError(f"{url} names no checkpoint behind @; write {run}@{LATEST}, or {run} alone") from None
        return _chosen(run, name.strip("/"), source)
    return url


def _is_folder(url: str) -> bool:
    """Whether it can be one: the user of ``https://user@host`` is not."""
    _, is_url, path = url.partition("://")
    return "/" in path if is_url else bool(url)


def listing(source: Source, *, url: str, is_remote: bool) -> RunListing:
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
        shown = partial(_shown, source, url, is_remote)
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


def url_of(source: Source, url: str, member: Member) -> str:
    """Where the checkpoint is; a run that is one checkpoint is that place itself."""
    is_itself = member.name == ITSELF or (member.is_file and source.store.url.endswith(f"/{member.name}"))
    return url if is_itself else f"{url.rstrip('/')}/{member.name}"


def _shown(source: Source, url: str, is_remote: bool, member: Member) -> RunCheckpoint:
    saved = Saved.of(source, member, is_remote=is_remote)
    problem = _problem_of(saved)
    step = _known_step(saved, member)
    return RunCheckpoint(
        name=member.name,
        url=url_of(source, url, member),
        step=_step_of(saved) if step is None and problem is None else step,
        time=_time(source, member),
        num_files=len(member.files),
        file_bytes=sum(member.files.values()),
        format=format_of(saved),
        world_size=world_size_of(saved) if problem is None else None,
        problem=problem,
    )


def _problem_of(saved: Saved) -> str | None:
    """Why it is not complete, by its files or, if they do not show it, by its reader. Raises StoreError."""
    found = problem_of(saved)
    if found is not None or not is_shown_by_reading(saved):
        return found
    try:
        _read(saved)
    except (IncompleteError, MalformedError) as error:
        return str(error)
    except UnsupportedError:
        return None
    return None


def _read(saved: Saved) -> Manifest:
    source = part_of(saved.run, saved.root, saved.files)
    return with_trainer_files(read_manifest(find_format(source), source, ReadOptions()), source)


def _known_step(saved: Saved, member: Member) -> int | None:
    """As its name says, or the trainer's state."""
    stated = trainer_state(saved).get("global_step")
    return stated if type(stated) is int else member.step


def _time(source: Source, member: Member) -> str | None:
    times = [when for path in member.files if (when := source.store.modified(path)) is not None]
    return datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if times else None


def _chosen(run: str, name: str, source: Source) -> str:
    every = members(source.files)
    finished = {member.name: member for member in every if member.is_finished}
    found = list(finished)
    if not found:
        raise SourceNotFoundError(f"there is no file or folder {run}@{name}, and {run} holds no folders of checkpoints")
    if name == LATEST:
        return _latest(run, source, every)
    step = re.fullmatch(r"step=(\d{1,18})", name)
    if step is not None:
        chosen = list(_of_step(int(step[1]), source, every))
    else:
        chosen = _called(name, finished.values(), source.files)
    if len(chosen) == 1:
        _tell_if_incomplete(Saved.of(source, finished[chosen[0]], is_remote=_is_remote(run)))
        return f"{run}/{chosen[0]}"
    if chosen:
        raise SourceNotFoundError(
            f"{run} has several checkpoints {name!r} ({newest(chosen)}); name one of them, such as {run}@{chosen[0]}"
        )
    raise SourceNotFoundError(f"{run} has no checkpoint {name!r}; it has {newest(found)}")


def _called(name: str, found: Iterable[Member], files: Iterable[str]) -> list[str]:
    """Those of that name; of a file, the name without its ending will do."""
    named = {member.name: member for member in found}
    chosen = _holding(named, lambda folder: f"/{folder}".endswith(f"/{name}"), files)
    stems = (each.name for each in named.values() if each.is_file)
    return chosen or [each for each in stems if f"/{each.rpartition('.')[0]}".endswith(f"/{name}")]


def _tell_if_incomplete(saved: Saved) -> None:
    """On stderr; what it lacks may be refused later, or may not be needed."""
    problem = _problem_of(saved)
    if problem is not None:
        tell(f"{saved.name} is not complete: {problem}")


def _latest(run: str, source: Source, every: Sequence[Member]) -> str:
    """The newest complete one; a line says which newer ones are not. A file ``latest`` in the run decides if the
    checkpoint that it names is complete.

    Raises SourceNotFoundError.
    """
    named = named_by_file(source)
    problems = {}
    for member in sorted(every, key=lambda member: member.name == named, reverse=True):
        problems[member.name] = problem = _problem_of(Saved.of(source, member, is_remote=_is_remote(run)))
        if problem is None:
            _tell_of(problems, member)
            return run if member.name == named else f"{run}/{member.name}"
    name, problem = next(iter(problems.items()))
    raise SourceNotFoundError(f"{run} has no complete checkpoint; the newest is {name}: {problem}")


def _is_remote(url: str) -> bool:
    return "://" in url and not url.startswith("file://")


def named_by_file(source: Source) -> str | None:
    """What DeepSpeed's file ``latest`` in the run names."""
    path = next((name for name in sorted(_NAMING) if name in source.files), None)
    if path is None:
        return None
    return source.read_all(path, limit_bytes=MAX_NAME_BYTES).decode(errors="replace").strip().strip("/")


def _tell_of(problems: Mapping[str, str | None], taken: Member) -> None:
    """On stderr: which ones were passed over."""
    passed = [(name, problem) for name, problem in problems.items() if problem is not None]
    if passed:
        name, problem = passed[0]
        more = f" ({len(passed) - 1:,} more are not complete either)" if len(passed) > 1 else ""
        tell(f"latest is {taken.name}: the newer {name} is not complete: {problem}{more}")


def _of_step(step: int, source: Source, every: Iterable[Member]) -> Iterator[str]:
    """The checkpoints whose names say that step; if none does, those that say so themselves."""
    found = {member.name: member for member in every if member.is_finished}
    named = _holding(found, lambda folder: step_in(folder) == step, source.files)
    others = (each.name for each in found.values() if _step_of(Saved.of(source, each, is_remote=False)) == step)
    yield from named or others


def _holding(found: Iterable[str], is_meant: Callable[[str], bool], files: Iterable[str]) -> list[str]:
    """Those of ``found`` that are meant, by their own name or by that of the folder of their files."""
    inner = {parent_of(path) for path in files if is_carrier(path)}
    return [
        folder
        for folder in found
        if is_meant(folder) or any(is_meant(each) for each in inner if each.startswith(f"{folder}/"))
    ]


def _step_of(saved: Saved) -> int | None:
    """The step that a checkpoint says; None if it does not, or cannot be read. Raises StoreError."""
    try:
        return _read(saved).step
    except StoreError:
        raise
    except CkptError:
        return None
