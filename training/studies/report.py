"""Report of a comparison: a table for a terminal and in Markdown, a chart, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ..config.options import SETTINGS
from .comparison import Case, Figures, Row, sentence_on_losses

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"fsdp2": "#0b6e4f", "deepspeed": "#2563eb"}


@dataclass(frozen=True, slots=True)
class Column:
    """A figure and its text."""

    title: str
    value: Callable[[Figures], float]
    text: Callable[[float], str]

    def is_drawn(self, rows: Sequence[Row]) -> bool:
        return any(row.figures is not None and self.value(row.figures) for row in rows)


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


COLUMNS = (
    Column("samples/s", lambda figures: figures.samples_per_second, lambda value: f"{value:,.1f}"),
    Column("memory", lambda figures: figures.peak_rss, _size),
    Column("GPU memory", lambda figures: figures.cuda_peak, _size),
    Column("checkpoint", lambda figures: figures.checkpoint_bytes, _size),
    Column("save", lambda figures: figures.save_seconds, _seconds),
    Column("stall", lambda figures: figures.stall_seconds, _seconds),
    Column("resume", lambda figures: figures.resume_seconds, _seconds),
)

LOSS = "final loss"


def title_of(cases: Sequence[Case]) -> str:
    """Model, data and size of all runs."""
    config = cases[0].config
    size = f"batch {config.batch_size}, {config.num_workers} workers, {config.precision}"
    return f"{config.model} on {config.dataset}, {size}"


def markdown(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    titles = ["case", *(column.title for column in columns), LOSS]
    lines = [f"# {title}", "", _line(titles), "|---" + "|--:" * (len(titles) - 1) + "|"]
    return "\n".join([*lines, *(_line(cells) for cells in _cells(rows, columns)), "", *remarks(rows), ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(rows: Sequence[Row], columns: Sequence[Column]) -> Iterator[list[str]]:
    for row in rows:
        figures = row.figures
        if figures is None:
            yield [row.case, *["failed"] * (len(columns) + 1)]
        else:
            yield [row.case, *(column.text(column.value(figures)) for column in columns), f"{figures.final_loss:.6f}"]


def remarks(rows: Sequence[Row]) -> list[str]:
    """Errors of failed cases, and whether the final losses agree."""
    return [*(f"- {row.case}: {row.error}" for row in rows if row.figures is None), sentence_on_losses(rows)]


def as_json(cases: Sequence[Case], rows: Sequence[Row]) -> dict[str, Any]:
    """Figures in bytes and seconds, as measured."""
    config = cases[0].config
    work = {name: getattr(config, name) for name in SETTINGS} | {"num_workers": config.num_workers}
    return {"work": work, "cases": [asdict(row) for row in rows], "losses": sentence_on_losses(rows)}


def shown(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("case", overflow="fold")
    for name in [*(column.title for column in columns), LOSS]:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in _cells(rows, columns):
        table.add_row(*cells)
    return table


def picture_of(rows: Sequence[Row], title: str) -> bytes:
    """Chart as PNG: bars for each figure, with scales that begin at zero."""
    from matplotlib.figure import Figure

    columns = [column for column in COLUMNS if column.is_drawn(rows)]
    names = [row.case if row.figures is not None else f"{row.case} (failed)" for row in rows]
    figure = Figure(figsize=(3.5 + 2 * len(columns), 1.2 + 0.4 * len(rows)), layout="constrained")
    figure.suptitle(f"{title} (green: FSDP2, blue: DeepSpeed)")
    every_axes = figure.subplots(1, max(1, len(columns)), sharey=True, squeeze=False)[0]
    for axes in every_axes:
        axes.set_xticks([])
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    for axes, column in zip(every_axes, columns, strict=False):
        axes.set_title(column.title)
        axes.margins(x=0.6)
        for at, row in enumerate(rows):
            if row.figures is not None:
                value = column.value(row.figures)
                axes.bar_label(axes.barh(at, value, color=COLOURS[row.framework]), [column.text(value)], padding=3)
    file = BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
