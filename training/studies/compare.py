"""``python -m training.studies.compare``: compares strategies on the same training run.

Each case is a ``python -m training --launcher torchrun`` in a folder of its own, started a second time at its end to
measure how long it takes to resume. Finished cases are not run again. The figures are from ``metrics.jsonl`` and
``result.json``.
"""

from __future__ import annotations

from ckpt_tools.process.signals import use_default_interrupt

with use_default_interrupt():
    import json
    import re
    import shlex
    import shutil
    import subprocess
    import sys
    from collections.abc import Callable, Iterable, Sequence
    from dataclasses import asdict, dataclass, replace
    from pathlib import Path
    from statistics import harmonic_mean, median
    from typing import Any

    import click

    from ckpt_tools.errors import CkptError, DestinationExistsError, FormatError, UsageError
    from ckpt_tools.process.credentials import mask_secrets
    from ckpt_tools.process.guard import guard_processes

    from ..config import PACKAGE
    from ..config.command_line import CONTEXT_BEFORE_OPTIONS, Command, check_modules, config_of, parse_options
    from ..config.options import RESUME_AUTO, SETTINGS, option_name
    from ..config.train_config import TrainConfig
    from ..loop.stopping import end_on_signals

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

WORK = (*SETTINGS, "num_workers", "until", "data_root", "init_from")  # fields that all cases must share
OURS = ("resume", "override", "storage", "export", "max_steps")  # fields that are of no use in a comparison
REPORT_NAME = "comparison"
WARM_UP = 3  # measured steps at the beginning that are left out; with fewer than six, the first half
SAME_LOSS = 1e-5  # largest relative difference of two losses in fp32 that count as equal
COLOURS = {"fsdp2": "#0b6e4f", "deepspeed": "#2563eb"}
CASE_NAME = "case.json"  # file in the folder of a case: options of its run, and its figures once it is finished


@click.command(cls=Command, context_settings=CONTEXT_BEFORE_OPTIONS)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the runs and the report.")
@click.option(
    "--case",
    "texts",
    multiple=True,
    metavar='"STRATEGY [OPTIONS]"',
    default=DEFAULT_CASES,
    show_default=f"{len(DEFAULT_CASES)} cases of FSDP2 and DeepSpeed",
    help='Strategy with its options, such as "full_shard --cpu-offload"; repeatable.',
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(out: Path, texts: tuple[str, ...], options: tuple[str, ...]) -> None:
    """Train with several strategies and compare speed, memory and losses. OPTIONS, after --, apply to all runs."""
    from ..checkpoints.locking import lock_folder

    out = out.absolute()
    cases = parse_cases(texts, options, out)
    check_modules(["matplotlib"])
    with lock_folder(out):
        for case in cases:
            check_folder(case)
        with end_on_signals(lambda: "finished cases are kept; the same command runs the others"):
            with guard_processes() as marking, marking():
                rows = [run_case(case) for case in cases]
        write_report(out, cases[0].config, rows)
    sys.exit(1 if any(row.figures is None for row in rows) else 0)


main.epilog = f"Default of OPTIONS: {' '.join(DEFAULTS[1:])}. Default cases: {'; '.join(DEFAULT_CASES)}."


Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A case with its figures, or its error."""

    case: str
    framework: str
    figures: Figures | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy with its options, and the run that they and the common options describe."""

    name: str
    config: TrainConfig

    @property
    def args(self) -> list[str]:
        """Options of its run, without its folder and without credentials: they are written to a file."""
        return [mask_secrets(each) for each in replace(self.config, out=Path("run")).to_args()]

    def record(self, figures: Figures | None = None) -> None:
        """Replaces ``CASE_NAME`` atomically."""
        unfinished = self.config.out / f".{CASE_NAME}.partial"
        unfinished.write_text(json.dumps({"args": self.args, "figures": figures}, indent=1) + "\n")
        unfinished.replace(self.config.out / CASE_NAME)

    def read_record(self) -> dict[str, Any] | None:
        """Content of the file of :meth:`record`; None if the folder has no such file."""
        try:
            record = json.loads((self.config.out / CASE_NAME).read_text())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.keys() >= {"args", "figures"} else None


def parse_cases(texts: Iterable[str], options: Sequence[str], out: Path) -> list[Case]:
    """Parse all cases. Raises ``UsageError`` if two are the same, or differ in a field of ``WORK``."""
    cases: list[Case] = []
    for case in (_parse_case(text, options, out) for text in texts):
        if case.config.out in {other.config.out for other in cases}:
            raise UsageError(f'--case "{case.name}" is given twice: two cases cannot share {case.config.out}')
        cases.append(case)
        for name in WORK:
            if getattr(case.config, name) != getattr(cases[0].config, name):
                raise UsageError(
                    f'--case "{case.name}": --{option_name(name)} is the same for all cases; give it after -- instead'
                )
    return cases


def _parse_case(text: str, options: Sequence[str], out: Path) -> Case:
    """Raises ``UsageError``, which names the case."""
    words = shlex.split(text)
    if not words or words[0].startswith("-"):
        raise UsageError(f'--case "{text}" does not begin with a strategy, such as full_shard')
    folder = out / re.sub(r"[^\w.=+-]", "_", " ".join(Path(word).name for word in words).replace(" --", "+"))
    try:
        values = parse_options([f"--out={folder}", *DEFAULTS, *options, "--strategy", *words])
        if values["out"] != folder or values["launcher"] != "torchrun" or any(values[name] for name in OURS):
            own = ", ".join(f"--{option_name(name)}" for name in ("out", "launcher", *OURS))
            raise UsageError(f"a comparison sets {own} itself")
        return Case(" ".join(words), config_of(values))
    except click.ClickException as error:
        raise UsageError(f'--case "{text}": {error.format_message()}') from error
    except CkptError as error:
        raise type(error)(f'--case "{text}": {error.message}') from error


def check_folder(case: Case) -> None:
    """Raises ``DestinationExistsError`` if the folder of the case holds anything else, or another case."""
    folder, record = case.config.out, case.read_record()
    if record is None and folder.exists() and any(folder.iterdir()):
        raise DestinationExistsError(f"{folder} holds files that no comparison wrote; choose another --out")
    if record and record["figures"] and (other := sorted(set(record["args"]) ^ set(case.args))):
        raise DestinationExistsError(
            f"{folder} is this case with other options ({', '.join(other)}); choose another --out"
        )


def run_case(case: Case) -> Row:
    """Run the case, unless it is finished."""
    framework, record = case.config.sharding.framework, case.read_record()
    if record and record["figures"]:
        click.echo(f"{case.name}: done before")
        return Row(case.name, framework, record["figures"])
    click.echo(f"{case.name}:")
    try:
        figures = _measure(case)
    except CkptError as error:
        click.echo(f"{case.name} failed: {error}", err=True)
        return Row(case.name, framework, None, str(error))
    case.record(figures)
    return Row(case.name, framework, figures)


def _measure(case: Case) -> Figures:
    """Run the case anew; files of an earlier attempt are removed. Raises ``CkptError``."""
    from ..loop.result import RESULT_NAME, RunResult  # this imports torch, which takes seconds

    out = case.config.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    case.record()
    _run(case.config)
    result = RunResult.read(out / RESULT_NAME)
    _run(replace(case.config, resume=RESUME_AUTO), stdout=subprocess.DEVNULL)
    result.write(out)  # of the run that trained
    return figures_of(out)


def _run(config: TrainConfig, stdout: int | None = None) -> None:
    """Run the command, which shows its own progress. Raises ``CkptError`` with its last line."""
    command = [sys.executable, "-m", PACKAGE, *config.to_args()]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CkptError(lines[-1].removeprefix("Error: "))


def figures_of(run: Path) -> Figures:
    """Figures of a run that was resumed at its end. ``peak_rss`` and ``cuda_peak`` (0 without CUDA) are the highest of
    any rank, in bytes. Raises ``FormatError`` if no step was measured."""
    from ..loop.outlets import read_metrics
    from ..loop.result import RESULT_NAME, RunResult

    result, lines = RunResult.read(run / RESULT_NAME), list(read_metrics(run))
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


def _format_size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def _format_seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:,.2f} s"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "samples_per_second": ("samples/s", lambda value: f"{value:,.1f}"),
    "peak_rss": ("memory", _format_size),
    "cuda_peak": ("GPU memory", _format_size),
    "checkpoint_bytes": ("checkpoint", _format_size),
    "save_seconds": ("save", _format_seconds),
    "stall_seconds": ("stall", _format_seconds),
    "resume_seconds": ("resume", _format_seconds),
    "final_loss": ("final loss", lambda value: f"{value:.6f}"),
}
"""Title and text of each figure."""


def write_report(out: Path, config: TrainConfig, rows: Sequence[Row]) -> None:
    """Write the report, and print its table. Without a GPU there is no column for its memory."""
    columns = [name for name in COLUMNS if any(row.figures and row.figures[name] for row in rows)]
    work = {name: getattr(config, name) for name in (*SETTINGS, "num_workers")}
    losses = sentence_on_losses(rows)
    title = (
        f"{config.model} on {config.dataset}, batch {config.batch_size}, {config.num_workers} workers, "
        f"{config.precision}"
    )
    errors = [f"- {row.case}: {row.error}\n" for row in rows if row.figures is None]
    text = "\n".join([f"# {title}", "", table_of(rows, columns), "", *errors, losses])
    content = {"work": work, "cases": [asdict(row) for row in rows], "losses": losses}
    (out / f"{REPORT_NAME}.md").write_text(f"{text}\n")
    (out / f"{REPORT_NAME}.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / f"{REPORT_NAME}.png").unlink(missing_ok=True)
    if any(row.figures for row in rows):
        draw_bars(rows, columns, title, out / f"{REPORT_NAME}.png")
    click.echo("\n".join([text, *map(str, sorted(out.glob(f"{REPORT_NAME}.*")))]))


def table_of(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Table in Markdown, with aligned cells for terminals."""
    cells = [["case", *(COLUMNS[name][0] for name in columns)], ["-" * 5] * (1 + len(columns))]
    for row in rows:
        values = row.figures and [COLUMNS[name][1](row.figures[name]) for name in columns]
        cells.append([row.case, *(values or ["failed"] * len(columns))])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in cells)


def sentence_on_losses(rows: Sequence[Row]) -> str:
    """A sentence that tells whether the final losses agree."""
    losses = {row.case: row.figures["final_loss"] for row in rows if row.figures}
    if len(losses) < 2:
        return "There are no two final losses to compare."
    first, *others = losses
    differing = {case: abs(losses[case] - losses[first]) / abs(losses[first]) for case in others}
    worst = max(differing, key=lambda case: differing[case])
    if differing[worst] <= SAME_LOSS:
        return (
            f"All final losses are equal to a relative {SAME_LOSS:g}; the largest difference is {differing[worst]:.1e}."
        )
    return f"Final losses differ by up to a relative {differing[worst]:.1e}: {worst} against {first}."


def draw_bars(rows: Sequence[Row], columns: Sequence[str], title: str, file: Path) -> None:
    """Bars for each figure of the finished cases, with scales that begin at zero."""
    from matplotlib.figure import Figure

    done = [(row.case, row.figures, COLOURS[row.framework]) for row in rows if row.figures]
    names, every_figures, colours = zip(*done, strict=True)
    figure = Figure(figsize=(3.5 + 2 * len(columns), 1.2 + 0.4 * len(done)), layout="constrained")
    figure.suptitle(f"{title} (green: FSDP2, blue: DeepSpeed)")
    for axes, column in zip(figure.subplots(1, len(columns), sharey=True), columns, strict=True):
        heading, text = COLUMNS[column]
        values = [figures[column] for figures in every_figures]
        axes.bar_label(axes.barh(names, values, color=colours), [text(value) for value in values], padding=3)
        axes.set(title=heading, xticks=[], ylim=(len(done) - 0.5, -0.5))
        axes.margins(x=0.6)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    with use_default_interrupt():
        main()
