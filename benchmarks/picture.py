"""The picture: every contestant's time over that of `cp -r`, on a scale of powers, faster to the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import Result
from benchmarks.works import COPY, OURS

OURS_COLOUR, SYNCED_COLOUR, PEER_COLOUR, COPY_COLOUR = "#0b6e4f", "#7fb69f", "#b0b0b0", "#c1440e"


@dataclass(frozen=True, slots=True)
class Bar:
    """The ratio of a contestant to `cp -r`; None if it failed."""

    label: str
    ratio: float | None
    colour: str
    is_failing: bool = False


def bars_of(result: Result) -> list[Bar]:
    """Ours, ours with fsync (over `cp -r` with fsync), then the others; failures with their reason."""
    bars = [
        Bar("ckpt-tools", result.ratio(OURS, COPY), OURS_COLOUR),
        Bar("ckpt-tools, both with fsync", result.ratio(OURS, COPY, synced=True), SYNCED_COLOUR),
    ]
    for rival in result.work.contestants[2:]:
        colour = SYNCED_COLOUR if rival.startswith(OURS) else PEER_COLOUR
        is_failing = rival in result.failures
        bars.append(Bar(f"{rival}: fails" if is_failing else rival, result.ratio(rival, COPY), colour, is_failing))
    return [bar for bar in bars if bar.ratio or bar.is_failing]


def draw(found: Sequence[Result], path: Path) -> None:
    """Horizontal bars, in a group for each work."""
    groups = [bars_of(result) for result in found]
    num_lines = sum(len(bars) + 1 for bars in groups) + 1
    with mpl.rc_context({"font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 0.9 + 0.24 * num_lines), layout="constrained")
        axes = figure.subplots()
        ratios = [bar.ratio for bars in groups for bar in bars if bar.ratio]
        axes.set_xscale("log")
        axes.set_xlim(min([0.5, *ratios]) / 1.3, max([2.0, *ratios]) * 2.2)
        y = 0
        for result, bars in zip(found, groups, strict=True):
            _draw_group(axes, result, bars, y)
            y += len(bars) + 1
        axes.axvline(1, color=COPY_COLOUR, linewidth=1.2, zorder=3)
        axes.annotate("cp -r of the result", (1, -0.9), color=COPY_COLOUR, **_LABEL)
        axes.set_ylim(y - 0.3, -1.6)
        _label(axes)
        figure.savefig(path, dpi=130)


_LABEL: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
_OVER_THE_LINE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def _draw_group(axes: Axes, result: Result, bars: Sequence[Bar], y: int) -> None:
    size = result.about["copied_bytes"] / 1e9
    axes.annotate(
        f"{result.work.about} ({size:.2g} GB)",
        (0, y),
        xycoords=("axes fraction", "data"),
        **_LABEL,
        fontweight="bold",
        zorder=4,
        bbox=_OVER_THE_LINE,
    )
    left = axes.get_xlim()[0]
    for line, bar in enumerate(bars, y + 1):
        if bar.ratio is None:
            axes.annotate(bar.label, (left, line), **_LABEL, color="#a00000")
            continue
        axes.barh(line, bar.ratio - left, left=left, height=0.78, color=bar.colour)
        text = f"{bar.ratio:.{0 if bar.ratio >= 10 else 2}f}×  {bar.label}"
        axes.annotate(text, (bar.ratio, line), **_LABEL, bbox=_OVER_THE_LINE, zorder=4)


def _label(axes: Axes) -> None:
    axes.set_yticks([])
    axes.set_xlabel("time over that of cp -r of the bytes written (log scale; left is faster), warm cache, medians")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
