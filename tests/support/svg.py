"""Pictures as SVG text: boxes, lines and words of one width, readable in 360 pixels, light and dark.

The same calls give the same bytes. A picture has a ground of its own, because a page's theme can differ from the
browser's.
"""

from collections.abc import Sequence
from html import escape

WIDTH, FONT, LINE, MARGIN = 420, 14, 20, 10
"""Pixels. A phone of 400 shows the width in 360 or more, and so words in 12."""

COLOURS = ("#7cc4f0", "#f5b95f", "#7fd6a2", "#dba7e6", "#f2938c", "#d9d26a", "#8fd8d2", "#c9b28f")
"""Colours on which black words are readable."""

_CHARACTER = 7.8
"""Pixels of a character, on the wide side."""

_STYLE = f"""text {{ font: {FONT}px system-ui, sans-serif; fill: #1b1f24 }}
.strong {{ font-weight: 600 }} .on {{ fill: #111 }} .ground {{ fill: #fff }} .edge {{ stroke: #fff }}
.line {{ stroke: #59636e; fill: none }} .empty {{ fill: none; stroke: #808a94; stroke-dasharray: 3 3 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e8eaed }} .on {{ fill: #111 }} .ground {{ fill: #1b1f24 }} .edge {{ stroke: #1b1f24 }}
.line {{ stroke: #a8b0b8 }}
}}"""


class Picture:
    """Draws from the top to the bottom; ``y`` is where the next part begins."""

    def __init__(self, about: str) -> None:
        self.y: float = MARGIN
        self._about, self._parts = about, list[str]()

    def words(self, text: str, x: float = MARGIN, *, strong: bool = False) -> None:
        """A line of text at ``y``, which moves on."""
        self.text(text, x, self.y + LINE / 2, "strong" if strong else "")
        self.y += LINE

    def text(self, text: str, x: float, middle: float, kind: str = "", anchor: str = "start") -> None:
        """Text on the line with this middle. ``anchor`` says what is at ``x``: ``start``, ``middle`` or ``end``."""
        at = f'x="{x:g}" y="{middle + 0.36 * FONT:g}"'
        self._parts.append(f'<text {at} class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, colour: str = "", labels: Sequence[str] = ()
    ) -> None:
        """A rectangle, dashed without a colour, with the first of the labels that fits into it."""
        look = f'fill="{colour}" class="edge"' if colour else 'class="empty"'
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {look}/>')
        for label in labels:
            if len(label) * _CHARACTER + 2 <= width and height >= FONT:
                self.text(label, x + width / 2, y + height / 2, "on" if colour else "", "middle")
                break

    def shape(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A polygon, half transparent."""
        joined = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polygon points="{joined}" fill="{colour}" fill-opacity="0.5" class="edge"/>')

    def line(self, *points: tuple[float, float]) -> None:
        joined = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{joined}" class="line"/>')

    def __str__(self) -> str:
        height = self.y + MARGIN
        size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(self._about)}</title>'
        ground = f'<rect width="{WIDTH}" height="{height:g}" rx="6" class="ground"/>'
        return "\n".join([head, f"<style>\n{_STYLE}\n</style>", ground, *self._parts, "</svg>", ""])
