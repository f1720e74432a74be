"""From the bytes of an image file to its pixels, without torch.

A small file may unpack to gigabytes, so sizes are known before anything is decoded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import ceil, prod, sqrt
from typing import IO, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ckpt_tools.errors import FormatError

from .results import Array

MAX_PIXELS = 4096**2  # default limit, for models that take less than a 64th of it
MAX_FILE_PIXELS = 64_000_000  # limit of a JPEG file, which may be decoded at a fraction of its size
LARGE_PIXELS = 2048**2  # decoded one at a time by the service

JPEG_SCALES = (2, 4, 8)  # what the decoder can divide sizes by, as it reads

ImageMode = Literal["L", "RGB"]

# Pillow warns of images that it would still decode, and of damaged metadata: any client could fill the log.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True, slots=True)
class ImageReading:
    """Decoding of an image file to pixels: in ``mode``, upright as its EXIF says, and scaled to ``size`` (width,
    height) if that is given. Larger images than ``max_pixels`` are refused. A larger JPEG file is decoded at a
    half, a fourth or an eighth of its size, as Pillow's ``draft`` does. ``is_input`` if the pixels are an input of
    the model."""

    mode: ImageMode
    size: tuple[int, int] | None = None
    is_upright: bool = False
    max_pixels: int = MAX_PIXELS
    is_input: bool = False

    def decode_pixels(self, data: bytes, name: str) -> Array:
        """Decode an image in any format of Pillow: uint8 [height, width] or [height, width, 3].

        Raises ``FormatError`` with ``name`` if the bytes are not an image, are truncated, or unpack to too many pixels.
        """
        with _open_image(BytesIO(data), name) as image:
            self._check_pixels(image, name)
            upright = ImageOps.exif_transpose(image) if self.is_upright else image
            converted = upright.convert(self.mode)
            if self.size is not None and converted.size != self.size:
                converted = converted.resize(self.size, Image.Resampling.BILINEAR)
            return np.array(converted, dtype=np.uint8)

    def count_pixels(self, data: bytes) -> int:
        """Pixels that :meth:`decode_pixels` decodes, by the header of the file; 0 for a file refused by its header."""
        try:
            with Image.open(BytesIO(data)) as image:
                most = self._max_jpeg if image.format == "JPEG" else self.max_pixels
                return prod(image.size) if prod(image.size) <= most else 0
        except Exception:
            return 0

    @property
    def _max_jpeg(self) -> int:
        return max(MAX_FILE_PIXELS, self.max_pixels)

    def _check_pixels(self, image: Image.Image, name: str) -> None:
        size, most = image.size, self.max_pixels
        if image.format == "JPEG" and most < prod(size) <= self._max_jpeg:
            scale = next((each for each in JPEG_SCALES if each >= sqrt(prod(size) / most)), JPEG_SCALES[-1])
            image.draft(None, (ceil(size[0] / scale), ceil(size[1] / scale)))
        if prod(image.size) > most:
            raise FormatError(f"{name} has {size[0]}x{size[1]} pixels, more than {most} in all")


def choose_max_pixels(model_pixels: int) -> int:
    """The default limit for a model that takes images of ``model_pixels``."""
    return max(MAX_PIXELS, 64 * model_pixels)


@contextmanager
def _open_image(file: IO[bytes], name: str) -> Iterator[Image.Image]:
    try:
        with Image.open(file) as image:
            yield image
    except FormatError:
        raise
    except UnidentifiedImageError as error:
        raise FormatError(f"{name} is not an image file that can be read") from error
    except Image.DecompressionBombError as error:
        raise FormatError(f"{name} unpacks to too many pixels") from error
    except Exception as error:
        # The decoders of Pillow raise whatever they stumble over: OSError, SyntaxError, struct.error, IndexError, ...
        raise FormatError(f"{name} is a damaged image file ({error})") from error
