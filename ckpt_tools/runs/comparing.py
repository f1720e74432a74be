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
from ckpt_tools.runs.contents import Content, content_of, lack
from ckpt_tools.runs.listing import read
from ckpt_tools.runs.rules import Relied
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.names import holds_optimizer
from ckpt_tools.trainers.run_folders import Member


def compared(complete: Sequence[Member], run: Source, found: Relied) -> Mapping[str, str]:
    """The newest checkpoints with optimizer state and the reason to keep them, if those that stay have none.

    ``complete`` are the numbered checkpoints of ``run`` that are complete, the newest first.

    Raises:
        FormatError: one that stays cannot be opened, or holds less than an older one that would go.
    """
    steps: dict[str, list[Member]] = {}
    for member in complete:
        steps.setdefault(member.number, []).append(member)
    kept = [_opened(number, steps[number], run) for number in found.kept]
    elders = [each for number in found.elders if (each := _known(number, steps[number], run)) is not None]
    for each, elder in product(kept, elders):
        if (what := lack(each, elder)) is not None:
            raise IncompleteError(
                f"{each.name}, which is to stay, holds less than an older checkpoint that would go: {what}; nothing "
                f"was removed; add {format_option('allow_less', True)} if that is right"
            )
    if not found.elders or any(each.has_optimizer for each in kept):
        return {}
    others = (members for number, members in steps.items() if number not in found.kept)
    newest = next((members for members in others if _may_have_optimizer(members, run, kept)), ())
    return {each.name: "the newest with optimizer state" for each in newest}


def _may_have_optimizer(members: Sequence[Member], run: Source, kept: Sequence[Content]) -> bool:
    """Whether a step that may go has an optimizer, by its files' names or by its content. One that is not read may have
    one if those that stay are read, and have none."""
    if any(_optimizer_files(each, run) for each in members):
        return True
    try:
        content = _content("", members, run)
    except StoreError:
        raise
    except UnsafeError:
        return True
    except CkptError:
        return False
    return content.has_optimizer if content.is_read else all(each.is_read for each in kept)


def _opened(number: str, members: Sequence[Member], run: Source) -> Content:
    """The content of a step that stays. Raises FormatError; nothing was removed then."""
    try:
        return _content(number, members, run)
    except FormatError as error:
        name = members[0].name
        raise type(error)(f"{name}, which is to stay, cannot be opened: {error}; nothing was removed") from error


def _known(number: str, members: Sequence[Member], run: Source) -> Content | None:
    """The content of a step that may go; None if it cannot be opened, so that nothing is lost with it."""
    try:
        return _content(number, members, run)
    except StoreError:
        raise
    except CkptError:
        return None


def _content(number: str, members: Sequence[Member], run: Source) -> Content:
    """From headers; the sizes of files alone if its layout is not read. Raises CkptError."""
    name, file_bytes = members[0].name, sum(sum(each.files.values()) for each in members)
    files = {path: size for each in members for path, size in _optimizer_files(each, run).items()}
    try:
        manifests = [_manifest(each, run) for each in members]
    except UnsupportedError:
        return Content(number, name, {}, sum(files.values()), file_bytes, is_read=False, has_optimizer=bool(files))
    return content_of(number, name, manifests, files, file_bytes)


def _optimizer_files(member: Member, run: Source) -> dict[str, int]:
    return {path: size for path, size in member.saved(run).files.items() if holds_optimizer(path)}


def _manifest(member: Member, run: Source) -> Manifest:
    """Without the optimizer in a file beside the model if that cannot be joined with it."""
    saved = member.saved(run)
    with suppress(FormatError, UnsafeError):
        return read_source(saved.source, ReadOptions())[1]
    return read(saved)[1]
