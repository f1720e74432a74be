"""``python -m training.studies.compare``: compares strategies on the same training run.

Each case is a ``python -m training --launcher torchrun`` in its own folder, and a second, short run that resumes its
last checkpoint. Finished cases are not run again.
"""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    import json
    import shutil
    import subprocess
    import sys
    from collections.abc import Sequence
    from dataclasses import asdict
    from pathlib import Path
    from typing import Any

    import click

    from ckpt_tools.errors import CkptError, DestinationExistsError
    from ckpt_tools.guard import guarded

    from ..config import PACKAGE
    from ..config.command_line import CONTEXT_BEFORE_OPTIONS, Command, check_modules
    from ..config.train_config import TrainConfig
    from ..loop.stopping import interruptible
    from .comparison import (
        COLUMNS,
        DEFAULT_CASES,
        DEFAULTS,
        RESUMED,
        RUN,
        Case,
        Figures,
        Row,
        as_json,
        cases_of,
        markdown,
        picture_of,
        remarks,
        shown,
        title_of,
    )

CASE_NAME = "case.json"  # file in the folder of a case: options of its run, and its figures once it is finished
NAME = "comparison"
FAILED = 1
WIDTH = 160  # width of the table if the output is not a terminal


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
    rows = compare(out.absolute(), texts, options)
    sys.exit(FAILED if any(row.figures is None for row in rows) else 0)


main.epilog = f"Default of OPTIONS: {' '.join(DEFAULTS[1:])}. Default cases: {'; '.join(DEFAULT_CASES)}."


def compare(out: Path, texts: Sequence[str], options: Sequence[str]) -> list[Row]:
    """Run the unfinished cases, and write and show the report. Raises ``CkptError`` before any run starts."""
    from ..checkpoints.locking import locked

    cases = cases_of(texts, options, out)
    check_modules(["matplotlib"])
    with locked(out):
        for case in cases:
            _check_folder(case)
        with interruptible(lambda: "finished cases are kept; the same command runs the others"):
            with guarded() as marking, marking():
                rows = [_row(case) for case in cases]
        _report(out, cases, rows)
    return rows


def _check_folder(case: Case) -> None:
    if not case.folder.exists() or not any(case.folder.iterdir()):
        return
    found = _noted(case)
    if "args" not in found:
        raise DestinationExistsError(f"{case.folder} holds files that no comparison wrote; choose another --out")
    if "figures" in found and (other := sorted(set(found["args"]) ^ set(case.args))):
        raise DestinationExistsError(
            f"{case.folder} is this case with other options ({', '.join(other)}); choose another --out"
        )


def _noted(case: Case) -> dict[str, Any]:
    try:
        found = json.loads((case.folder / CASE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note(case: Case, **more: object) -> None:
    """Replaces the file atomically."""
    unfinished = case.folder / f".{CASE_NAME}.partial"
    unfinished.write_text(json.dumps({"args": case.args, **more}, indent=1) + "\n")
    unfinished.replace(case.folder / CASE_NAME)


def _row(case: Case) -> Row:
    framework, noted = case.config.sharding.framework, _noted(case)
    if "figures" in noted:
        click.echo(f"{case.name}: done before")
        return Row(case.name, framework, Figures(**noted["figures"]))
    click.echo(f"{case.name}:")
    try:
        figures = _measured(case)
    except CkptError as error:
        click.echo(f"{case.name} failed: {error}", err=True)
        return Row(case.name, framework, None, str(error))
    _note(case, figures=asdict(figures))
    return Row(case.name, framework, figures)


def _measured(case: Case) -> Figures:
    """Run the case anew; files of an earlier attempt are removed. Raises ``CkptError``."""
    from ..loop.result import RESULT_NAME, RunResult

    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir(parents=True)
    _note(case)
    _run(case.config)
    _run(case.resuming(RunResult.read(case.config.out / RESULT_NAME).checkpoint), stdout=subprocess.DEVNULL)
    return Figures.of(case.folder / RUN, case.folder / RESUMED)


def _run(config: TrainConfig, stdout: int | None = None) -> None:
    """Run the command, which shows its own progress. Raises ``CkptError`` with its last line."""
    command = [sys.executable, "-m", PACKAGE, *config.to_args()]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CkptError(lines[-1].removeprefix("error: "))


def _report(out: Path, cases: Sequence[Case], rows: Sequence[Row]) -> None:
    from rich.console import Console

    title, columns = title_of(cases), [column for column in COLUMNS if column.is_drawn(rows)]
    (out / f"{NAME}.md").write_text(markdown(title, rows, columns))
    (out / f"{NAME}.json").write_text(json.dumps(as_json(cases, rows), indent=1) + "\n")
    (out / f"{NAME}.png").write_bytes(picture_of(rows, title))
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(shown(title, rows, columns))
    click.echo("\n".join([*remarks(rows), *(f"{out / NAME}.{ending}" for ending in ("md", "json", "png"))]))


if __name__ == "__main__":
    with killed_by_interrupts():
        main()
