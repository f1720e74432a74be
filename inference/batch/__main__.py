"""``ckpt-tools predict`` (``python -m inference.batch``): predictions for images, texts or rows of tables, as a file.

Options and files are checked before torch is loaded. Inputs are read and decoded beside predicting, and rows are
written as they are made, so memory does not grow with the input.
"""

from __future__ import annotations

from ckpt_tools.process.signals import use_default_interrupt

with use_default_interrupt():
    import json
    from collections.abc import Generator
    from contextlib import closing
    from dataclasses import dataclass
    from pathlib import Path
    from typing import TYPE_CHECKING, Any, Literal

    import click

    from ckpt_tools.errors import UsageError

    from ..common.errors import report_errors
    from ..common.training_package import commands
    from ..models.architectures import check_readable
    from ..models.options import MODEL_HEADINGS, ModelOptions, add_reading_options
    from .inputs import InputOptions, Inputs, find_inputs, skip_items
    from .model_setup import ModelSetup, choose_columns
    from .output import OutputFile, RowWriter, RunDigests, open_output
    from .progress import show_progress
    from .report import ReportFolder, Tally

if TYPE_CHECKING:
    from ..models.predictor import Predictor
    from .rows import OutputColumns, OutputRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """All options of the command line. Raises ``UsageError`` if options do not fit together."""

    setup: ModelSetup
    input_options: InputOptions
    output: OutputFile
    top: int
    report: ReportFolder | None
    runner: Literal["local", "ray"]
    workers: int | None
    quiet: bool

    def __post_init__(self) -> None:
        for name, value in {"top": self.top, "workers": self.workers, "threads": self.setup.threads}.items():
            if value is not None and value < 1:
                raise UsageError(f"--{name} is a number from 1, not {value}")
        if self.workers is not None and self.runner != "ray":
            raise UsageError("--workers is for --runner ray")


HEADINGS = {
    "What to predict": ("input_url", "column", "truth", "data_root", "max_pixels"),
    **MODEL_HEADINGS,
    "Output": ("output", "top", "embeddings", "max_new_tokens", "report", "resume", "overwrite"),
    "Running": ("runner", "workers", "threads", "device", "dtype", "fast", "quiet", "help"),
}


@click.command(
    cls=commands.CheckedCommand,
    headings=HEADINGS,
    examples=("ckpt-tools predict --model run@latest --input images --output out.jsonl",),
    context_settings={"show_default": True},
)
@click.option("--model", metavar="URL", required=True, help="Checkpoint of any format, local or remote.")
@click.option(
    "--input",
    "input_url",
    metavar="URL",
    required=True,
    help="Images, tables or text: a file, folder, pattern or URL; or digits.",
)
@click.option("--output", metavar="URL", required=True, help="Output file, .jsonl or .parquet.")
@click.option("--architecture", metavar="TEXT", help="Architecture of the weights: ours, hf, torchvision:NAME, ...")
@add_reading_options
@click.option("--column", metavar="NAME", help="Table column with the inputs.")
@click.option("--truth", metavar="NAME", help="Table column with true labels; for images, 'folder'.")
@click.option("--data-root", metavar="FOLDER", help="Dataset folder; fashion-mnist is downloaded here.")
@click.option("--top", type=int, default=5, help="Number of most probable classes to write.")
@click.option(
    "--embeddings", is_flag=True, help="Write embeddings: the input of the last layer, or an encoder's output."
)
@click.option("--max-new-tokens", type=int, help="Maximum number of generated tokens.")
@click.option("--max-pixels", type=int, help="Largest image, in pixels.  [default: 4096 x 4096, or by the model]")
@click.option("--report", metavar="FOLDER", help="Write accuracy, confusion matrix and calibration here.")
@click.option("--resume", is_flag=True, help="Resume an earlier run that was stopped.")
@click.option("--overwrite", is_flag=True, help="Replace --output and the rows of an earlier run.")
@click.option("--runner", type=click.Choice(["local", "ray"]), default="local", help="Predict here or with Ray Data.")
@click.option("--workers", type=int, help="With --runner ray: number of model replicas.")
@click.option("--threads", type=int, help="Threads per forward pass.  [default: all processors]")
@click.option("--device", metavar="TEXT", help="torch device, e.g. cuda:1.  [default: first GPU, else CPU]")
@click.option("--dtype", metavar="TEXT", help="dtype of the parameters, e.g. bfloat16.  [default: the architecture's]")
@click.option("--fast", is_flag=True, help="Variable batch sizes; the last bits may differ.")
@click.option("--quiet", "-q", is_flag=True, help="No progress output.")
def main(**given: Any) -> None:
    """Predict images, texts or rows of a table with a checkpoint; prints the accuracy if true labels are known.

    Exit codes: 0 done, 2 usage, 3 not found, 4 not readable, or of another model, 5 I/O failure,
    6 done except bad inputs, 7 refused as unsafe, 8 --output exists.
    """
    with report_errors():
        run_prediction(parse_options(**given))


def parse_options(
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
) -> PredictOptions:
    """Options from the arguments of the command line. Raises UsageError."""
    root = to_local_path(data_root, "--data-root", "copy its files to this machine first")
    folder = to_local_path(report, "--report", "write to a local folder and copy it")
    others["exact"] = "off" if others.pop("fast") else "full"
    return PredictOptions(
        setup=ModelSetup(others.pop("model"), ModelOptions.take_from(others), others.pop("threads")),
        input_options=InputOptions(input_url, column, truth, root),
        output=OutputFile(output, overwrite, resume),
        report=None if folder is None else ReportFolder(folder, overwrite or resume),
        **others,
    )


def to_local_path(text: str | None, option: str, instead: str) -> Path | None:
    """``text`` as a local path. Raises ``UsageError`` for a URL, with what to do ``instead``."""
    if text is not None and "://" in text:
        raise UsageError(f"{option} has to be a local path, {text} is a URL; {instead}")
    return None if text is None else Path(text)


def run_prediction(options: PredictOptions) -> None:
    """Predict, write the output and the report, print a summary. Raises ``BadInputsError`` at the end."""
    model_options = options.setup.options
    check_readable(options.setup.model, model_options.architecture, model_options.reading.config)
    if options.report is not None:
        options.report.check_writable()
    with open_output(options.output) as writer:
        inputs = find_inputs(options.input_options)
        if options.report is not None and not inputs.has_truth:
            raise UsageError("--report compares with true labels; say by --truth where they are")
        tally, columns = predict_and_write(writer, inputs, options)
    _print_summary(options, tally, columns)


def _print_summary(options: PredictOptions, tally: Tally, columns: OutputColumns) -> None:
    click.echo(f"{tally.num_rows - tally.num_bad} predictions in {options.output.url}")
    if options.setup.options.exact == "off":
        click.echo("--fast: the last bits of an answer may depend on the inputs around it")
    if tally.num_known:
        accuracy = tally.num_correct / tally.num_known
        click.echo(f"accuracy: {accuracy:.4f} ({tally.num_correct} of {tally.num_known})")
    if options.report is not None:
        options.report.write(tally, columns.labels)
        click.echo(f"report in {options.report.folder}")
    tally.refuse_bad_inputs(options.output.url)


def predict_and_write(writer: RowWriter, inputs: Inputs, options: PredictOptions) -> tuple[Tally, OutputColumns]:
    """Predict and write window by window, after the rows of a resumed run."""
    setup, tally = options.setup.with_torch_defaults(), Tally()
    predictor = setup.load_predictor()
    columns = choose_columns(predictor, options.top)
    _check_inputs_fit(predictor, inputs, columns)
    input_options, suffix = options.input_options, options.output.url.rpartition(".")[2]
    settings = json.dumps([setup.to_json(), options.top, input_options.column, input_options.truth, suffix])
    this_run = RunDigests(predictor.identity.digest, inputs.digest, settings)
    num_done = writer.begin_run(this_run, columns, tally.add_written)
    row_windows = _predict_with_runner(options, inputs, num_done, setup, predictor)
    with closing(row_windows), show_progress(num_done, quiet=options.quiet) as update:
        for rows in row_windows:
            writer.write(rows)
            for row in rows:
                tally.add_row(row)
            update(tally.num_rows, rows[-1].fraction)
    return tally, columns


def _check_inputs_fit(predictor: Predictor, inputs: Inputs, columns: OutputColumns) -> None:
    """Raises UsageError if the model does not take such inputs, or has no classes to compare with true labels."""
    from ..models.tensors import TensorTask
    from .pipeline import takes_texts

    if isinstance(predictor.task, TensorTask) and predictor.task.functions.decode is None:
        taken = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in predictor.inputs)
        raise UsageError(
            f"the model takes tensors ({taken}), which no image and no text is; serve it, name a module that has a "
            "function decode, or ask an encoder for --embeddings"
        )
    if inputs.kind == "image" and takes_texts(predictor):
        raise UsageError("the model takes texts, and the input is images")
    if inputs.has_truth and columns.kind != "label":
        raise UsageError("true labels are for a model that tells classes apart; leave out --truth and --report")


def _predict_with_runner(
    options: PredictOptions, inputs: Inputs, num_done: int, setup: ModelSetup, predictor: Predictor
) -> Generator[list[OutputRow], None, None]:
    parts = skip_items(inputs.parts, num_done)
    if options.runner == "ray":
        from .ray_data import predict_on_ray

        return predict_on_ray(list(parts), setup, predictor, options.workers)
    from .pipeline import predict_items

    return predict_items((item for part in parts for item in part.items()), predictor)


if __name__ == "__main__":
    with use_default_interrupt():
        main()
