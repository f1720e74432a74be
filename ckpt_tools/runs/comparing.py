"""Opens the checkpoints that pruning relies on, and compares them with those that would go, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.option_names import option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, FormatError, IncompleteError, StoreError, UnsupportedError
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.runs.contents import Content, content_of, lack
from ckpt_tools.runs.listing import read
from ckpt_tools.runs.rules import Relied
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.names import is_optimizer
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
                f"was removed; add {option('allow_less', True)} if that is right"
            )
    if any(each.state_bytes for each in kept) or not any(each.state_bytes for each in elders):
        return {}
    others = (_known(number, members, run) for number, members in steps.items() if number not in found.kept)
    newest = next(each for each in others if each is not None and each.state_bytes)
    return {each.name: "the newest with optimizer state" for each in steps[newest.number]}


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
    try:
        found = [_manifest(each, run) for each in members]
    except UnsupportedError:
        return Content(number, name, {}, 0, file_bytes, is_read=False)
    beside_bytes = sum(num_bytes for _, num_bytes in found)
    manifests = [manifest for manifest, _ in found]
    return content_of(number, name, manifests, beside_bytes=beside_bytes, file_bytes=file_bytes)


def _manifest(member: Member, run: Source) -> tuple[Manifest, int]:
    """With the bytes of the optimizer's file if that cannot be joined with the model."""
    saved = member.saved(run)
    with suppress(FormatError):
        return read_source(saved.source, ReadOptions())[1], 0
    beside = sum(size for path, size in saved.files.items() if is_optimizer(path.rpartition("/")[2]))
    return read(saved)[1], beside
