"""``RUN@latest``, ``RUN@step=N`` and ``RUN@NAME``: the checkpoint of a run that a name means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_tools.core.progress import log_warning
from ckpt_tools.core.wording import join_newest
from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.formats.deepspeed import names as deepspeed
from ckpt_tools.runs.listing import problem_in, step_of
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import LATEST, Member, is_carrier, members, parent_of, step_in
from ckpt_tools.trainers.saved import line_of

Opened = Callable[[str | Path], Source]


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


def named_by_file(source: Source) -> str | None:
    """The checkpoint that DeepSpeed's file ``latest`` in the run names."""
    path = next((name for name in (deepspeed.LATEST, deepspeed.LATEST_UNIVERSAL) if name in source.files), None)
    return None if path is None else line_of(source, path)


def _is_folder(url: str) -> bool:
    """Whether it can be a folder: the user of ``https://user@host`` is not."""
    _, is_url, path = url.partition("://")
    return "/" in path if is_url else bool(url)


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
        chosen = list(_of_step(int(step[1]), source, finished))
    else:
        chosen = _called(name, finished, source.files)
    if len(chosen) == 1:
        problem = problem_in(finished[chosen[0]].saved(source))
        if problem is not None:  # what it lacks may be refused later, or may not be needed
            log_warning("runs", f"{chosen[0]} is not complete: {problem}")
        return f"{run}/{chosen[0]}"
    if chosen:
        raise SourceNotFoundError(
            f"{run} has several checkpoints {name!r} ({join_newest(chosen)}); name one of them, such as "
            f"{run}@{chosen[0]}"
        )
    raise SourceNotFoundError(f"{run} has no checkpoint {name!r}; it has {join_newest(found)}")


def _latest(run: str, source: Source, every: Sequence[Member]) -> str:
    """The newest complete one; a line says which newer ones are not. A file ``latest`` in the run decides if the
    checkpoint that it names is complete.

    Raises SourceNotFoundError.
    """
    named = named_by_file(source)
    passed: dict[str, str] = {}
    for member in sorted(every, key=lambda member: member.name == named, reverse=True):
        problem = problem_in(member.saved(source))
        if problem is None:
            _tell_of(passed, member)
            return run if member.name == named else f"{run}/{member.name}"
        passed[member.name] = problem
    name, problem = next(iter(passed.items()))
    raise SourceNotFoundError(f"{run} has no complete checkpoint; the newest is {name}: {problem}")


def _tell_of(passed: Mapping[str, str], taken: Member) -> None:
    if passed:
        name, problem = next(iter(passed.items()))
        more = f" ({len(passed) - 1:,} more are not complete either)" if len(passed) > 1 else ""
        log_warning("runs", f"latest is {taken.name}: the newer {name} is not complete: {problem}{more}")


def _called(name: str, found: Mapping[str, Member], files: Iterable[str]) -> list[str]:
    """Checkpoints of that name; of a file, the name without its ending is enough."""
    chosen = _holding(found, lambda folder: f"/{folder}".endswith(f"/{name}"), files)
    stems = (each.name for each in found.values() if each.is_file)
    return chosen or [each for each in stems if f"/{each.rpartition('.')[0]}".endswith(f"/{name}")]


def _of_step(step: int, source: Source, found: Mapping[str, Member]) -> Iterator[str]:
    """Checkpoints whose names say that step; if none does, those whose content says it."""
    named = _holding(found, lambda folder: step_in(folder) == step, source.files)
    others = (each.name for each in found.values() if step_of(each.saved(source)) == step)
    yield from named or others


def _holding(found: Iterable[str], is_meant: Callable[[str], bool], files: Iterable[str]) -> list[str]:
    """Those of ``found`` that are meant, by their own name or by that of a folder of their files."""
    inner = {parent_of(path) for path in files if is_carrier(path)}
    return [
        folder
        for folder in found
        if is_meant(folder) or any(is_meant(each) for each in inner if each.startswith(f"{folder}/"))
    ]
