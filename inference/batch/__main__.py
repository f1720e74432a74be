"""``python -m inference.batch --model URL --input URL --output URL``: predict whatever is there, and write it down.

Options and files are checked before torch is loaded. Inputs are read and decoded beside predicting, and rows are
written as they are made, so memory does not grow with the input.
"""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    import json
    from collections.abc import Generator
    from contextlib import AbstractContextManager, closing
    from dataclasses import dataclass
    from pathlib import Path
    from typing import TYPE_CHECKING, Any, Literal

    import click

    import ckpt_tools
    from ckpt_tools.errors import UsageError

    from ..common.errors import report_errors
    from ..common.name_options import AS_IT_IS, Reading, reading_options
    from ..common.training_package import commands
    from ..models.architectures import Architecture
    from .inputs import Inputs, Wanted, after, find_inputs
    from .output import Output, Run, Writer, open_output
    from .progress import show_progress
    from .remote_output import RemoteOutput, open_remote
    from .report import Report, Tally

if TYPE_CHECKING:
    from ..models.predictor import Predictor
    from .job import Job
    from .rows import Columns, Row

Runner = Literal["local", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """All that the command line says. Raises ``UsageError`` if options do not fit together."""

    model: str
    wanted: Wanted
    output: Output | RemoteOutput
    architecture: str | None = None
    reading: Reading = AS_IT_IS
    top: int = 5
    report: Report | None = None
    runner: Runner = "local"
    workers: int | None = None
    threads: int | None = None
    device: str | None = None
    fast: bool = False
    embeddings: bool = False
    max_new_tokens: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in ("top", "workers", "threads", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is a number from 1, not {value}")
        if self.workers is not None and self.runner != "ray":
            raise UsageError("--workers is for --runner ray")
        if self.architecture is not None:
            Architecture.parse(self.architecture)

    def job(self) -> Job:
        """This imports torch."""
        from .job import Job

        return Job(
            self.model,
            self.architecture,
            self.device,
            self.threads,
            self.fast,
            self.embeddings,
            self.max_new_tokens,
            self.reading,
        ).settled()


@click.command(cls=commands.Command, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", metavar="URL", required=True, help="A checkpoint of any format, local or remote.")
@click.option("--input", "input_url", metavar="URL", required=True, help="Images, a table, a text, digits, ...")
@click.option("--output", metavar="URL", required=True, help="The .jsonl or .parquet file to write.")
@click.option("--architecture", metavar="TEXT", help="The module that the weights belong in.")
@reading_options
@click.option("--column", metavar="NAME", help="The column of a table that holds the inputs.")
@click.option("--truth", metavar="NAME", help="The column with the true labels; for images, 'folder'.")
@click.option("--data-root", metavar="FOLDER", help="The folder that fashion-mnist is kept in or downloaded to.")
@click.option("--top", type=int, default=5, help="How many of the most probable classes to write.")
@click.option("--embeddings", is_flag=True, help="Write embeddings: what the last layer gets, or an encoder gives.")
@click.option("--max-new-tokens", type=int, help="What a model that continues texts writes at most.")
@click.option("--report", metavar="FOLDER", help="Write accuracy, confusions and calibration there.")
@click.option("--resume", is_flag=True, help="Go on with the rows that an earlier run left.")
@click.option("--overwrite", is_flag=True, help="Replace --output, and what an earlier run left.")
@click.option("--runner", type=click.Choice(["local", "ray"]), default="local", help="Where to predict.")
@click.option("--workers", type=int, help="With --runner ray: copies of the model that predict at once.")
@click.option("--threads", type=int, help="The threads of a forward pass; all processors if left out.")
@click.option("--device", metavar="TEXT", help="Of torch, as cuda:1. The first GPU if left out, else the CPU.")
@click.option("--fast", is_flag=True, help="Give up that an input gets the same bits in any company.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def main(**options: Any) -> None:
    """Predict images, texts or rows of a table with a checkpoint; prints the accuracy if true labels are known.

    \b
    Exit codes: 0 done, 2 usage, 3 not found, 4 not readable, or of another model, 5 I/O failure,
    6 done but for bad inputs, 7 refused as unsafe, 8 --output exists.
    """
    with report_errors():
        run(asked_of(**options))


def asked_of(
    *,
    input_url: str,
    output: str,
    column: str | None,
    truth: str | None,
    data_root: str | None,
    report: str | None,
    resume: bool,
    overwrite: bool,
    **others: Any,
) -> Asked:
    """Raises UsageError."""
    root = None if data_root is None else local_path(data_root, "--data-root", "copy its files to this machine first")
    folder = None if report is None else local_path(report, "--report", "write to a local folder and copy it")
    where = RemoteOutput(output, overwrite, resume) if "://" in output else Output(Path(output), overwrite, resume)
    return Asked(
        wanted=Wanted(input_url, column, truth, root),
        output=where,
        report=None if folder is None else Report(folder, overwrite or resume),
        reading=Reading.taken_from(others),
        **others,
    )


def local_path(text: str, option: str, instead: str) -> Path:
    """``text`` as a local path. Raises ``UsageError`` for a URL, with what to do ``instead``."""
    if "://" in text:
        raise UsageError(f"{option} has to be a local path, {text} is a URL; {instead}")
    return Path(text)


def run(asked: Asked) -> None:
    """Predict, write and say what was done. Raises ``BadInputsError`` at the end."""
    ckpt_tools.inspect(asked.model)
    if asked.report is not None:
        asked.report.check()
    with _opened(asked.output) as writer:
        inputs = find_inputs(asked.wanted)
        if asked.report is not None and not inputs.has_truth:
            raise UsageError("--report compares with true labels; say by --truth where they are")
        tally, columns = predict_into(writer, inputs, asked)
    _conclude(asked, tally, columns)


def _opened(output: Output | RemoteOutput) -> AbstractContextManager[Writer]:
    return open_remote(output) if isinstance(output, RemoteOutput) else open_output(output)


def _conclude(asked: Asked, tally: Tally, columns: Columns) -> None:
    click.echo(f"{tally.num_rows - tally.num_bad} predictions in {asked.output.path}")
    if asked.fast:
        click.echo("--fast: the last bits of an answer may depend on the inputs around it")
    if tally.num_known:
        accuracy = tally.num_correct / tally.num_known
        click.echo(f"accuracy: {accuracy:.4f} ({tally.num_correct} of {tally.num_known})")
    if asked.report is not None:
        asked.report.write(tally, columns.labels)
        click.echo(f"report in {asked.report.folder}")
    tally.check_bad(asked.output.path)


def predict_into(writer: Writer, inputs: Inputs, asked: Asked) -> tuple[Tally, Columns]:
    """Write each window of rows before the next one is predicted, after those that an earlier run left."""
    from .job import columns_of

    job, tally = asked.job(), Tally()
    predictor = job.load()
    columns = columns_of(predictor, asked.top)
    _check_fits(predictor, inputs, columns)
    this_run = Run(predictor.identity.digest, inputs.digest, _options(asked, job))
    num_done = writer.begin(this_run, columns, tally.add_written)
    predicted = _predicted(asked, inputs, num_done, job, predictor)
    with closing(predicted), show_progress(num_done, quiet=asked.quiet) as update:
        for rows in predicted:
            writer.write(rows)
            for row in rows:
                tally.add(row)
            update(tally.num_rows, rows[-1].fraction)
    return tally, columns


def _check_fits(predictor: Predictor, inputs: Inputs, columns: Columns) -> None:
    """Raises UsageError if the model is for something else than the input."""
    from .pipeline import takes_texts

    if inputs.kind == "image" and takes_texts(predictor):
        raise UsageError("the model takes texts, and the input is images")
    if inputs.has_truth and columns.kind != "label":
        raise UsageError("true labels are for a model that tells classes apart; leave out --truth and --report")


def _options(asked: Asked, job: Job) -> str:
    wanted = asked.wanted
    return json.dumps([job.digest(), asked.top, wanted.column, wanted.truth, str(asked.output.path).rpartition(".")[2]])


def _predicted(
    asked: Asked, inputs: Inputs, num_done: int, job: Job, predictor: Predictor
) -> Generator[list[Row], None, None]:
    left = after(inputs.parts, num_done)
    if asked.runner == "ray":
        from .ray_data import predicted_on_ray

        return predicted_on_ray(list(left), job, predictor, asked.workers)
    from .pipeline import predicted

    return predicted((item for part in left for item in part.items()), predictor)


if __name__ == "__main__":
    with killed_by_interrupts():
        main()
