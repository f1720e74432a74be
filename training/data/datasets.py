"""Datasets: images as 8-bit grey 28x28, and text as bytes or tokens.

``digits`` is scikit-learn's bundled set of 1,797 handwritten digits (8x8, 17 grey levels), upscaled; it needs no
network. ``fashion-mnist`` is torchvision's FashionMNIST, 60,000 + 10,000 images; ``image-folder`` is the user's own.
``text`` is the beginning of Shakespeare's Coriolanus, or the user's own. Images are uint8 until :func:`to_input`, so a
held-out image that is saved as a PNG and posted to the HTTP service gives the model the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from ckpt_tools.errors import StoreError, UsageError

from ..config.combinations import find_missing_root
from ..config.model_names import IMAGE_SIZE, NUM_CLASSES
from ..config.options import DatasetName as DatasetName
from ..config.references import first_line
from .texts import cut_into_pieces

Part = Literal["train", "held-out"]
PARTS: tuple[Part, ...] = get_args(Part)

DIGITS_MAX_LEVEL = 16  # brightest pixel of scikit-learn's digits
DIGITS_HELD_OUT = 360  # one fifth of 1,797, rounded up
# NumPy guarantees RandomState's stream but not default_rng's; the split must never change.
DIGITS_SPLIT_SEED = 20


@dataclass(frozen=True, eq=False)
class TensorSamples(Dataset[Any]):
    """Inputs and labels of a dataset: images uint8 [n, 28, 28] and classes int64 [n]; or pieces of a text, uint8 bytes
    or int32 tokens [n, t], and what follows each of these, int64 [n, t]."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch: the model's inputs, and their labels."""
        rows = torch.as_tensor(indices)
        return to_input(self.pixels[rows]), self.labels[rows]

    def take_first(self, count: int | None) -> Self:
        return replace(self, pixels=self.pixels[:count], labels=self.labels[:count])


def load_dataset(
    name: DatasetName, part: Part, root: Path | None, hub: Path | None = None, context: int | None = None
) -> TensorSamples:
    """One part of a dataset; of a text, ``hub`` is the folder of the model, and ``context`` the length of the pieces.
    Raises UsageError if ``root`` is needed and missing, or holds something else. StoreError if a download fails."""
    if name == "text":
        return TensorSamples(*cut_into_pieces(root, hub, context, held_out=part == "held-out"))
    if context is not None:
        raise UsageError(f"--dataset-arg context is for --dataset text, not {name}")
    if name == "digits":
        return _load_digits(part)
    if (sentence := find_missing_root(name, root)) is not None:
        raise UsageError(sentence)
    assert root is not None
    return _load_image_folder(part, root) if name == "image-folder" else _load_fashion_mnist(part, root)


def to_input(pixels: Tensor) -> Tensor:
    """uint8 [n, 28, 28] to the model's input, float32 [n, 1, 28, 28] in [-1, 1]; texts [n, t] to int64."""
    if pixels.ndim == 2:
        return pixels.to(torch.int64)
    # In place: each new tensor of a batch costs as much as the arithmetic.
    return pixels.unsqueeze(1).to(torch.float32, copy=True).div_(127.5).sub_(1.0)


def _load_digits(part: Part) -> TensorSamples:
    """Read scikit-learn's file: importing its module takes 3 s, this 0.15 s. A row is an image and its class."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    digits = np.loadtxt(Path(spec.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    order = np.random.RandomState(DIGITS_SPLIT_SEED).permutation(len(digits))
    rows = torch.from_numpy(digits[order[:DIGITS_HELD_OUT] if part == "held-out" else order[DIGITS_HELD_OUT:]])
    return TensorSamples(_upscale_digits(rows[:, :-1].reshape(-1, 8, 8)), rows[:, -1].to(torch.int64))


def _upscale_digits(levels: Tensor) -> Tensor:
    """Grey levels 0..16, float64 [n, 8, 8], to uint8 [n, 28, 28], bilinear."""
    bright = levels.unsqueeze(1) * (255 / DIGITS_MAX_LEVEL)
    large = functional.interpolate(bright, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    return large.squeeze(1).round().to(torch.uint8)


def _load_fashion_mnist(part: Part, root: Path) -> TensorSamples:
    from torchvision.datasets import FashionMNIST

    try:
        dataset = FashionMNIST(root, train=part == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"FashionMNIST is not in {root} and could not be downloaded ({first_line(error)}); "
            f"copy its four .gz files into {root / 'FashionMNIST' / 'raw'} or use --dataset digits"
        ) from error
    return TensorSamples(dataset.data, dataset.targets)


def _load_image_folder(part: Part, root: Path) -> TensorSamples:
    """Images in ``root/PART/CLASS``, grey and 28x28. The folders in ``train`` number the classes of both."""
    classes, images = _image_folder(root, "train").classes, _image_folder(root, part)
    if unknown := sorted({*images.classes} - {*classes}):
        raise UsageError(f"--data-root {root}: {part}/{unknown[0]} is a class that {root / 'train'} does not have")
    if len(classes) > NUM_CLASSES:
        raise UsageError(f"--data-root {root} has {len(classes)} classes, and models tell {NUM_CLASSES} apart")
    numbers = [classes.index(images.classes[number]) for number in images.targets]
    return TensorSamples(
        torch.stack([_read_grey_image(Path(path)) for path, _ in images.samples]), torch.tensor(numbers)
    )


def _image_folder(root: Path, part: Part) -> Any:
    from torchvision.datasets import ImageFolder

    try:
        return ImageFolder(str(root / part))
    except OSError as error:
        raise UsageError(f"--data-root {root}: {part}: {first_line(error)}") from error


def _read_grey_image(path: Path) -> Tensor:
    """Image as uint8 [28, 28], with the preprocessing of inference."""
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        with Image.open(path) as image:
            small = image.convert("L").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
            return pil_to_tensor(small)[0]
    except Exception as error:
        # Pillow's decoders raise OSError, SyntaxError, struct.error, IndexError, ...
        raise UsageError(f"{path} cannot be read as an image: {first_line(error)}") from error
