"""``ckpt-tools samples``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from ckpt_tools.arguments import check_has_scheme
from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_pairs
from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError

ARCHIVE = Path(__file__).with_name("samples.zip")
"""What ``fixtures/samples.py`` made."""

SAMPLES = {
    "base": "config.json and a tokenizer: a Llama of 22,776 parameters",
    "fsdp2": "a run of FSDP2 with AdamW on 4 ranks: a PyTorch DCP",
    "zero3": "DeepSpeed ZeRO-3 with AdamW on 4 ranks",
}


@click.command("samples", cls=options.ConverterCommand, examples=("ckpt-tools samples tiny",))
@click.argument("folder", metavar="FOLDER")
@options.verbosity_options
def samples_command(folder: str) -> None:
    """Write small checkpoints into FOLDER, to try the other commands on.

    FSDP2 and DeepSpeed wrote them, after 600 steps of training. FOLDER is a new folder of at most 2 MB.
    """
    if not folder:
        raise UsageError("FOLDER is empty; name a new folder")
    if "://" in folder:
        raise UsageError("the samples are written into a local folder", path=folder)
    check_has_scheme(folder)
    write_samples(Path(folder))
    print_pairs((str(Path(folder, name)), about) for name, about in SAMPLES.items())


def write_samples(folder: Path) -> None:
    """Write all samples, or nothing. Raises ``DestinationExistsError`` if the folder is there and not empty,
    ``StoreError`` if it cannot be written."""
    import zipfile

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as unfinished:
            samples = Path(unfinished, "samples")
            zipfile.ZipFile(ARCHIVE).extractall(samples)
            samples.rename(folder)
    except OSError as error:
        if folder.is_dir() or folder.is_file():
            raise DestinationExistsError("it is there already; choose a new folder", path=str(folder)) from error
        raise StoreError(f"writing failed: {error.strerror}", path=str(folder)) from error
