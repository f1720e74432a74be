"""Figures of finished cases, from ``metrics.jsonl`` and ``result.json``, and the report that compares them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import harmonic_mean, median

import click

from ckpt_tools.errors import FormatError

from ..config.options import SETTINGS
from ..config.train_config import TrainConfig

NAME = "comparison"
WARM_UP = 3  # measured steps at the beginning that are left out; with fewer than six, the first half
SAME_LOSS = 1e-5  # largest relative difference of two losses in fp32 that count as equal
COLOURS = {"fsdp2": "#0b6e4f", "deepspeed": "#2563eb"}

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A case with its figures, or its error."""

    case: str
    framework: str
    figures: Figures | None
    error: str = ""


def figures_of(run: Path) -> Figures:
    """Figures of a run that was resumed at its end. ``peak_rss`` and ``cuda_peak`` (0 without CUDA) are the highest of
    any rank, in bytes. Raises ``FormatError`` if no step was measured."""
    from ..loop.outlets import recorded  # these import torch, which takes seconds
    from ..loop.result import RESULT_NAME, RunResult

    result, lines = RunResult.read(run / RESULT_NAME), list(recorded(run))
    steps = [line for line in lines if "peak_rss" in line]
    if not steps:
        raise FormatError(f"{run} has no measured step; give a --log-every that is not above the number of steps")
    warm = steps[min(WARM_UP, len(steps) // 2) :]
    return {
        "samples_per_second": harmonic_mean([step["samples_per_second"] for step in warm]),
        "peak_rss": max(steps[-1]["peak_rss"]),
        "cuda_peak": max(steps[-1].get("cuda_peak", [0])),
        "checkpoint_bytes": sum(path.stat().st_size for path in Path(result.checkpoint).rglob("*") if path.is_file()),
        "save_seconds": median(save.seconds for save in result.saves),
        "stall_seconds": median(save.stall_seconds for save in result.saves),
        "resume_seconds": next(line["resume_seconds"] for line in reversed(lines) if "resume_seconds" in line),
        "final_loss": result.history[-1].losses[-1],
    }


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:,.2f} s"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "samples_per_second": ("samples/s", lambda value: f"{value:,.1f}"),
    "peak_rss": ("memory", _size),
    "cuda_peak": ("GPU memory", _size),
    "checkpoint_bytes": ("checkpoint", _size),
    "save_seconds": ("save", _seconds),
    "stall_seconds": ("stall", _seconds),
    "resume_seconds": ("resume", _seconds),
    "final_loss": ("final loss", lambda value: f"{value:.6f}"),
}
"""Title and text of each figure."""


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Names of the figures that any case has: without a GPU there is no column for its memory."""
    return [name for name in COLUMNS if any(row.figures and row.figures[name] for row in rows)]


def table_of(rows: Sequence[Row]) -> str:
    """Table in Markdown, with aligned cells for terminals."""
    columns = columns_of(rows)
    cells = [["case", *(COLUMNS[name][0] for name in columns)]]
    for row in rows:
        values = row.figures and [COLUMNS[name][1](row.figures[name]) for name in columns]
        cells.append([row.case, *(values or ["failed"] * len(columns))])
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    rule = f"|{'-' * (first + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in others)
    head, *body = (f"| {' | '.join([name.ljust(first), *map(str.rjust, values, others)])} |" for name, *values in cells)
    return "\n".join([head, rule, *body])


def sentence_on_losses(rows: Sequence[Row]) -> str:
    """A sentence that tells whether the final losses agree."""
    found = {row.case: row.figures["final_loss"] for row in rows if row.figures}
    if len(found) < 2:
        return "There are no two final losses to compare."
    first, *others = found
    differing = {case: abs(found[case] - found[first]) / abs(found[first]) for case in others}
    worst = max(differing, key=lambda case: differing[case])
    if differing[worst] <= SAME_LOSS:
        return (
            f"All final losses are equal to a relative {SAME_LOSS:g}; the largest difference is {differing[worst]:.1e}."
        )
    return f"Final losses differ by up to a relative {differing[worst]:.1e}: {worst} against {first}."


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """Bars for each figure of the finished cases, with scales that begin at zero."""
    from matplotlib.figure import Figure

    done = [(row.case, row.figures, COLOURS[row.framework]) for row in rows if row.figures]
    names, every_figures, colours = zip(*done, strict=True)
    columns = columns_of(rows)
    figure = Figure(figsize=(3.5 + 2 * len(columns), 1.2 + 0.4 * len(done)), layout="constrained")
    figure.suptitle(f"{title} (green: FSDP2, blue: DeepSpeed)")
    for axes, column in zip(figure.subplots(1, len(columns), sharey=True), columns, strict=True):
        title, text = COLUMNS[column]
        values = [figures[column] for figures in every_figures]
        axes.bar_label(axes.barh(names, values, color=colours), [text(value) for value in values], padding=3)
        axes.set(title=title, xticks=[], ylim=(len(done) - 0.5, -0.5))
        axes.margins(x=0.6)
    figure.savefig(file, dpi=150)


def report(out: Path, config: TrainConfig, rows: Sequence[Row]) -> None:
    """Write the report, and print its table."""
    work = {name: getattr(config, name) for name in (*SETTINGS, "num_workers")}
    losses = sentence_on_losses(rows)
    found = {"work": work, "cases": [asdict(row) for row in rows], "losses": losses}
    title = f"{config.model} on {config.dataset}, batch {config.batch_size}, {config.num_workers} workers"
    title = f"{title}, {config.precision}"
    errors = [f"- {row.case}: {row.error}\n" for row in rows if row.figures is None]
    text = "\n".join([f"# {title}", "", table_of(rows), "", *errors, losses])
    (out / f"{NAME}.md").write_text(f"{text}\n")
    (out / f"{NAME}.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / f"{NAME}.png").unlink(missing_ok=True)
    if any(row.figures for row in rows):
        draw(rows, title, out / f"{NAME}.png")
    click.echo("\n".join([text, *map(str, sorted(out.glob(f"{NAME}.*")))]))
