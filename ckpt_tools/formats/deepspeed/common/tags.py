"""Tags of native and universal checkpoints: which of a folder is meant, and names for new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.wording import join_newest
from ckpt_tools.errors import (
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UsageError,
    name_file_in_errors,
)
from ckpt_tools.stores.source import Source, check_file_name

MAX_LATEST_BYTES = 4096
"""Longest name of a folder."""


def choose_tag(source: Source, tag: str | None, folders: list[str], *, latest: str, what: str) -> str:
    """The one of ``folders`` that ``tag`` names, or else the file ``latest``; ``what`` describes them in messages.
    Raises SourceNotFoundError if there is no such tag; IncompleteError if ``latest`` names one that is not there;
    UnsafeError if ``latest`` leads out of the source; UnsupportedError if there are several and nothing chooses."""
    if not folders:
        raise SourceNotFoundError(f"there is no {what} in {source.store.url}")
    if tag is not None:
        if (name := tag.strip("/")) and name in folders:
            return name
        raise SourceNotFoundError(f"{source.store.url} has no tag {tag!r}; it has {_listed(folders)}")
    if "" in folders:
        return ""
    if latest in source.files:
        return _latest(source, folders, latest)
    if len(folders) > 1:
        raise SeveralCheckpointsError(
            f"there are several tags and no file {latest!r}; choose one with {format_option('tag')} "
            f"({_listed(folders)})"
        )
    return folders[0]


def folder_of(folders: Iterable[str], used: Collection[str]) -> str:
    """The one of ``folders`` that holds the files ``used`` of a checkpoint that was read."""
    holding = (each for each in folders if any(not each or path.startswith(f"{each}/") for path in used))
    return max(holding, key=len)


def written_tag(tag: str, *, latest: str) -> str:
    """``tag`` if it can name the folder of a checkpoint beside the file ``latest``. Raises UsageError."""
    if tag in ("", ".", "..", latest) or any(character in tag for character in "/\\\0\n"):
        raise UsageError(f"{format_option('tag', tag)} is not a valid name for the folder of a checkpoint")
    return tag


def _latest(source: Source, folders: list[str], latest: str) -> str:
    try:
        text = source.read_all(latest, limit_bytes=MAX_LATEST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise MalformedError("it should contain the name of a tag, but it is not text", path=latest) from error
    if not text.strip():
        raise IncompleteError("it should contain the name of a tag, but it is empty", path=latest)
    with name_file_in_errors(latest):
        tag = check_file_name(text.strip()).strip("/")
    if tag not in folders:
        raise IncompleteError(
            f"it names the tag {tag!r}, which does not exist; the tags are {_listed(folders)}", path=latest
        )
    return tag


def _listed(folders: list[str]) -> str:
    return join_newest(folder or "the folder itself" for folder in folders)
