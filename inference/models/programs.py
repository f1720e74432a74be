"""Checkpoints that are programs: ``torch.export`` (``.pt2``) and TorchScript.

Loading one runs its author's code, so it is loaded only if the user names the kind of program. torch reads it whole,
with its own names, shapes and dtypes; no architecture is needed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import BadZipFile

from blake3 import blake3

from ckpt_tools.errors import FormatError, SourceNotFoundError, UsageError

from ..common.urls import file_system, store_errors

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.export import ExportedProgram

EXPORTED, SCRIPTED = "torch.export", "torchscript"
SUFFIX = ".pt2"

PROGRAMS = {EXPORTED: "a program of torch.export", SCRIPTED: "a TorchScript archive"}


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded program: an ExportedProgram or a TorchScript module, and the BLAKE3 of its file."""

    kind: str
    found: Any
    digest: str

    @property
    def module(self) -> nn.Module:
        found: nn.Module = self.found.module() if self.kind == EXPORTED else self.found
        return found


def load_program(
    kind: str, url: str | Path, device: str | torch.device, storage_options: Mapping[str, Any] | None
) -> Program:
    """Load the program at ``url`` to ``device``. Raises FormatError if it is not such a program. SourceNotFoundError if
    there is no such file."""
    try:
        with _opened(str(url), storage_options) as file, _silenced():
            # At once, so that the digest is of what is run.
            data = file.read()
            return Program(kind, _READERS[kind](BytesIO(data), device), f"blake3:{blake3(data).hexdigest()}")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise SourceNotFoundError(f"there is no file {url}") from error
    except PermissionError as error:
        raise FormatError(f"{url} cannot be read ({error.strerror})") from error
    except _FAILURES as error:
        raise FormatError(f"{url} is not {PROGRAMS[kind]}, or is damaged") from error


def check_unchanged(kind: str, reading: Mapping[str, Any], dtype: object) -> None:
    """Raises UsageError for options that change tensors, which a program has of its own."""
    if reading or dtype is not None:
        raise UsageError(f"{PROGRAMS[kind]} has its own names and dtypes; leave out {', '.join(reading) or 'dtype'}")


def check_asked(url: str | Path) -> None:
    """Raises UsageError if the file's suffix is that of a program, which must be requested by name."""
    if str(url).endswith(SUFFIX):
        raise UsageError(
            f"{url} is {PROGRAMS[EXPORTED]}, and to load it is to run it; if you trust it, name {EXPORTED} as its "
            "architecture"
        )


def _exported(file: BinaryIO, device: str | torch.device) -> ExportedProgram:
    import torch
    from torch.export.passes import move_to_device_pass

    program = torch.export.load(file)
    if torch.device(device).type != "cpu":
        program = move_to_device_pass(program, device)
    return program


def _scripted(file: BinaryIO, device: str | torch.device) -> nn.Module:
    import torch

    model: nn.Module = torch.jit.load(file, map_location=device)
    return model.eval()


_READERS: Mapping[str, Callable[[BinaryIO, str | torch.device], Any]] = {EXPORTED: _exported, SCRIPTED: _scripted}

_FAILURES = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, OSError, BadZipFile)
"""Errors of torch's readers, which do not tell a damaged file from another kind of file."""


@contextmanager
def _opened(url: str, storage_options: Mapping[str, Any] | None) -> Iterator[BinaryIO]:
    if "://" not in url:
        with Path(url).open("rb") as file:
            yield file
        return
    fs, path = file_system(url, storage_options)
    with store_errors(url):
        remote = fs.open(path, "rb")
    with remote:
        yield remote


@contextmanager
def _silenced() -> Iterator[None]:
    """Silences torch's traceback for an unreadable file, and TorchScript's deprecation warning."""
    logger = logging.getLogger("torch.export")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before
