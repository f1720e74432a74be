"""``python -m inference.batch MODEL``: predict a dataset's held-out part or a folder of images, and write it down."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from ckpt_tools.errors import CkptError, SourceNotFoundError, UsageError

from .loading import load_model
from .prediction import predict, read_image
from .training_package import data

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What to predict: ``names`` of n images, ``pixels`` uint8 [n, 28, 28], and their true labels where known."""

    names: tuple[str, ...]
    pixels: Tensor
    truths: tuple[int, ...] | None

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.pixels)
        assert self.truths is None or len(self.truths) == len(self.names)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the output; ``truth`` is None where the true label is not known."""

    name: str
    label: int
    probabilities: tuple[float, ...]
    truth: int | None


def held_out_inputs(dataset: data.DatasetName, root: Path | None) -> Inputs:
    """The held-out part of a dataset, named by its position in it."""
    images = data.load_dataset(dataset, "held-out", root)
    return Inputs(tuple(map(str, range(len(images)))), images.pixels, tuple(images.labels.tolist()))


def folder_inputs(folder: Path) -> Inputs:
    """The image files directly in ``folder``, by name. Raises ``SourceNotFoundError`` where there are none."""
    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise SourceNotFoundError(f"there are no image files in {folder}")
    return Inputs(tuple(path.name for path in files), torch.stack([read_image(path) for path in files]), None)


def predict_rows(model: Path, inputs: Inputs) -> list[Row]:
    """A row for each input, in order."""
    predictions = predict(load_model(model), inputs.pixels)
    truths: Sequence[int | None] = inputs.truths or [None] * len(predictions)
    return [
        Row(name, prediction.label, prediction.probabilities, truth)
        for name, prediction, truth in zip(inputs.names, predictions, truths, strict=True)
    ]


def num_correct(rows: Sequence[Row]) -> int:
    """How many rows have the true label."""
    return sum(row.label == row.truth for row in rows)


def writer_for(out: Path) -> Callable[[Path, Sequence[Row]], None]:
    """The function that writes the format of ``out``'s suffix; raises ``UsageError`` for another suffix."""
    writers = {".jsonl": write_jsonl, ".parquet": write_parquet}
    if out.suffix not in writers:
        raise UsageError(f"--out ends in {' or '.join(writers)}, not {out.name!r}")
    return writers[out.suffix]


def write_jsonl(out: Path, rows: Sequence[Row]) -> None:
    """One JSON object a line."""
    out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def write_parquet(out: Path, rows: Sequence[Row]) -> None:
    """One Parquet file with the columns of :class:`Row`."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema(
        {"name": pa.string(), "label": pa.int64(), "probabilities": pa.list_(pa.float64()), "truth": pa.int64()}
    )
    parquet.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema), out)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--dataset", type=click.Choice(data.DATASETS), help="Predict the held-out part of a dataset.")
@click.option("--data-root", type=click.Path(path_type=Path), help="Where fashion-mnist is or is put.")
@click.option("--images", type=click.Path(path_type=Path), help="Predict the image files of a folder.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .jsonl or .parquet file.")
def main(model: Path, dataset: data.DatasetName | None, data_root: Path | None, images: Path | None, out: Path) -> None:
    """Predict with MODEL, a .safetensors or .pt file or a folder of safetensors; prints the accuracy where known."""
    try:
        run(model, choose_inputs(dataset, data_root, images), out)
    except CkptError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def choose_inputs(dataset: data.DatasetName | None, data_root: Path | None, images: Path | None) -> Inputs:
    """The inputs that the options ask for; raises ``UsageError`` unless they name exactly one kind."""
    if dataset is not None and images is None:
        return held_out_inputs(dataset, data_root)
    if images is not None and dataset is None:
        return folder_inputs(images)
    raise UsageError("give either --dataset or --images")


def run(model: Path, inputs: Inputs, out: Path) -> None:
    """Predict, write and say what was done."""
    write = writer_for(out)
    rows = predict_rows(model, inputs)
    write(out, rows)
    click.echo(f"{len(rows)} predictions in {out}")
    if inputs.truths is not None:
        correct = num_correct(rows)
        click.echo(f"accuracy: {correct / len(rows):.4f} ({correct} of {len(rows)})")


if __name__ == "__main__":
    main()
