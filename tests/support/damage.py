"""Copies of real checkpoints in which one thing is wrong, and the errors that must name it."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt_tools.errors import FormatError
from fixtures.corpus import make
from tests.layouts.contents import contents
from tests.support.refusals import refusal_test
from tests.support.saved_files import Change, change_file

TAG = "global_step4"
"""The folder in which DeepSpeed's runs of the corpus keep their files."""

Harm = Callable[[Path], object]
"""Done to that folder."""


def copied_run(name: str, folder: Path) -> Path:
    """A copy of a layout of the corpus in ``folder``, to be changed."""
    return Path(shutil.copytree(make(name).folder, folder / "run"))


def damage_test(layout: str, *damages: tuple[str, Harm, type[FormatError], str]) -> Callable[..., None]:
    """The one test of a table. Each row's harm is done to a copy of a run of DeepSpeed in the corpus, and reading the
    whole of that ends with the row's error."""

    def read(folder: Path, harm: Harm) -> None:
        run = copied_run(layout, folder)
        harm(run / TAG)
        contents(run)

    return refusal_test(*((name, partial(read, harm=harm), error, words) for name, harm, error, words in damages))


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


def updated(name: str, **values: Any) -> Harm:
    return changed(name, lambda content: content.update(values))
