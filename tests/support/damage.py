"""Copies of real checkpoints in which one thing is wrong, and the errors that must name it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools.errors import FormatError
from fixtures.corpus import make
from tests.layouts.contents import contents
from tests.support.saved_files import Change, change_file

TAG = "global_step4"
"""The folder in which DeepSpeed's runs of the corpus keep their files."""

Harm = Callable[[Path], object]
"""Done to that folder."""

Damage = tuple[Harm, type[FormatError], str]
"""What is done to a copy, and the error that names it."""


def copied_run(name: str, folder: Path) -> Path:
    """A copy of a layout of the corpus in ``folder``, to be changed."""
    return Path(shutil.copytree(make(name).folder, folder / "run"))


def assert_is_named(damage: Damage, run: Path) -> None:
    """Reading the whole of a run of DeepSpeed, after ``damage``, ends with its error."""
    harm, kind, text = damage
    harm(run / TAG)
    with pytest.raises(kind, match=text):
        contents(run)


def unlink(*patterns: str) -> Harm:
    """Files that are missing; each pattern must have found one."""

    def harm(folder: Path) -> None:
        for pattern in patterns:
            found = list(folder.glob(pattern))
            assert found, pattern
            for path in found:
                path.unlink()

    return harm


def rename(one: str, other: str) -> Harm:
    return lambda folder: (folder / one).rename(folder / other)


def swap(one: str, other: str) -> Harm:
    """Two files, each with the content of the other."""

    def harm(folder: Path) -> None:
        data = (folder / one).read_bytes()
        (folder / one).write_bytes((folder / other).read_bytes())
        (folder / other).write_bytes(data)

    return harm


def save(name: str, value: Any) -> Harm:
    return lambda folder: torch.save(value, folder / name)


def changed(name: str, change: Change) -> Harm:
    return lambda folder: change_file(folder / name, change)
