"""``RUN@latest``, ``RUN@step=N`` and ``RUN@NAME``: the checkpoint of a run that a name means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.formats.deepspeed import names as deepspeed
from ckpt_tools.messages.progress import log_warning
from ckpt_tools.messages.wording import join_newest
from ckpt_tools.runs.listing import find_problem, read_step
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import (
    LATEST,
    RunMember,
    find_members,
    get_parent_folder,
    is_checkpoint_file,
    parse_step,
)
from ckpt_tools.trainers.saved import read_name_line

OpenSource = Callable[[str | Path], Source]


def resolve_in_run(url: str | Path, open_source: OpenSource) -> str | Path:
    """The checkpoint that ``url`` means: the one of a run that the name behind ``@`` chooses, or ``url`` itself if
    something is there or it has no such name.

    Raises:
        SourceNotFoundError: the run holds no such checkpoint. UsageError: the name is empty. CkptError: as
        ``open_source`` raises.
    """
    run, _, name = str(url).rpartition("@")
    if not _may_be_folder(run):
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


def _may_be_folder(url: str) -> bool:
    """Whether it can be a folder: the user of ``https://user@host`` is not."""
    _, is_url, path = url.partition("://")
    return "/" in path if is_url else bool(url)


def _choose_checkpoint(run: str, name: str, source: Source) -> str:
    all_members = find_members(source.files)
    finished_members = {member.name: member for member in all_members if member.is_finished}
    finished_names = list(finished_members)
    if not finished_names:
        raise SourceNotFoundError(f"there is no file or folder {run}@{name}, and {run} holds no folders of checkpoints")
    if name == LATEST:
        return _find_latest(run, source, all_members)
    step_match = re.fullmatch(r"step=(\d{1,18})", name)
    if step_match is not None:
        matching_names = list(_find_by_step(int(step_match[1]), source, finished_members))
    else:
        matching_names = _find_by_name(name, finished_members, source.files)
    if len(matching_names) == 1:
        problem = find_problem(finished_members[matching_names[0]].to_saved_checkpoint(source))
        if problem is not None:  # what it lacks may be refused later, or may not be needed
            log_warning("runs", f"{matching_names[0]} is not complete: {problem}")
        return f"{run}/{matching_names[0]}"
    if matching_names:
        raise SourceNotFoundError(
            f"{run} has several checkpoints {name!r} ({join_newest(matching_names)}); name one of them, such as "
            f"{run}@{matching_names[0]}"
        )
    raise SourceNotFoundError(f"{run} has no checkpoint {name!r}; it has {join_newest(finished_names)}")


def _find_latest(run: str, source: Source, run_members: Sequence[RunMember]) -> str:
    """The newest complete checkpoint; a warning says which newer ones are not complete. The checkpoint that the run's
    file ``latest`` names comes first.

    Raises SourceNotFoundError.
    """
    latest_name = read_latest_name(source)
    skipped_problems: dict[str, str] = {}
    for member in sorted(run_members, key=lambda member: member.name == latest_name, reverse=True):
        problem = find_problem(member.to_saved_checkpoint(source))
        if problem is None:
            if skipped_problems:
                newer, why = next(iter(skipped_problems.items()))
                num_more = len(skipped_problems) - 1
                more = f" ({num_more:,} more are not complete either)" if num_more else ""
                log_warning("runs", f"latest is {member.name}: the newer {newer} is not complete: {why}{more}")
            return run if member.name == latest_name else f"{run}/{member.name}"
        skipped_problems[member.name] = problem
    name, problem = next(iter(skipped_problems.items()))
    raise SourceNotFoundError(f"{run} has no complete checkpoint; the newest is {name}: {problem}")


def _find_by_name(name: str, members_by_name: Mapping[str, RunMember], files: Iterable[str]) -> list[str]:
    """Checkpoints of that name; of a file, the name without its ending is enough."""
    matching_names = _filter_by_folder(members_by_name, lambda folder: f"/{folder}".endswith(f"/{name}"), files)
    stems = (each.name for each in members_by_name.values() if each.is_file)
    return matching_names or [each for each in stems if f"/{each.rpartition('.')[0]}".endswith(f"/{name}")]


def _find_by_step(step: int, source: Source, members_by_name: Mapping[str, RunMember]) -> Iterator[str]:
    """Checkpoints whose names say that step; if none does, those whose content says it."""
    names_with_step = _filter_by_folder(members_by_name, lambda folder: parse_step(folder) == step, source.files)
    names_by_content = (
        each.name for each in members_by_name.values() if read_step(each.to_saved_checkpoint(source)) == step
    )
    yield from names_with_step or names_by_content


def _filter_by_folder(member_names: Iterable[str], is_wanted: Callable[[str], bool], files: Iterable[str]) -> list[str]:
    """Those of ``member_names`` of which ``is_wanted`` is true, or true of an inner folder that holds their files."""
    inner_folders = {get_parent_folder(path) for path in files if is_checkpoint_file(path)}
    return [
        folder
        for folder in member_names
        if is_wanted(folder) or any(is_wanted(each) for each in inner_folders if each.startswith(f"{folder}/"))
    ]
