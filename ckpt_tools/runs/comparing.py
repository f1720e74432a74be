"""Opens the checkpoints that pruning relies on, and compares them with those that would go, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, FormatError, IncompleteError, StoreError, UnsafeError, UnsupportedError
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.runs.contents import StepContent, find_missing_state, summarize_content
from ckpt_tools.runs.listing import read_plain_manifest
from ckpt_tools.runs.rules import ComparedSteps
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.names import has_optimizer_in_path
from ckpt_tools.trainers.run_folders import RunMember


def check_kept_steps(
    complete_members: Sequence[RunMember], run: Source, compared_steps: ComparedSteps
) -> Mapping[str, str]:
    """The newest checkpoints with optimizer state and the reason to keep them, if those that stay have none.

    ``complete_members`` are the numbered checkpoints of ``run`` that are complete, the newest first.

    Raises:
        FormatError: one that stays cannot be opened, or holds less than an older one that would go.
    """
    members_by_step: dict[str, list[RunMember]] = {}
    for member in complete_members:
        members_by_step.setdefault(member.step_key, []).append(member)
    kept_contents = [_read_kept_content(number, members_by_step[number], run) for number in compared_steps.kept_steps]
    older_contents = [
        each
        for number in compared_steps.older_steps
        if (each := _read_content_or_none(number, members_by_step[number], run)) is not None
    ]
    for each, elder in product(kept_contents, older_contents):
        if (missing_state := find_missing_state(each, elder)) is not None:
            raise IncompleteError(
                f"{each.name}, which is to stay, holds less than an older checkpoint that would go: {missing_state}; "
                f"nothing was removed; add {format_option('allow_less', True)} if that is right"
            )
    if not compared_steps.older_steps or any(each.has_optimizer for each in kept_contents):
        return {}
    others = (members for number, members in members_by_step.items() if number not in compared_steps.kept_steps)
    newest = next((members for members in others if _may_have_optimizer(members, run, kept_contents)), ())
    return {each.name: "the newest with optimizer state" for each in newest}


def _may_have_optimizer(members: Sequence[RunMember], run: Source, kept_contents: Sequence[StepContent]) -> bool:
    """Whether a step that may go has an optimizer, by its files' names or by its content. One that is not read may have
    one if those that stay are read, and have none."""
    if any(_list_optimizer_files(each, run) for each in members):
        return True
    try:
        content = _read_content("", members, run)
    except StoreError:
        raise
    except UnsafeError:
        return True
    except CkptError:
        return False
    return content.has_optimizer if content.is_read else all(each.is_read for each in kept_contents)


def _read_kept_content(step_key: str, members: Sequence[RunMember], run: Source) -> StepContent:
    """The content of a step that stays. Raises FormatError; nothing was removed then."""
    try:
        return _read_content(step_key, members, run)
    except FormatError as error:
        name = members[0].name
        raise type(error)(f"{name}, which is to stay, cannot be opened: {error}; nothing was removed") from error


def _read_content_or_none(step_key: str, members: Sequence[RunMember], run: Source) -> StepContent | None:
    """The content of a step that may go; None if it cannot be opened, so that nothing is lost with it."""
    try:
        return _read_content(step_key, members, run)
    except StoreError:
        raise
    except CkptError:
        return None


def _read_content(step_key: str, members: Sequence[RunMember], run: Source) -> StepContent:
    """The content of a step by headers, or by the sizes of its files if its layout is not read. Raises CkptError."""
    name, file_bytes = members[0].name, sum(sum(each.files.values()) for each in members)
    optimizer_files = {path: size for each in members for path, size in _list_optimizer_files(each, run).items()}
    try:
        manifests = [_read_manifest(each, run) for each in members]
    except UnsupportedError:
        return StepContent(
            step_key,
            name,
            {},
            sum(optimizer_files.values()),
            file_bytes,
            is_read=False,
            has_optimizer=bool(optimizer_files),
        )
    return summarize_content(step_key, name, manifests, optimizer_files, file_bytes)


def _list_optimizer_files(member: RunMember, run: Source) -> dict[str, int]:
    return {path: size for path, size in member.to_saved_checkpoint(run).files.items() if has_optimizer_in_path(path)}


def _read_manifest(member: RunMember, run: Source) -> Manifest:
    """The manifest of a checkpoint, without the optimizer in a file beside the model if that cannot be joined."""
    checkpoint = member.to_saved_checkpoint(run)
    with suppress(FormatError, UnsafeError):
        return read_source(checkpoint.source, ReadOptions())[1]
    return read_plain_manifest(checkpoint)[1]
