"""``python -m training.studies.compare``: compares strategies on the same training run.

Each case is a ``python -m training --launcher torchrun`` in a folder of its own, started a second time at its end to
measure how long it takes to resume. Finished cases are not run again.
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
    from collections.abc import Iterable, Sequence
    from dataclasses import dataclass, replace
    from pathlib import Path
    from typing import Any

    import click

    from ckpt_tools.errors import CkptError, DestinationExistsError, UsageError
    from ckpt_tools.process.credentials import mask_secrets
    from ckpt_tools.process.guard import guard_processes

    from ..config import PACKAGE
    from ..config.command_line import CONTEXT_BEFORE_OPTIONS, Command, check_modules, config_of, parsed
    from ..config.options import RESUME_AUTO, SETTINGS, spelt
    from ..config.train_config import TrainConfig
    from ..loop.stopping import interruptible
    from .report import Figures, Row, figures_of, report

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
    from ..checkpoints.locking import locked

    out = out.absolute()
    cases = cases_of(texts, options, out)
    check_modules(["matplotlib"])
    with locked(out):
        for case in cases:
            case.check_folder()
        with interruptible(lambda: "finished cases are kept; the same command runs the others"):
            with guard_processes() as marking, marking():
                rows = [row_of(case) for case in cases]
        report(out, cases[0].config, rows)
    sys.exit(1 if any(row.figures is None for row in rows) else 0)


main.epilog = f"Default of OPTIONS: {' '.join(DEFAULTS[1:])}. Default cases: {'; '.join(DEFAULT_CASES)}."


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy with its options, and the run that they and the common options describe."""

    name: str
    config: TrainConfig

    @classmethod
    def of(cls, text: str, options: Sequence[str], out: Path) -> Case:
        """Parse ``--case``. Raises ``UsageError``, which names the case."""
        words = shlex.split(text)
        if not words or words[0].startswith("-"):
            raise UsageError(f'--case "{text}" does not begin with a strategy, such as full_shard')
        folder = out / re.sub(r"[^\w.=+-]", "_", " ".join(Path(word).name for word in words).replace(" --", "+"))
        try:
            given = parsed([f"--out={folder}", *DEFAULTS, *options, "--strategy", *words])
            _check_given(given, folder)
            return cls(" ".join(words), config_of(given))
        except click.ClickException as error:
            raise UsageError(f'--case "{text}": {error.format_message()}') from error
        except CkptError as error:
            raise type(error)(f'--case "{text}": {error.message}') from error

    @property
    def args(self) -> list[str]:
        """Options of its run, without its folder and without credentials: they are written to a file."""
        return [mask_secrets(each) for each in replace(self.config, out=Path("run")).to_args()]

    def note(self, figures: Figures | None = None) -> None:
        """Replaces ``CASE_NAME`` atomically."""
        unfinished = self.config.out / f".{CASE_NAME}.partial"
        unfinished.write_text(json.dumps({"args": self.args, "figures": figures}, indent=1) + "\n")
        unfinished.replace(self.config.out / CASE_NAME)

    def noted(self) -> dict[str, Any] | None:
        """Content of the file of :meth:`note`; None if the folder has no such file."""
        try:
            found = json.loads((self.config.out / CASE_NAME).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.keys() >= {"args", "figures"} else None

    def check_folder(self) -> None:
        """Raises ``DestinationExistsError`` if the folder holds anything else, or another case."""
        folder, found = self.config.out, self.noted()
        if found is None and folder.exists() and any(folder.iterdir()):
            raise DestinationExistsError(f"{folder} holds files that no comparison wrote; choose another --out")
        if found and found["figures"] and (other := sorted(set(found["args"]) ^ set(self.args))):
            raise DestinationExistsError(
                f"{folder} is this case with other options ({', '.join(other)}); choose another --out"
            )


def _check_given(given: dict[str, Any], out: Path) -> None:
    """Raises ``UsageError`` for an option that the comparison sets itself."""
    if given["out"] != out:
        raise UsageError("--out is the comparison's own: each case has a folder in it")
    for name in OURS:
        if given[name]:
            raise UsageError(f"--{spelt(name)} is not for a comparison, which starts and resumes its runs itself")
    if given["launcher"] != "torchrun":
        raise UsageError("--launcher is torchrun in a comparison")


def cases_of(texts: Iterable[str], options: Sequence[str], out: Path) -> list[Case]:
    """Parse all cases. Raises ``UsageError`` if two are the same, or differ in a field of ``WORK``."""
    cases: list[Case] = []
    for case in (Case.of(text, options, out) for text in texts):
        if case.config.out in {other.config.out for other in cases}:
            raise UsageError(f'--case "{case.name}" is given twice: two cases cannot share {case.config.out}')
        cases.append(case)
        for name in WORK:
            if getattr(case.config, name) != getattr(cases[0].config, name):
                raise UsageError(
                    f'--case "{case.name}": --{spelt(name)} is the same for all cases; give it after -- instead'
                )
    return cases


def row_of(case: Case) -> Row:
    """Run the case, unless it is finished."""
    framework, noted = case.config.sharding.framework, case.noted()
    if noted and noted["figures"]:
        click.echo(f"{case.name}: done before")
        return Row(case.name, framework, noted["figures"])
    click.echo(f"{case.name}:")
    try:
        figures = _measured(case)
    except CkptError as error:
        click.echo(f"{case.name} failed: {error}", err=True)
        return Row(case.name, framework, None, str(error))
    case.note(figures)
    return Row(case.name, framework, figures)


def _measured(case: Case) -> Figures:
    """Run the case anew; files of an earlier attempt are removed. Raises ``CkptError``."""
    from ..loop.result import RESULT_NAME, RunResult

    out = case.config.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    case.note()
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


if __name__ == "__main__":
    with use_default_interrupt():
        main()
