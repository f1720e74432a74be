"""The file of predictions: written as they are made, shown under its name when it is whole.

Rows go, as JSON Lines, into ``OUT.unfinished``, which is locked while a run writes to it. At the end it is renamed to
OUT, or, for Parquet, rewritten as OUT and removed: a Parquet file cannot be read before its last byte is written, so
it would lose everything with the process. A run that fails or is killed leaves ``OUT.unfinished`` behind with all that
it had predicted, and the next run does not replace that unasked.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError

JSON_SUFFIX, PARQUET_SUFFIX = ".jsonl", ".parquet"

# About 1 MB of columns; as Python objects, while they are converted, some 5 MB.
ROW_GROUP_ROWS = 4096

# What files that this module left behind begin with, so that a file of somebody else is never taken for one.
ROWS_MAGIC, PARQUET_MAGIC = b'{"name": ', b"PAR1"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the output: a prediction, or the ``error`` for which there is none. ``truth`` is None if unknown."""

    name: str
    label: int | None
    probabilities: tuple[float, ...] | None
    truth: int | None
    error: str | None

    def __post_init__(self) -> None:
        assert (self.label is None) == (self.probabilities is None) == (self.error is not None)


@dataclass(frozen=True, slots=True)
class Output:
    """The file ``path`` and the two names beside it that a run may use. Raises ``UsageError`` for another suffix."""

    path: Path
    overwrite: bool

    def __post_init__(self) -> None:
        if self.path.suffix not in {JSON_SUFFIX, PARQUET_SUFFIX}:
            raise UsageError(f"--out ends in {JSON_SUFFIX} or {PARQUET_SUFFIX}, not {self.path.name!r}")

    @property
    def is_parquet(self) -> bool:
        return self.path.suffix == PARQUET_SUFFIX

    @property
    def unfinished(self) -> Path:
        """Rows as they are made. The name ends so that neither ``*.jsonl`` nor ``*.parquet`` finds it."""
        return self.path.with_name(f"{self.path.name}.unfinished")

    @property
    def columns(self) -> Path:
        """The Parquet file while it is written."""
        return self.path.with_name(f"{self.path.name}.unfinished-columns")

    def check(self) -> None:
        """Raise if something stands in the way. Writes nothing."""
        folder = self.path.parent
        if not folder.is_dir():
            raise StoreError(f"the folder of --out, {folder}, does not exist; make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StoreError(f"the folder of --out, {folder}, cannot be written to")
        if self.path.is_dir():
            raise DestinationExistsError(f"{self.path} is a folder")
        self.check_absent()
        _check_ours(self.unfinished, ROWS_MAGIC)
        _check_ours(self.columns, PARQUET_MAGIC)

    def check_absent(self) -> None:
        if os.path.lexists(self.path) and not self.overwrite:
            raise DestinationExistsError(f"{self.path} exists; --overwrite replaces it")

    def check_left(self) -> None:
        """Raise if an earlier run left predictions and they may not be replaced. The lock is held."""
        if self.unfinished.stat().st_size and not self.overwrite:
            raise DestinationExistsError(
                f"{self.unfinished} holds the predictions of a run that did not finish; move it away, or replace it by "
                "--overwrite"
            )


def _check_ours(path: Path, magic: bytes) -> None:
    """Raise if ``path`` exists and is not a file that a run of this command left."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or not _begins(path, magic)):
        raise DestinationExistsError(f"{path} is in the way and is not of this command; move it away")


def _begins(path: Path, magic: bytes) -> bool:
    """Whether the file begins with ``magic`` or, cut short, with a part of it."""
    with path.open("rb") as file:
        return magic.startswith(file.read(len(magic)))


@dataclass(frozen=True, slots=True)
class RowWriter:
    """Appends rows to a file."""

    descriptor: int

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; once this returns, a killed process does not lose them."""
        data = "".join(json.dumps(asdict(row)) + "\n" for row in rows).encode()
        while data:
            data = data[os.write(self.descriptor, data) :]


@contextmanager
def open_output(output: Output) -> Iterator[RowWriter]:
    """A writer of rows; the file is shown when the block ends well.

    If it does not, ``OUT.unfinished`` stays, and a note on the error says so. Raises ``DestinationExistsError`` if
    there is something that may not be replaced, or another run writes to the same file.
    """
    output.check()
    if output.is_parquet:
        import pyarrow.parquet  # noqa: F401  # if it is missing, that is to be known before the first prediction
    with _locked(output) as descriptor:
        try:
            yield RowWriter(descriptor)
            _publish(output)
        except BaseException as error:
            _keep(output, error)
            raise


@contextmanager
def _locked(output: Output) -> Iterator[int]:
    """The empty ``OUT.unfinished``, of this run alone: the lock goes with the process, however that ends."""
    descriptor = os.open(output.unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor, output)
        os.ftruncate(descriptor, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, output: Output) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DestinationExistsError(f"another run is writing to {output.path}") from error
    # Between opening and locking, a run that has ended may have renamed this very file to OUT.
    if not _is_at(output.unfinished, descriptor):
        raise DestinationExistsError(f"another run has just written {output.path}")
    output.check_absent()
    output.check_left()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _publish(output: Output) -> None:
    """Show the whole file under its name."""
    if not output.is_parquet:
        output.check_absent()
        output.unfinished.replace(output.path)
        return
    _write_parquet(output)
    output.check_absent()
    output.columns.replace(output.path)
    output.unfinished.unlink()


def _write_parquet(output: Output) -> None:
    try:
        with output.unfinished.open("rb") as rows, output.columns.open("wb") as columns:
            _copy_to_parquet(rows, columns)
    except BaseException:
        output.columns.unlink(missing_ok=True)
        raise


def _copy_to_parquet(rows: BinaryIO, columns: BinaryIO) -> None:
    """JSON Lines to Parquet, a row group at a time. Python reads back the very floats that it wrote."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema(
        {
            "name": pa.string(),
            "label": pa.int64(),
            "probabilities": pa.list_(pa.float64()),
            "truth": pa.int64(),
            "error": pa.string(),
        }
    )
    with parquet.ParquetWriter(columns, schema) as writer:
        while group := list(islice(rows, ROW_GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist([json.loads(line) for line in group], schema=schema))


def _keep(output: Output, error: BaseException) -> None:
    """After a failure: an empty file is removed, one with predictions stays and is named."""
    num_rows = _num_lines(output.unfinished)
    if num_rows:
        error.add_note(f"the {num_rows:,} rows that were done are kept in {output.unfinished}")
    else:
        output.unfinished.unlink(missing_ok=True)


def _num_lines(path: Path) -> int:
    """Whole lines, 0 if there is no file. Counted there: a signal may come between writing and counting."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)
