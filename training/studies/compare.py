"""``python -m training.studies.compare``: the same training run by several strategies.

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
    from collections.abc import Sequence
    from dataclasses import dataclass, replace
    from pathlib import Path
    from statistics import harmonic_mean, median

    import click

    from ckpt_tools.errors import CkptError, DestinationExistsError, FormatError, UsageError
    from ckpt_tools.process.credentials import mask_secrets
    from ckpt_tools.process.guard import guard_processes

    from ..config import PACKAGE
    from ..config.command_line import CONTEXT_BEFORE_OPTIONS, CheckedCommand, check_modules, config_of, parse_options
    from ..config.options import RESUME_AUTO
    from ..config.train_config import TrainConfig
    from ..loop.stopping import end_on_signals

DEFAULTS = ("--epochs=2", "--log-every=1")  # default options of every run
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

WARM_UP = 3  # measured steps at the beginning that are left out; with fewer than six, the first half
CASE_NAME = "case.json"  # file in the folder of a case: options of its run, and its figures once it is finished
COLUMNS = {
    "samples_per_second": ("samples/s", 1, 1),
    "peak_rss": ("memory, MB", 1e6, 1),
    "cuda_peak": ("GPU memory, MB", 1e6, 1),
    "checkpoint_bytes": ("checkpoint, MB", 1e6, 1),
    "save_seconds": ("save, s", 1, 3),
    "stall_seconds": ("stall, s", 1, 3),
    "resume_seconds": ("resume, s", 1, 3),
    "final_loss": ("final loss", 1, 6),
}
"""Title of each figure, its unit, and the digits after the point."""


@dataclass(slots=True)
class ComparisonCase:
    """A strategy with its options, the run that they and the common options describe, and its figures or its error."""

    name: str
    config: TrainConfig
    figures: dict[str, float] | None = None
    error: str | None = None

    @property
    def args(self) -> list[str]:
        """Options of its run, without its folder and without credentials: they are written to a file."""
        return [mask_secrets(each) for each in replace(self.config, out=Path("run")).to_args()]

    def write_record(self) -> None:
        (self.config.out / CASE_NAME).write_text(json.dumps({"args": self.args, "figures": self.figures}) + "\n")

    def read_record(self) -> None:
        """Take the figures of an earlier command. Raises ``DestinationExistsError`` if the folder holds anything else
        than this case: a run removes what is in it."""
        folder = self.config.out
        if not folder.exists() or not any(folder.iterdir()):
            return
        try:
            record = json.loads((folder / CASE_NAME).read_text())
            is_same, self.figures = record["args"] == self.args, record["figures"]
        except (OSError, ValueError, TypeError, KeyError):
            is_same = False
        if not is_same:
            raise DestinationExistsError(f"{folder} holds something else than this case; choose another --out")

    def text_of(self, column: str) -> str:
        _, unit, digits = COLUMNS[column]
        return f"{self.figures[column] / unit:,.{digits}f}" if self.figures else "failed"


@click.command(cls=CheckedCommand, context_settings=CONTEXT_BEFORE_OPTIONS)
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

    cases = [_parse_case(text, options, out.absolute()) for text in texts]
    if len({case.config.out for case in cases}) < len(cases):
        raise UsageError("two values of --case name the same folder; leave one of them out")
    check_modules(["matplotlib"])
    with lock_folder(out):
        for case in cases:
            case.read_record()
        with end_on_signals(lambda: "finished cases are kept; the same command runs the others"):
            with guard_processes() as marking, marking():
                for case in cases:
                    _run_case(case)
        write_report(out, cases)
    sys.exit(1 if any(case.error for case in cases) else 0)


main.epilog = f"Default of OPTIONS: {' '.join(DEFAULTS)}. Default cases: {'; '.join(DEFAULT_CASES)}."


def _parse_case(text: str, options: Sequence[str], out: Path) -> ComparisonCase:
    """Raises ``UsageError``, which names the case."""
    words = shlex.split(text)
    folder = out / re.sub(r"[^\w.=+-]", "_", " ".join(Path(word).name for word in words).replace(" --", "+"))
    run = [*DEFAULTS, *options, "--strategy", *words, "--launcher=torchrun", f"--out={folder}"]
    try:
        return ComparisonCase(" ".join(words), config_of(parse_options(run)))
    except click.ClickException as error:
        raise UsageError(f'--case "{text}": {error.format_message()}') from error
    except CkptError as error:
        raise type(error)(f'--case "{text}": {error.message}') from error


def _run_case(case: ComparisonCase) -> None:
    """Run the case, unless it is finished; files of an earlier attempt are removed."""
    if case.figures:
        click.echo(f"{case.name}: done before")
        return
    click.echo(f"{case.name}:")
    shutil.rmtree(case.config.out, ignore_errors=True)
    case.config.out.mkdir(parents=True)
    case.write_record()
    try:
        _run_command(case.config)
        trained = (case.config.out / "result.json").read_bytes()
        _run_command(replace(case.config, resume=RESUME_AUTO), stdout=subprocess.DEVNULL)
        (case.config.out / "result.json").write_bytes(trained)
        case.figures = _read_figures(case.config.out)
    except CkptError as error:
        click.echo(f"{case.name} failed: {error}", err=True)
        case.error = str(error)
    case.write_record()


def _run_command(config: TrainConfig, stdout: int | None = None) -> None:
    """Run the command, which shows its own progress. Raises ``CkptError`` with its last line."""
    command = [sys.executable, "-m", PACKAGE, *config.to_args()]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CkptError(lines[-1].removeprefix("Error: "))


def _read_figures(run: Path) -> dict[str, float]:
    """Figures of a run that was resumed at its end. ``peak_rss`` and ``cuda_peak`` (0 without CUDA) are the highest of
    any rank, in bytes. Raises ``FormatError`` if no step was measured."""
    from ..loop.outlets import read_metrics  # these import torch, which takes seconds
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


def write_report(out: Path, cases: Sequence[ComparisonCase]) -> None:
    """Write the report, and print its table. Without a GPU there is no column for its memory."""
    config = cases[0].config
    columns = [name for name in COLUMNS if any(case.figures and case.figures[name] for case in cases)]
    title = (
        f"{config.model} on {config.dataset}, batch {config.batch_size}, {config.num_workers} workers, "
        f"{config.precision}"
    )
    rows = [{"case": case.name, "figures": case.figures, "error": case.error} for case in cases]
    content = {"work": {**config.settings, "num_workers": config.num_workers}, "cases": rows}
    (out / "comparison.json").write_text(json.dumps(content, indent=1) + "\n")
    errors = [f"- {case.name}: {case.error}" for case in cases if case.error]
    text = "\n".join([f"# {title}", "", _table_of(cases, columns), "", *errors])
    (out / "comparison.md").write_text(f"{text}\n")
    if columns:
        _draw_bars([case for case in cases if case.figures], columns, title, out / "comparison.png")
    click.echo(f"{text}\nwritten: comparison.json, .md and .png in {out}")


def _table_of(cases: Sequence[ComparisonCase], columns: Sequence[str]) -> str:
    """Table in Markdown, with aligned cells for terminals."""
    lines = [["case", *(COLUMNS[name][0] for name in columns)], ["-" * 5] * (1 + len(columns))]
    lines += [[case.name, *map(case.text_of, columns)] for case in cases]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def _draw_bars(cases: Sequence[ComparisonCase], columns: Sequence[str], title: str, file: Path) -> None:
    """Bars for each figure, with scales that begin at zero."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5 + 2 * len(columns), 1.2 + 0.4 * len(cases)), layout="constrained")
    figure.suptitle(title)
    for axes, column in zip(figure.subplots(1, len(columns), sharey=True), columns, strict=True):
        bars = axes.barh([case.name for case in cases], [(case.figures or {})[column] for case in cases])
        axes.bar_label(bars, [case.text_of(column) for case in cases], padding=3)
        axes.set(title=COLUMNS[column][0], xticks=[], ylim=(len(cases) - 0.5, -0.5))
        axes.margins(x=0.6)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    with use_default_interrupt():
        main()
