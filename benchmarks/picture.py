"""The picture of README's table: seconds of ours and of the best other tool, on a linear axis from zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.figures import Result
from benchmarks.works import OURS
from tests.support.svg import COLOURS, LINE, MARGIN, WIDTH, Picture

OURS_COLOUR, PEER_COLOUR = COLOURS[2], COLOURS[1]
BAR = 10
"""Height of a bar in pixels."""


def draw(found: Sequence[Result]) -> str:
    """An SVG with two bars for each work."""
    bars = [list(_bars(result)) for result in found]
    longest = max(seconds for each in bars for _, seconds, _ in each)
    scale = (WIDTH - 3 * MARGIN) / longest
    picture = Picture("Seconds of conversions with ckpt-tools and with the fastest other tool")
    for result, each in zip(found, bars, strict=True):
        picture.words(result.work.about, strong=True)
        for label, seconds, colour in each:
            picture.words(label)
            picture.box(MARGIN, picture.y, seconds * scale, BAR, colour)
            picture.y += BAR + 2
        picture.y += LINE / 2
    picture.line((MARGIN, picture.y), (WIDTH - MARGIN, picture.y))
    # At most five ticks.
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if longest < 5 * step)
    for tick in range(0, int(longest) + 1, step):
        x = MARGIN + tick * scale
        picture.line((x, picture.y), (x, picture.y + 5))
        picture.text(f"{tick} s" if tick else "0", x, picture.y + LINE, anchor="middle")
    picture.y += 1.5 * LINE
    return str(picture)


def _bars(result: Result) -> Iterator[tuple[str, float, str]]:
    """Label, seconds and colour of ours and of the peer."""
    ours, theirs = result.row(OURS), result.peer
    if ours:
        yield f"{OURS}: {ours.seconds:.1f} s", ours.seconds, OURS_COLOUR
    if theirs:
        yield f"{result.work.peer}: {theirs.seconds:.1f} s", theirs.seconds, PEER_COLOUR
    else:
        yield f"{result.work.peer}: fails" if result.work.peer else "no other tool does this", 0, PEER_COLOUR
