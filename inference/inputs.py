"""What to predict: images that are read one at a time, when their turn comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.errors import SourceNotFoundError

if TYPE_CHECKING:
    from torch import Tensor

    from .training_package import data

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """``read(i)`` gives the pixels of image ``i``, uint8 [28, 28], or raises ``FormatError`` that names it.

    ``truths`` are the true labels, if these are known. Nothing but names and labels is held for all images.
    """

    names: Sequence[str]
    read: Callable[[int], Tensor]
    truths: Sequence[int] | None

    def __post_init__(self) -> None:
        assert self.truths is None or len(self.truths) == len(self.names)

    def truth(self, number: int) -> int | None:
        return None if self.truths is None else self.truths[number]


def held_out_inputs(dataset: data.DatasetName, root: Path | None) -> Inputs:
    """The held-out part of a dataset, named by its position in it."""
    from .training_package import data

    images = data.load_dataset(dataset, "held-out", root)
    return Inputs(tuple(map(str, range(len(images)))), images.pixels.__getitem__, images.labels.tolist())


def file_inputs(path: Path) -> Inputs:
    """The image files directly in the folder ``path`` by name, or the one file ``path``.

    Raises ``SourceNotFoundError`` if there are none. No file is opened yet.
    """
    folder, names = (path, _image_names(path)) if path.is_dir() else (path.parent, [path.name])
    if not os.path.lexists(path):
        raise SourceNotFoundError(f"there is no folder or image file {path}")
    if not names:
        raise SourceNotFoundError(f"there are no image files in {path}")

    def read(number: int) -> Tensor:
        from .prediction import read_image

        return read_image(folder / names[number])

    return Inputs(names, read, None)


def _image_names(folder: Path) -> list[str]:
    """Names alone: a ``Path`` for each of a million files would be most of the memory."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if Path(entry.name).suffix.lower() in IMAGE_SUFFIXES)
