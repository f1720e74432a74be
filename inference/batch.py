"""``python -m inference.batch MODEL``: predict a dataset's held-out part or a folder of images, and write it down.

Options and files are checked before torch is loaded; images are read, predicted and written a chunk at a time.
"""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    from collections.abc import Sequence
    from dataclasses import dataclass, field
    from pathlib import Path
    from typing import TYPE_CHECKING

    import click

    from ckpt_tools.errors import CkptError, UsageError

    from .files import check_model, local_path
    from .inputs import Inputs, file_inputs, held_out_inputs
    from .output import Output, Row, RowWriter, open_output
    from .progress import show_progress
    from .reporting import report_errors

if TYPE_CHECKING:
    from .training_package import data

# The names in training.data, which takes torch to import; a test compares them.
DATASETS: tuple[data.DatasetName, ...] = ("digits", "fashion-mnist")

NUM_NAMED = 3
"""A sentence names so many broken images; all of them stand in the output."""


class BrokenImagesError(CkptError):
    """Everything was predicted but images that could not be read."""

    exit_code = 6


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to predict: the held-out part of a dataset or the image files at a path. Raises ``UsageError``."""

    dataset: data.DatasetName | None
    data_root: Path | None
    images: Path | None

    def __post_init__(self) -> None:
        if (self.dataset is None) == (self.images is None):
            raise UsageError("give either --dataset or --images")
        if self.dataset == "fashion-mnist" and self.data_root is None:
            raise UsageError("the dataset fashion-mnist needs --data-root, the folder it is kept in or downloaded to")
        if self.dataset != "fashion-mnist" and self.data_root is not None:
            raise UsageError("--data-root is for --dataset fashion-mnist alone")


@dataclass(slots=True)
class Tally:
    """What was done so far, in numbers and the names of the first broken images."""

    num_rows: int = 0
    num_broken: int = 0
    num_correct: int = 0
    broken: list[str] = field(default_factory=list)

    def add(self, rows: Sequence[Row]) -> None:
        broken = [row.name for row in rows if row.error is not None]
        self.num_rows += len(rows)
        self.num_broken += len(broken)
        self.num_correct += sum(row.label == row.truth for row in rows if row.truth is not None)
        self.broken = [*self.broken, *broken][:NUM_NAMED]

    def check_broken(self, out: Path) -> None:
        """Raise ``BrokenImagesError`` if there is a row without a prediction."""
        if not self.num_broken:
            return
        more = self.num_broken - len(self.broken)
        names = ", ".join(self.broken) + (f" and {more:,} more" if more else "")
        raise BrokenImagesError(
            f"{self.num_broken:,} of {self.num_rows:,} images could not be predicted: {names}; "
            f"their rows in {out} say why"
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option("--dataset", type=click.Choice(DATASETS), help="Predict the held-out part of a dataset.")
@click.option("--data-root", metavar="FOLDER", help="The folder that fashion-mnist is kept in or downloaded to.")
@click.option("--images", metavar="PATH", help="Predict the image files of a folder, or one image file.")
@click.option("--out", metavar="FILE", required=True, help="The .jsonl or .parquet file to write.")
@click.option("--overwrite", is_flag=True, help="Replace --out if it exists.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def main(
    model: str,
    dataset: data.DatasetName | None,
    data_root: str | None,
    images: str | None,
    out: str,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Predict with MODEL, a checkpoint of any format, local or remote; prints the accuracy if it is known.

    \b
    Exit codes: 0 done, 2 usage, 3 not found, 4 not readable, or of another model, 5 I/O failure,
    6 done but for broken images, 7 refused as unsafe, 8 --out exists.
    """
    with report_errors():
        output = Output(local_path(out, "--out", "write to a local file and copy it"), overwrite)
        wanted = Wanted(dataset, _local("--data-root", data_root), _local("--images", images))
        run(check_model(model), wanted, output, quiet=quiet)


def _local(option: str, text: str | None) -> Path | None:
    return None if text is None else local_path(text, option, "copy its files to this machine first")


def run(model: str, wanted: Wanted, output: Output, *, quiet: bool) -> None:
    """Predict, write and say what was done. Raises ``BrokenImagesError`` at the end."""
    with open_output(output) as writer:
        inputs = find_inputs(wanted)
        tally = predict_into(writer, model, inputs, quiet=quiet)
    click.echo(f"{tally.num_rows - tally.num_broken} predictions in {output.path}")
    if inputs.truths is not None:
        click.echo(f"accuracy: {tally.num_correct / tally.num_rows:.4f} ({tally.num_correct} of {tally.num_rows})")
    tally.check_broken(output.path)


def find_inputs(wanted: Wanted) -> Inputs:
    if wanted.images is not None:
        return file_inputs(wanted.images)
    assert wanted.dataset is not None
    return held_out_inputs(wanted.dataset, wanted.data_root)


def predict_into(writer: RowWriter, model: str, inputs: Inputs, *, quiet: bool) -> Tally:
    """Write each chunk of rows before the next one is read."""
    from .rows import predict_chunks

    tally = Tally()
    with show_progress(len(inputs.names), quiet=quiet) as update:
        for rows in predict_chunks(model, inputs):
            writer.write(rows)
            tally.add(rows)
            update(tally.num_rows)
    return tally


if __name__ == "__main__":
    with killed_by_interrupts():
        main()
