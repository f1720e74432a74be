"""The files that a user names, as far as they can be checked without loading torch."""

from __future__ import annotations

import shlex
from pathlib import Path

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, SourceNotFoundError, UsageError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SAFETENSORS_SUFFIX = ".safetensors"
TORCH_SUFFIXES = frozenset({".pt", ".pth", ".bin"})


def local_path(text: str, option: str, instead: str) -> Path:
    """``text`` as a local path. Raises ``UsageError`` for a URL, and says there what to do ``instead``."""
    if "://" in text:
        raise UsageError(f"{option} has to be a local path, {text} is a URL; {instead}")
    return Path(text)


def model_path(text: str) -> Path:
    """The MODEL argument as a path that holds a model by its name. Raises as :func:`check_model_path` does."""
    path = local_path(text, "MODEL", f"make a local file of it first: {consolidate_command(text)}")
    check_model_path(path)
    return path


def check_model_path(path: Path) -> None:
    """Raise ``SourceNotFoundError`` or ``FormatError`` unless there is a file or folder at ``path`` to load."""
    if path.is_dir():
        _check_folder(path)
    elif not path.is_file():
        raise SourceNotFoundError(f"there is no model file {path}")
    elif path.suffix not in {SAFETENSORS_SUFFIX, *TORCH_SUFFIXES}:
        raise FormatError(
            f"{path} is not a model file: expected .safetensors, .pt, .pth, .bin or a folder of safetensors"
        )


def consolidate_command(source: str | Path) -> str:
    """The command line that makes a model file of a checkpoint."""
    return f"ckpt-tools consolidate {shlex.quote(str(source))} {SINGLE_FILE}"


def _check_folder(folder: Path) -> None:
    if (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file():
        return
    if name := _checkpoint_format(folder):
        raise FormatError(
            f"{folder} is a checkpoint ({name}), not a model file; make one of it first: {consolidate_command(folder)}"
        )
    raise SourceNotFoundError(f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}")


def _checkpoint_format(folder: Path) -> str | None:
    try:
        return ckpt_tools.inspect(folder).format
    except CkptError:
        return None
