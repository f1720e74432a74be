"""``RUN@latest``, ``RUN@step=N`` and ``RUN@NAME``: the checkpoint of a run that a name means."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.formats.deepspeed import names as deepspeed
from ckpt_tools.messages.progress import log_warning
from ckpt_tools.messages.wording import join_newest
from ckpt_tools.runs.listing import find_problem, read_step
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import LATEST, find_members, is_checkpoint_file
from ckpt_tools.trainers.saved import SavedCheckpoint, get_parent_folder, parse_step, read_name_line

OpenSource = Callable[[str | Path], Source]


def resolve_in_run(url: str | Path, open_source: OpenSource) -> str | Path:
    """The checkpoint that ``url`` means: the one of a run that the name behind ``@`` chooses, or ``url`` itself if
    something is there or it has no such name.

    Raises:
        SourceNotFoundError: the run holds no such checkpoint. UsageError: the name is empty. CkptError: as
        ``open_source`` raises.
    """
    run, _, name = str(url).rpartition("@")
    _, is_url, path = run.partition("://")
    if not ("/" in path if is_url else run):  # what stands before @ is the user of https://user@host, or nothing
        return url
    run = run.rstrip("/") or run
    try:
        open_source(url)
    except SourceNotFoundError as error:
        try:
            source = open_source(run)
        except SourceNotFoundError:
            raise error from None
        if not name.strip("/"):
            raise UsageError(f"{url} names no checkpoint behind @; write {run}@{LATEST}, or {run} alone") from None
        return _choose_checkpoint(run, name.strip("/"), source)
    return url


def read_latest_name(source: Source) -> str | None:
    """The checkpoint that DeepSpeed's file ``latest`` in the run names."""
    path = next((name for name in (deepspeed.LATEST, deepspeed.LATEST_UNIVERSAL) if name in source.files), None)
    return None if path is None else read_name_line(source, path)


def _choose_checkpoint(url: str, name: str, run: Source) -> str:
    members = find_members(run)
    finished = [member for member in members if member.is_finished]
    if not finished:
        raise SourceNotFoundError(f"there is no file or folder {url}@{name}, and {url} holds no folders of checkpoints")
    if name == LATEST:
        return _find_latest(url, run, members)
    step_match = re.fullmatch(r"step=(\d{1,18})", name)
    matching = _find_by_name(name, finished) if step_match is None else _find_by_step(int(step_match[1]), finished)
    if len(matching) == 1:
        problem = find_problem(matching[0])
        if problem is not None:  # what it lacks may be refused later, or may not be needed
            log_warning("runs", f"{matching[0].name} is not complete: {problem}")
        return f"{url}/{matching[0].name}"
    if matching:
        raise SourceNotFoundError(
            f"{url} has several checkpoints {name!r} ({join_newest([each.name for each in matching])}); name one of "
            f"them, such as {url}@{matching[0].name}"
        )
    if name == "all":
        raise UsageError(f"{url}@{name} is not one checkpoint; convert-run converts every checkpoint of {url}")
    has = join_newest([each.name for each in finished])
    raise SourceNotFoundError(f"{url} has no checkpoint {name!r}; it has {has}")


def _find_latest(url: str, run: Source, members: Sequence[SavedCheckpoint]) -> str:
    """The newest complete checkpoint; a warning says which newer ones are not complete. The checkpoint that the run's
    file ``latest`` names comes first.

    Raises SourceNotFoundError.
    """
    latest_name = read_latest_name(run)
    skipped_problems: dict[str, str] = {}
    for member in sorted(members, key=lambda member: member.name == latest_name, reverse=True):
        problem = find_problem(member)
        if problem is None:
            if skipped_problems:
                newer, why = next(iter(skipped_problems.items()))
                num_more = len(skipped_problems) - 1
                more = f" ({num_more:,} more are not complete either)" if num_more else ""
                log_warning("runs", f"latest is {member.name}: the newer {newer} is not complete: {why}{more}")
            return url if member.name == latest_name else f"{url}/{member.name}"
        skipped_problems[member.name] = problem
    name, problem = next(iter(skipped_problems.items()))
    raise SourceNotFoundError(f"{url} has no complete checkpoint; the newest is {name}: {problem}")


def _find_by_name(name: str, members: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Checkpoints of that name; of a file, the name without its ending is enough."""
    stems = ((each, each.name.rpartition(".")[0]) for each in members if each.is_file)
    return _filter_by_folder(members, lambda folder: f"/{folder}".endswith(f"/{name}")) or [
        each for each, stem in stems if f"/{stem}".endswith(f"/{name}")
    ]


def _find_by_step(step: int, members: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Checkpoints whose names say that step; if none does, those whose content says it."""
    return _filter_by_folder(members, lambda folder: parse_step(folder) == step) or [
        each for each in members if read_step(each) == step
    ]


def _filter_by_folder(members: Sequence[SavedCheckpoint], is_wanted: Callable[[str], bool]) -> list[SavedCheckpoint]:
    """The ``members`` whose name, or that of an inner folder with their files, is wanted."""

    def inner_folders(member: SavedCheckpoint) -> set[str]:
        return {get_parent_folder(path) for path in member.run_files if is_checkpoint_file(path)}

    return [
        member
        for member in members
        if is_wanted(member.name) or (not member.is_file and any(map(is_wanted, inner_folders(member))))
    ]
