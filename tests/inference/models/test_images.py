"""Image files become pixels: the sizes that are refused, JPEG files that are scaled as they are read, EXIF."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from ckpt_tools.errors import FormatError
from inference.models.images import ImageReading
from tests.support.refusals import refusal_test

pytestmark = pytest.mark.quick


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gradient(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.linear_gradient("L").resize((width, height)).convert(mode)


@pytest.mark.parametrize(("mode", "size"), [("L", None), ("RGB", None), ("L", (28, 14))])
def test_pixels_are_those_of_pillow(mode, size):
    """In the size that is asked for."""
    found = ImageReading(mode, size).decode_pixels(encoded(gradient(90, 60), "png"), "x")
    image = gradient(90, 60).convert(mode)
    expected = np.array(image.resize(size, Image.Resampling.BILINEAR) if size else image)
    assert found.dtype == np.uint8 and np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["png", "webp", "gif"])
def test_too_many_pixels_are_refused_before_they_are_decoded(kind):
    data = encoded(gradient(11, 10), kind)
    assert ImageReading("RGB", max_pixels=110).decode_pixels(data, "x").shape == (10, 11, 3)
    with pytest.raises(FormatError, match=r"^x has 11x10 pixels, more than 109 in all$"):
        ImageReading("RGB", max_pixels=109).decode_pixels(data, "x")


@pytest.mark.parametrize(("limit", "scale"), [(320 * 160, 1), (51_199, 2), (12_800, 2), (12_799, 4), (800, 8)])
def test_a_jpeg_file_is_decoded_at_the_largest_scale_that_fits(limit, scale):
    data = encoded(gradient(320, 160), "jpeg")
    found = ImageReading("RGB", max_pixels=limit).decode_pixels(data, "x")
    assert found.shape == (160 // scale, 320 // scale, 3)
    with Image.open(BytesIO(data)) as whole:
        expected = np.asarray(whole.convert("RGB").reduce(scale) if scale > 1 else whole.convert("RGB"), np.int64)
    assert np.abs(found - expected).max() <= 3


def test_an_image_is_turned_as_its_exif_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF's Orientation: turned by 90 degrees
    data = encoded(gradient(9, 6), "jpeg", exif=exif)
    assert ImageReading("RGB", is_upright=True).decode_pixels(data, "x").shape == (9, 6, 3)
    assert ImageReading("RGB").decode_pixels(data, "x").shape == (6, 9, 3)


UNREADABLE = r"^x is (not an image file that can be read|a damaged image file)"
test_what_cannot_be_read_is_refused_in_one_sentence = refusal_test(
    *(
        (name, lambda _, data=data: ImageReading("RGB", max_pixels=799).decode_pixels(data, "x"), FormatError, words)
        for name, data, words in (
            ("nothing", b"", UNREADABLE),
            ("text", b"text", UNREADABLE),
            ("cut off", encoded(gradient(20, 20), "png")[:60], UNREADABLE),
            ("too large", encoded(gradient(80, 10), "png"), "^x has 80x10 pixels, more than 799 in all$"),
            ("too large at an eighth", encoded(gradient(320, 160), "jpeg"), "^x has 320x160 pixels, more than 799 in"),
        )
    )
)
