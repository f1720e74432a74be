"""One input to predict, and its bytes, which are read only when it is decoded."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.errors import FormatError

from ..common.urls import find_file_system, translate_store_errors

if TYPE_CHECKING:
    import numpy as np

MAX_BYTES = 256 * 2**20  # limit of one input, which is held in memory while it is decoded


@dataclass(frozen=True, slots=True)
class FileContent:
    """Content in a file."""

    url: str


@dataclass(frozen=True, slots=True)
class CellContent:
    """Content of a cell or a line. For an image model it names a file relative to the folder ``base``."""

    text: str
    base: str


@dataclass(frozen=True, slots=True)
class MissingContent:
    """No content, because of ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class PixelContent:
    """A decoded grey image: uint8 [height, width]."""

    values: np.ndarray


Content = bytes | FileContent | CellContent | MissingContent | PixelContent


@dataclass(frozen=True, slots=True)
class InputItem:
    """One input. ``name`` is its key in the output, ``truth`` its true label as in the input (None if unknown),
    ``fraction`` the share of the input that is read with it, for the progress."""

    name: str
    content: Content
    truth: str | int | None
    fraction: float


def read_content(item: InputItem, *, takes_texts: bool) -> tuple[bytes, str]:
    """The bytes to decode, and their name for error messages. Raises FormatError if there are none."""
    content = item.content
    if isinstance(content, CellContent) and not takes_texts:
        content = resolve_cell(content)
    match content:
        case MissingContent(reason):
            raise FormatError(reason)
        case FileContent(url):
            return read_file(url), url
        case CellContent(text):
            try:
                return text.encode("utf-8", "surrogateescape"), item.name
            except UnicodeEncodeError as error:
                raise FormatError(f"it holds half of a surrogate pair (character {error.start})") from error
        case PixelContent(values):
            return _encode_png(values), item.name
    return content, item.name


def _encode_png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels).save(file, "png", compress_level=0)
    return file.getvalue()


def resolve_cell(cell: CellContent) -> FileContent:
    """The file that a cell names: relative to the table's folder, or a URL of the same scheme. Raises FormatError if it
    is in another kind of place. A table from elsewhere does not choose where we read."""
    scheme, has_scheme, _ = cell.text.partition("://")
    base_scheme, is_remote, _ = cell.base.partition("://")
    if has_scheme:
        if not is_remote or scheme != base_scheme:
            raise FormatError(f"{cell.text} is in another kind of place than the table that names it")
        return FileContent(cell.text)
    if is_remote:
        return FileContent(f"{cell.base}/{cell.text.lstrip('/')}")
    return FileContent(str(Path(cell.base, cell.text)))


def read_file(url: str) -> bytes:
    """All of a file, local or remote. Raises FormatError if it cannot be read, is not a regular file, or is too large.
    StoreError if the store failed. Then every other input would fail too."""
    try:
        if "://" in url:
            with translate_store_errors(url):
                return _read_remote(url)
        return _read_local(url)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FormatError(f"{url} cannot be read ({reason})") from error


def _read_local(path: str) -> bytes:
    # Opening a named pipe would block until it has a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a file")
        _check_size(path, status.st_size)
        return file.read()


def _read_remote(url: str) -> bytes:
    fs, path = find_file_system(url)
    # A range, so that the size needs no request of its own.
    data: bytes = fs.cat_file(path, start=0, end=MAX_BYTES + 1)
    _check_size(url, len(data))
    return data


def _check_size(url: str, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise FormatError(f"{url} has more than {MAX_BYTES // 2**20} MiB")
