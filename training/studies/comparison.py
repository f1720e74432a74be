"""Cases of a comparison, their figures from ``metrics.jsonl`` and ``result.json``, and the report of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from statistics import harmonic_mean, median
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.credentials import without_secrets
from ckpt_tools.errors import CkptError, FormatError, UsageError

from ..config.command_line import config_of, parsed
from ..config.options import SETTINGS, spelt
from ..config.train_config import TrainConfig
from ..loop.outlets import recorded
from ..loop.result import RESULT_NAME, RunResult

if TYPE_CHECKING:
    from rich.table import Table


DEFAULTS = ("--launcher=torchrun", "--epochs=2", "--log-every=1")  # default options of every run
DEFAULT_CASES = (
    "ddp",
    "shard_grad_op",
    "full_shard",
    "full_shard --forward-prefetch 1 --backward-prefetch 1",
    "full_shard --activation-checkpointing",
    "full_shard --cpu-offload",
    "full_shard --async-save",
    "zero2",
    "zero3",
    "zero3 --activation-checkpointing",
    "zero3_offload",
)

WORK = (
    *SETTINGS,
    "num_workers",
    "until",
    "data_root",
    "init_from",
    "rename",
    "recipe",
    "inverse",
    "log_every",
    "save_every",
    "save_every_steps",
    "save_every_minutes",
)
"""Fields that all cases must share for their figures to be comparable."""

OURS = ("out", "resume", "override", "storage", "export", "max_steps")  # fields that the comparison sets itself
WARM_UP = 3  # measured steps at the beginning that are left out; with fewer than six, the first half
SAME_LOSS = 1e-5  # relative difference up to which two losses in fp32 count as equal
RUN, RESUMED = "run", "resumed"  # folders of a case: its run, and the short run that resumes the last checkpoint
_NOT_IN_A_NAME = re.compile(r"[^\w.=+-]")
_NOWHERE = Path("comparison")


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy with its options, and the run that they and the common options describe."""

    words: tuple[str, ...]
    config: TrainConfig

    @classmethod
    def of(cls, text: str, options: Sequence[str], out: Path) -> Case:
        """Parse ``--case``. Raises ``UsageError``, which names the case."""
        words = shlex.split(text)
        if not words or words[0].startswith("-"):
            raise UsageError(f'--case "{text}" does not begin with a strategy, such as full_shard')
        try:
            found = cls(tuple(words), _parsed([*DEFAULTS, *options, "--strategy", *words]))
        except click.ClickException as error:
            raise UsageError(f'--case "{text}": {error.format_message()}') from error
        except CkptError as error:
            raise type(error)(f'--case "{text}": {error.message}') from error
        return replace(found, config=replace(found.config, out=out / found.folder_name / RUN))

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def folder_name(self) -> str:
        """``full_shard+forward-prefetch=1`` for ``full_shard --forward-prefetch 1``; of paths the name."""
        short = " ".join(Path(word).name for word in self.words)
        return _NOT_IN_A_NAME.sub("_", short.replace(" --", "+").replace(" ", "="))

    @property
    def folder(self) -> Path:
        return self.config.out.parent

    @property
    def args(self) -> list[str]:
        """Options of its run, without its folder and without credentials: they are written to a file."""
        return [without_secrets(each) for each in replace(self.config, out=Path(RUN)).to_args()]

    def resuming(self, checkpoint: str) -> TrainConfig:
        """A run of one step after ``checkpoint``; resuming takes as long as for a full run."""
        config = self.config
        changed = {"epochs": config.last_epoch + 1, "num_samples": config.batch_size}
        override = tuple(spelt(name) for name, value in changed.items() if getattr(config, name) != value)
        weights = {"init_from": None, "rename": (), "recipe": None, "inverse": False}
        first = {"until": None, **weights, "tensorboard": False, "profile": False}
        again = {"out": self.folder / RESUMED, "resume": checkpoint, "override": override}
        return replace(config, **changed, **first, **again)  # type: ignore[arg-type]


def _parsed(words: list[str]) -> TrainConfig:
    """Raises ``UsageError`` for an option that the comparison sets itself."""
    given = parsed([f"--out={_NOWHERE}", *words])
    if given["out"] != _NOWHERE:
        raise UsageError("--out is the comparison's own: each case has a folder in it")
    for name in OURS[1:]:
        if given[name]:
            raise UsageError(f"--{spelt(name)} is not for a comparison, which starts and resumes its runs itself")
    if given["launcher"] != "torchrun":
        raise UsageError("--launcher is torchrun in a comparison")
    return config_of(given)


def cases_of(texts: Iterable[str], options: Sequence[str], out: Path) -> list[Case]:
    """Parse all cases. Raises ``UsageError`` if two are the same, or differ in a field of ``WORK``."""
    cases = [Case.of(text, options, out) for text in texts]
    for at, case in enumerate(cases):
        if case.folder_name in {other.folder_name for other in cases[:at]}:
            raise UsageError(f'--case "{case.name}" is given twice: two cases cannot share {case.folder}')
        for name in WORK:
            if getattr(case.config, name) != getattr(cases[0].config, name):
                raise UsageError(
                    f'--case "{case.name}": --{spelt(name)} is the same for all cases; give it after -- instead'
                )
    return cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a case. ``samples_per_second`` leaves out the warm-up. ``peak_rss`` and ``cuda_peak`` (0 without CUDA)
    are the highest of any rank, in bytes; ``save_seconds`` and ``stall_seconds`` are medians."""

    samples_per_second: float
    peak_rss: int
    cuda_peak: int
    checkpoint_bytes: int
    save_seconds: float
    stall_seconds: float
    resume_seconds: float
    final_loss: float

    @classmethod
    def of(cls, run: Path, resumed: Path) -> Figures:
        """Figures of a finished run and the run that resumed it. Raises ``FormatError`` if no step was measured."""
        result, steps = RunResult.read(run / RESULT_NAME), [line for line in recorded(run) if "peak_rss" in line]
        if not steps:
            raise FormatError(f"{run} has no measured step; give a --log-every that is not above the number of steps")
        warm = steps[min(WARM_UP, len(steps) // 2) :]
        return cls(
            samples_per_second=harmonic_mean([step["samples_per_second"] for step in warm]),
            peak_rss=max(steps[-1]["peak_rss"]),
            cuda_peak=max(steps[-1].get("cuda_peak", [0])),
            checkpoint_bytes=sum(path.stat().st_size for path in Path(result.checkpoint).rglob("*") if path.is_file()),
            save_seconds=median(save.seconds for save in result.saves),
            stall_seconds=median(save.stall_seconds for save in result.saves),
            resume_seconds=next(line["resume_seconds"] for line in recorded(resumed) if "resume_seconds" in line),
            final_loss=result.history[-1].losses[-1],
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A case with its figures, or its error."""

    case: str
    framework: str
    figures: Figures | None
    error: str = ""


def sentence_on_losses(rows: Sequence[Row]) -> str:
    """A sentence that tells whether the final losses agree."""
    found = {row.case: row.figures.final_loss for row in rows if row.figures is not None}
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
