"""The picture of a comparison: a line for each case, a column of bars for each figure. Drawn with Pillow."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import cache
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from .compare_table import COLUMNS, Column
from .comparison import Row

INK, GREY, LIGHT, PAPER, RED = "#1b1f24", "#6b7280", "#e5e7eb", "#ffffff", "#b91c1c"
COLOURS = {"fsdp2": "#0b6e4f", "deepspeed": "#2563eb"}
TEXT, SMALL = 15, 12
TOP, LINE, BAR = 96, 44, 14
COLUMN, GAP, MARGIN = 170, 26, 24


def picture_of(rows: Sequence[Row], title: str) -> bytes:
    """A PNG. Bars of one column have one scale, which begins at zero."""
    left = MARGIN + int(max(_font(TEXT).getlength(row.case) for row in rows)) + GAP
    columns = [column for column in COLUMNS if column.is_drawn(rows)]
    size = (left + (COLUMN + GAP) * len(columns) + MARGIN, TOP + LINE * len(rows) + MARGIN)
    image = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, 14), title, INK, _font(TEXT + 3))
    _legend(draw, MARGIN, 46)
    for at, row in enumerate(rows):
        _name(draw, row, TOP + LINE * at, left, size[0])
    for number, column in enumerate(columns):
        _column(draw, column, rows, left + (COLUMN + GAP) * number)
    return _png(image)


def _legend(draw: ImageDraw.ImageDraw, x: float, y: int) -> None:
    for framework, colour in COLOURS.items():
        draw.rectangle((x, y, x + 12, y + 12), colour)
        draw.text((x + 18, y + 6), framework, GREY, _font(SMALL), anchor="lm")
        x += 18 + _font(SMALL).getlength(framework) + GAP


def _name(draw: ImageDraw.ImageDraw, row: Row, y: int, left: int, right: int) -> None:
    middle = y + LINE / 2
    draw.line((MARGIN, y, right - MARGIN, y), LIGHT)
    draw.text((MARGIN, middle), row.case, INK, _font(TEXT), anchor="lm")
    if row.figures is None:
        said = _fitting(f"failed: {row.error}", right - left - MARGIN)
        draw.text((left, middle), said, RED, _font(SMALL), anchor="lm")


def _column(draw: ImageDraw.ImageDraw, column: Column, rows: Sequence[Row], x: int) -> None:
    draw.text((x, TOP - 16), column.title, INK, _font(SMALL + 1), anchor="lm")
    values = [None if row.figures is None else column.value(row.figures) for row in rows]
    most = max((value for value in values if value), default=1.0)
    for at, (row, value) in enumerate(zip(rows, values, strict=True)):
        if value is None:
            continue
        y = TOP + LINE * at
        draw.rectangle((x, y + 22, x + max(1, COLUMN * value / most), y + 22 + BAR), COLOURS[row.framework])
        draw.text((x, y + 13), column.text(value), GREY, _font(SMALL), anchor="lm")


def _fitting(text: str, width: int) -> str:
    font = _font(SMALL)
    if font.getlength(text) <= width:
        return text
    fits = bisect(range(len(text)), width, key=lambda count: int(font.getlength(f"{text[:count]}…")))
    return f"{text[: fits - 1]}…"


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "png")
    return file.getvalue()
