"""``python -m inference.demo``: train, convert, predict, end to end, on real data; what ``make demo`` runs.

FSDP2 and DeepSpeed ZeRO-3 each train a small convolutional network on two Ray workers. Each sharded checkpoint is
converted to safetensors and to ``.pt``, verified tensor by tensor, and each file predicts the held-out digits. The demo
fails unless every file gives the run's own prediction for each sample, and at least 90 % of these are right.
"""

from __future__ import annotations

from ckpt_tools.process.signals import use_default_interrupt

with use_default_interrupt():
    import json
    import sys
    from dataclasses import asdict, dataclass
    from itertools import count
    from pathlib import Path

    import click
    import torch
    from rich.console import Console
    from rich.table import Table

    import ckpt_tools
    from ckpt_tools.errors import CkptError, StoreError

    from .batch.inputs import make_held_out_inputs
    from .batch.pipeline import predict_all
    from .common.training_package import commands, config, interruption, launchers, result
    from .models.predictor import load_predictor

NUM_WORKERS = 2
MODEL = "cnn"  # trains in a tenth of the time of the Vision Transformer that is the default of ``ckpt-tools train``
EPOCHS = 4
LEARNING_RATE = 3e-3
DEMO_ENGINES: tuple[config.EngineName, ...] = ("fsdp2", "zero3")
RESULTS_NAME = "results.json"
FORMAT_FILES: dict[ckpt_tools.WrittenFormat, str] = {"safetensors": "model.safetensors", "torch": "model.pt"}
LEAST_ACCURACY = 0.90


@dataclass(frozen=True, slots=True)
class ConvertedFile:
    """One converted file beside the run it came from; ``seconds`` is the conversion's wall time."""

    checkpoint: str
    format: str
    file: str
    bytes: int
    seconds: float
    tensors: int
    tensors_equal: int
    total: int
    run_correct: int
    file_correct: int
    predictions_equal: int

    def find_failures(self) -> list[str]:
        accuracy = self.file_correct / self.total
        checks = {
            f"{self.tensors - self.tensors_equal} of {self.tensors} tensors differ": self.tensors_equal < self.tensors,
            f"{self.total - self.predictions_equal} of {self.total} predictions differ from the run's own": (
                self.predictions_equal < self.total
            ),
            f"its accuracy of {accuracy:.4f} is under {LEAST_ACCURACY}": accuracy < LEAST_ACCURACY,
        }
        return [f"{self.file}: {sentence}" for sentence, failed in checks.items() if failed]

    def format_cells(self) -> tuple[str, ...]:
        """The row of the table."""
        accuracies = [
            f"{correct / self.total:.4f} ({correct}/{self.total})" for correct in (self.run_correct, self.file_correct)
        ]
        size, equal = f"{self.bytes:,}", f"{self.tensors_equal}/{self.tensors}"
        return self.checkpoint, self.format, size, f"{self.seconds:.2f}", equal, *accuracies


def make_folder(out: Path) -> Path:
    """A new folder ``out/1``, ``out/2``, ...: what earlier demos wrote stays. Raises StoreError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = next(path for path in (out / str(number) for number in count(1)) if not path.exists())
        folder.mkdir()
    except OSError as error:
        raise StoreError(f"{out} cannot be written to ({error.strerror})") from error
    return folder


def train_model(engine: config.EngineName, folder: Path, console: Console) -> result.RunResult:
    """Train with an engine, on a local Ray that is there."""
    console.rule(f"train: {engine}, {NUM_WORKERS} Ray workers", align="left")
    run = config.TrainConfig(
        out=folder,
        engine=engine,
        launcher="ray",
        num_workers=NUM_WORKERS,
        model=MODEL,
        epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        save_every=EPOCHS,
    )
    return launchers.launch(run)


def convert_and_check(run: result.RunResult, format_name: ckpt_tools.WrittenFormat, folder: Path) -> ConvertedFile:
    """Convert a run's checkpoint into a file of ``folder``, verify it and predict with it."""
    checkpoint, file = Path(run.checkpoint), folder / FORMAT_FILES[format_name]
    report = ckpt_tools.convert(checkpoint, file, to=format_name, state="model", overwrite=True)
    verified = ckpt_tools.verify(checkpoint, file, state="model")
    predictor = load_predictor(file, architecture=f"ours:{run.settings['model']}")
    predicted = predict_all(make_held_out_inputs("digits", None).items(), predictor)
    return ConvertedFile(
        checkpoint=f"{run.engine}, {run.num_workers} ranks",
        format=format_name,
        file=str(file),
        bytes=report.bytes_written,
        seconds=report.seconds,
        tensors=verified.num_tensors,
        tensors_equal=verified.num_equal,
        total=run.total,
        run_correct=run.correct,
        file_correct=sum(row.label == row.truth for row in predicted),
        predictions_equal=sum(row.label == label for row, label in zip(predicted, run.predicted, strict=True)),
    )


def make_table(files: list[ConvertedFile]) -> Table:
    table = Table(title="from sharded checkpoint to one file")
    for heading in ("checkpoint", "format"):
        table.add_column(heading)
    for heading in ("bytes", "seconds", "tensors equal", "accuracy of the run", "accuracy from the file"):
        table.add_column(heading, justify="right")
    for file in files:
        table.add_row(*file.format_cells())
    return table


def run_demo(folder: Path, console: Console) -> list[ConvertedFile]:
    """Run all steps in ``folder`` and write ``results.json`` there."""
    # As many threads as a worker has: sums then have the same order, and logits are the same to the last bit.
    torch.set_num_threads(1)
    with launchers.cluster(NUM_WORKERS):
        runs = [train_model(engine, folder / engine, console) for engine in DEMO_ENGINES]
    console.rule("inspect, convert, verify, predict", align="left")
    for run in runs:
        console.print(str(ckpt_tools.inspect(run.checkpoint)), soft_wrap=True)
    files = [convert_and_check(run, name, folder / run.engine) for run in runs for name in FORMAT_FILES]
    (folder / RESULTS_NAME).write_text(json.dumps(list(map(asdict, files)), indent=1) + "\n")
    return files


@click.command(cls=commands.CheckedCommand, context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default="demo", help="A new folder is made here for each demo.")
def main(out: Path) -> None:
    """Train with FSDP2 and ZeRO-3, convert both checkpoints, and check that the files predict as the runs did."""
    # In a file or a log the table keeps its full width; 80 columns would cut its figures.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        with interruption.end_on_signals(lambda: "start the demo again"):
            files = run_demo(make_folder(out.absolute()), console)
    except CkptError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    console.print(make_table(files))
    failures = [sentence for file in files for sentence in file.find_failures()]
    for sentence in failures:
        click.echo(f"Error: {sentence}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    with use_default_interrupt():
        main()
