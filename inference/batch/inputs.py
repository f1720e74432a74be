"""Inputs of a prediction: parts, which can be sent to other processes and give their items one by one, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckpt_tools.errors import UsageError

from .items import FileContent, InputItem, PixelContent
from .listing import FileListing, list_files
from .tables import TablePart, split_table

if TYPE_CHECKING:
    from ..common.training_package import data

# The datasets in training.config.options that have labels; a test compares them.
DATASETS: tuple[data.DatasetName, ...] = ("digits", "fashion-mnist")

FOLDER = "folder"  # value of ``--truth``: the true label of an image is the name of its folder
PART_IMAGES = 1000


class InputPart(Protocol):
    """Part of the input, small enough to be sent to another process. ``num_rows`` is None if unknown."""

    @property
    def num_rows(self) -> int | None: ...
    def items(self) -> Iterator[InputItem]: ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """All parts in order. ``digest`` is of the files' names, sizes and times; ``kind`` is "image" if all are images."""

    parts: Sequence[InputPart]
    digest: str
    kind: str
    has_truth: bool

    def items(self) -> Iterator[InputItem]:
        for part in self.parts:
            yield from part.items()


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Input options. ``url`` is the name of a dataset, a path, a URL, or a pattern. Raises UsageError if options do not
    fit together."""

    url: str
    column: str | None = None
    truth: str | None = None
    data_root: Path | None = None

    def __post_init__(self) -> None:
        if self.is_dataset and os.path.lexists(self.url):
            raise UsageError(
                f"--input {self.url} is a dataset, and there is a file of this name; for that, ./{self.url}"
            )
        if self.url == "fashion-mnist" and self.data_root is None:
            raise UsageError("the dataset fashion-mnist needs --data-root, the folder it is kept in or downloaded to")
        if self.url != "fashion-mnist" and self.data_root is not None:
            raise UsageError("--data-root is for --input fashion-mnist alone")
        if self.is_dataset and (self.column or self.truth):
            raise UsageError(f"--column and --truth are not for {self.url}, which knows its labels")

    @property
    def is_dataset(self) -> bool:
        return self.url in DATASETS


def find_inputs(options: InputOptions) -> Inputs:
    """List the input; no image is opened. Raises SourceNotFoundError, UsageError, FormatError or StoreError."""
    if options.is_dataset:
        return make_held_out_inputs(next(name for name in DATASETS if name == options.url), options.data_root)
    files = list_files(options.url)
    return _make_image_inputs(files, options) if files.kind == "image" else _make_table_inputs(files, options)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Images ``first`` to ``first + len(names)`` of ``total`` below ``base``."""

    base: str
    names: tuple[str, ...]
    first: int
    total: int
    truth_of_folder: bool

    @property
    def num_rows(self) -> int:
        return len(self.names)

    def items(self) -> Iterator[InputItem]:
        for number, name in enumerate(self.names, self.first + 1):
            url = f"{self.base}/{name}"
            truth = url.split("/")[-2] if self.truth_of_folder else None
            yield InputItem(name, FileContent(url), truth, number / self.total)


def _make_image_inputs(files: FileListing, options: InputOptions) -> Inputs:
    if options.column is not None:
        raise UsageError("--column is for tables; the input is images")
    if options.truth not in (None, FOLDER):
        raise UsageError(f"--truth of images is {FOLDER}, the folder that each lies in, not {options.truth}")
    truth_of_folder = options.truth is not None
    parts = [
        ImagePart(files.base, tuple(files.names[first : first + PART_IMAGES]), first, len(files.names), truth_of_folder)
        for first in range(0, len(files.names), PART_IMAGES)
    ]
    return Inputs(parts, files.digest, "image", truth_of_folder)


def _make_table_inputs(files: FileListing, options: InputOptions) -> Inputs:
    has_several, share = len(files.names) > 1, 1 / len(files.names)
    parts: list[InputPart] = []
    for number, name in enumerate(files.names):
        prefix = f"{name}:" if has_several else ""
        table = TablePart(files.make_url(name), files.kind, prefix, (number * share, (number + 1) * share))
        parts += split_table(table, options.column, options.truth)
    return Inputs(parts, files.digest, "table", options.truth is not None)


@dataclass(frozen=True, slots=True)
class HeldOutPart:
    """The held-out samples of a dataset."""

    dataset: data.DatasetName
    root: Path | None
    num_rows: int

    def items(self) -> Iterator[InputItem]:
        images = _load_held_out(self.dataset, self.root)
        for number, (pixels, label) in enumerate(zip(images.pixels.numpy(), images.labels.tolist(), strict=True)):
            yield InputItem(str(number), PixelContent(pixels), label, (number + 1) / self.num_rows)


def make_held_out_inputs(dataset: data.DatasetName, root: Path | None) -> Inputs:
    """The held-out samples of a dataset; an item's name is its position."""
    num_rows = len(_load_held_out(dataset, root))
    return Inputs([HeldOutPart(dataset, root, num_rows)], f"dataset:{dataset}", "image", has_truth=True)


@lru_cache(maxsize=1)
def _load_held_out(dataset: data.DatasetName, root: Path | None) -> data.TensorSamples:
    """Cached, because rows are counted before they are predicted."""
    from ..common.training_package import data

    return data.load_dataset(dataset, "held-out", root)


@dataclass(frozen=True, slots=True)
class RemainingPart:
    """A part without its first ``skipped`` items."""

    part: InputPart
    skipped: int

    @property
    def num_rows(self) -> int | None:
        return None if self.part.num_rows is None else self.part.num_rows - self.skipped

    def items(self) -> Iterator[InputItem]:
        return islice(self.part.items(), self.skipped, None)


def skip_items(parts: Sequence[InputPart], num_done: int) -> Iterator[InputPart]:
    """The parts without the first ``num_done`` items, for a resumed run."""
    num_left = num_done
    for part in parts:
        if not num_left:
            yield part
            continue
        # Lines are counted by reading them, at most as many as are done.
        size = part.num_rows if part.num_rows is not None else sum(1 for _ in islice(part.items(), num_left))
        if size > num_left or (part.num_rows is None and size == num_left):
            yield RemainingPart(part, num_left)
        num_left -= min(size, num_left)
