"""The two pictures of a report, drawn with Pillow, which decodes the images as well."""

from __future__ import annotations

from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from .totals import NUM_BINS, Tally

INK, GREY, LIGHT, BLUE, PAPER = "#1b1f24", "#6b7280", "#e5e7eb", "#2563eb", "#ffffff"
TEXT, SMALL = 15, 12

MAX_NUMBERED, MAX_NAMED, NAME_CHARS = 24, 60, 14
"""Classes up to which each cell has its number, and each row and column its name; and the length of a name."""

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def confusion_picture(tally: Tally, names: dict[int, str]) -> bytes:
    """Rows are true classes, columns the predicted ones. A cell is as dark as its share of the row."""
    classes, count = list(names), max(1, len(names))
    cell = 44 if count <= MAX_NUMBERED else max(4, 900 // count)
    left, top = (150, 130) if count <= MAX_NAMED else (60, 90)
    image = Image.new("RGB", (left + cell * count + 40, top + cell * count + 40), PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((left, 14), f"{tally.num_correct:,} of {tally.num_known:,} correct", INK, _font(TEXT + 3))
    draw.text((left, 40), "row: true class, column: predicted class", GREY, _font(SMALL))
    totals = {each: sum(n for (truth, _), n in tally.confusion.items() if truth == each) for each in classes}
    for row, truth in enumerate(classes):
        for column, label in enumerate(classes):
            found = tally.confusion.get((truth, label), 0)
            corner = (left + column * cell, top + row * cell)
            _cell(draw, corner, cell, found, found / max(1, totals[truth]), is_numbered=count <= MAX_NUMBERED)
    if count <= MAX_NAMED:
        _names(image, draw, list(names.values()), left, top, cell)
    return _png(image)


def _cell(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], size: int, found: int, share: float, *, is_numbered: bool
) -> None:
    x, y = corner
    # The square root shows rare confusions, which are what one looks for.
    draw.rectangle((x, y, x + size - 1, y + size - 1), _shade(share**0.5), LIGHT if is_numbered else None)
    if is_numbered and found:
        colour = PAPER if share**0.5 > 0.6 else INK
        draw.text((x + size / 2, y + size / 2), f"{found}", colour, _font(SMALL), anchor="mm")


def _names(image: Image.Image, draw: ImageDraw.ImageDraw, names: list[str], left: int, top: int, cell: int) -> None:
    font = _font(min(SMALL, max(8, cell - 2)))
    for number, name in enumerate(names):
        text = name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"
        middle = number * cell + cell // 2
        draw.text((left - 8, top + middle), text, INK, font, anchor="rm")
        upright = _upright(text, font)
        image.paste(upright, (left + middle - upright.width // 2, top - 8 - upright.height))


def _upright(text: str, font: Font) -> Image.Image:
    """Written from below upwards; a short one stays as it is."""
    box = font.getbbox(text)
    line = Image.new("RGB", (max(1, int(box[2]) + 2), max(1, int(box[3]) + 2)), PAPER)
    ImageDraw.Draw(line).text((0, 0), text, INK, font)
    return line if len(text) <= 3 else line.rotate(90, expand=True)


def calibration_picture(tally: Tally) -> bytes:
    """Bars: how often predictions of some confidence are right. Below them, how many there are."""
    left, top, side, lower = 70, 80, 480, 90
    image = Image.new("RGB", (left + side + 40, top + side + lower + 110), PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((left, 14), f"expected calibration error {tally.calibration_error:.4f}", INK, _font(TEXT + 3))
    draw.text((left, 40), "bars: share of correct predictions; line: as confident as correct", GREY, _font(SMALL))
    for tick in range(0, 11, 2):
        x, y = left + side * tick / 10, top + side * (1 - tick / 10)
        draw.line((left, y, left + side, y), LIGHT)
        draw.text((left - 8, y), f"{tick / 10:.1f}", GREY, _font(SMALL), anchor="rm")
        draw.text((x, top + side + lower + 28), f"{tick / 10:.1f}", GREY, _font(SMALL), anchor="mt")
    most = max(1, *(found.num for found in tally.bins))
    for number, found in enumerate(tally.bins):
        x0, x1 = (left + side * (number + part) / NUM_BINS for part in (0.08, 0.92))
        if found.num:
            y = top + side * (1 - found.num_correct / found.num)
            draw.rectangle((x0, y, x1, top + side), BLUE)
            base = top + side + 20 + lower
            draw.rectangle((x0, base - lower * found.num / most, x1, base), GREY)
    draw.line((left, top + side, left + side, top), INK, 2)
    draw.line((left, top, left, top + side, left + side, top + side), INK)
    draw.text((left - 8, top + side + 20 + lower / 2), "count", GREY, _font(SMALL), anchor="rm")
    draw.text((left, top + side + lower + 54), f"largest count: {most:,}", GREY, _font(SMALL), anchor="lt")
    draw.text((left + side / 2, top + side + lower + 52), "confidence", INK, _font(TEXT), anchor="mt")
    return _png(image)


def _shade(share: float) -> tuple[int, int, int]:
    """From paper to blue."""
    ends = ((255, 255, 255), (29, 78, 216))
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(*ends, strict=True))
    return red, green, blue


def _font(size: int) -> Font:
    return ImageFont.load_default(size)


def _png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "png")
    return file.getvalue()
