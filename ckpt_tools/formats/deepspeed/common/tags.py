"""Tags of native and universal checkpoints: chooses the tag to read, and checks the name of a new one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import (
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UsageError,
    name_file_in_errors,
)
from ckpt_tools.messages.wording import join_newest
from ckpt_tools.stores.source import Source, check_file_name

MAX_LATEST_BYTES = 4096
"""Longest name of a folder."""


def choose_tag(source: Source, tag: str | None, folders: list[str], *, latest_file: str, description: str) -> str:
    """The tag folder to read: ``tag`` if it is given, otherwise the source itself, the tag in the file ``latest_file``,
    or the only one of ``folders``. ``description`` describes the folders in messages.

    Raises SourceNotFoundError if there is no such tag; IncompleteError if ``latest_file`` names one that is not there;
    UnsafeError if ``latest_file`` leads out of the source; SeveralCheckpointsError if there are several and nothing
    chooses."""
    if not folders:
        raise SourceNotFoundError(f"there is no {description} in {source.store.url}")
    if tag is not None:
        if (name := tag.strip("/")) and name in folders:
            return name
        raise SourceNotFoundError(f"{source.store.url} has no tag {tag!r}; it has {_format_folders(folders)}")
    if "" in folders:
        return ""
    if latest_file in source.files:
        return _read_latest_tag(source, folders, latest_file)
    if len(folders) > 1:
        raise SeveralCheckpointsError(
            f"there are several tags and no file {latest_file!r}; choose one with {format_option('tag')} "
            f"({_format_folders(folders)})"
        )
    return folders[0]


def find_used_folder(folders: Iterable[str], used_paths: Collection[str]) -> str:
    """The longest of ``folders`` that holds one of ``used_paths``, the files of a checkpoint that was read."""
    used_folders = (each for each in folders if any(not each or path.startswith(f"{each}/") for path in used_paths))
    return max(used_folders, key=len)


def validate_tag(tag: str, *, latest_file: str) -> str:
    """``tag`` if it can name the folder of a checkpoint beside the file ``latest_file``. Raises UsageError."""
    if tag in ("", ".", "..", latest_file) or any(character in tag for character in "/\\\0\n"):
        raise UsageError(f"{format_option('tag', tag)} is not a valid name for the folder of a checkpoint")
    return tag


def _read_latest_tag(source: Source, folders: list[str], latest_file: str) -> str:
    try:
        text = source.read_all(latest_file, limit_bytes=MAX_LATEST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise MalformedError("it should contain the name of a tag, but it is not text", path=latest_file) from error
    if not text.strip():
        raise IncompleteError("it should contain the name of a tag, but it is empty", path=latest_file)
    with name_file_in_errors(latest_file):
        tag = check_file_name(text.strip()).strip("/")
    if tag not in folders:
        raise IncompleteError(
            f"it names the tag {tag!r}, which does not exist; the tags are {_format_folders(folders)}", path=latest_file
        )
    return tag


def _format_folders(folders: list[str]) -> str:
    return join_newest(folder or "the folder itself" for folder in folders)
