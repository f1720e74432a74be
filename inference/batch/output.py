"""Local output file: rows are written as they are made, and published under the final name when complete.

Rows go, as JSON Lines, into ``OUT.unfinished``, which is locked while a run writes to it. At the end it is renamed to
OUT, or, for Parquet, rewritten as OUT and removed: a Parquet file cannot be read before its last byte is written. A
run that fails or is killed leaves its rows in ``OUT.unfinished`` and its model, input and options in
``OUT.unfinished-run``. The next run resumes with ``--resume`` if these are equal, and replaces them with
``--overwrite``.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError

from .rows import Columns, Row

JSON_SUFFIX, PARQUET_SUFFIX = ".jsonl", ".parquet"

# About 1 MB of columns; as Python objects, while they are converted, some 5 MB.
ROW_GROUP_ROWS = 4096

# First bytes of the working files of this module, so that no other file is taken for one.
ROWS_MAGIC, PARQUET_MAGIC, RUN_MAGIC = b'{"name":', b"PAR1", b'{"predictions of": '

LEFT = "holds the rows of a run that did not finish; --resume continues with them, --overwrite starts afresh"


def check_options(name: str, *, overwrite: bool, resume: bool) -> None:
    """Raises UsageError for another suffix, or contradicting options."""
    if not name.endswith((JSON_SUFFIX, PARQUET_SUFFIX)):
        raise UsageError(f"--output ends in {JSON_SUFFIX} or {PARQUET_SUFFIX}, not {name!r}")
    if overwrite and resume:
        raise UsageError("give either --resume or --overwrite")


@dataclass(frozen=True, slots=True)
class Run:
    """Digests of what rows depend on, or equivalent text. Rows of two different runs are never mixed."""

    model: str
    input: str
    options: str

    def encoded(self) -> bytes:
        """JSON line that begins with ``RUN_MAGIC``."""
        return json.dumps({"predictions of": self.model, "input": self.input, "options": self.options}).encode() + b"\n"

    def check(self, left: bytes, where: str) -> None:
        """Raises DestinationExistsError if ``left``, from an earlier run, differs from this run."""
        if left == self.encoded():
            return
        try:
            found = json.loads(left)
            other = [word for word, key in _WORDS if found[key] != json.loads(self.encoded())[key]]
        except (ValueError, KeyError, TypeError):
            other = []
        kind = " and ".join(other) or "run"
        raise DestinationExistsError(
            f"the rows in {where} are of another {kind}; give what they were made with, or start afresh by --overwrite"
        )


_WORDS = (("model", "predictions of"), ("input", "input"), ("set of options", "options"))


class Writer(Protocol):
    """Writes rows, in order."""

    def begin(self, run: Run, columns: Columns, seen: Callable[[dict[str, Any]], None]) -> int:
        """Begin, once, before the first row. Calls ``seen`` with each row of an earlier run and returns their number.
        Raises DestinationExistsError if they are not of ``run``."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows. They survive a killed process once this returns; in a store, once a part is full."""


@dataclass(frozen=True, slots=True)
class Output:
    """Output file ``path`` and three working files beside it. Raises ``UsageError`` for another suffix."""

    path: Path
    overwrite: bool
    resume: bool = False

    def __post_init__(self) -> None:
        check_options(self.path.name, overwrite=self.overwrite, resume=self.resume)

    @property
    def is_parquet(self) -> bool:
        return self.path.suffix == PARQUET_SUFFIX

    @property
    def unfinished(self) -> Path:
        """Rows in progress. The suffix keeps ``*.jsonl`` and ``*.parquet`` from matching it."""
        return self.path.with_name(f"{self.path.name}.unfinished")

    @property
    def columns(self) -> Path:
        return self.path.with_name(f"{self.path.name}.unfinished-columns")

    @property
    def run(self) -> Path:
        return self.path.with_name(f"{self.path.name}.unfinished-run")

    def check(self) -> None:
        """Raise if existing files prevent writing. Writes nothing."""
        folder = self.path.parent
        if not folder.is_dir():
            raise StoreError(f"the folder of --output, {folder}, does not exist; make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StoreError(f"the folder of --output, {folder}, cannot be written to")
        if self.path.is_dir():
            raise DestinationExistsError(f"{self.path} is a folder")
        self.check_absent()
        _check_ours(self.unfinished, ROWS_MAGIC)
        _check_ours(self.columns, PARQUET_MAGIC)
        _check_ours(self.run, RUN_MAGIC)

    def check_absent(self) -> None:
        if os.path.lexists(self.path) and not self.overwrite:
            raise DestinationExistsError(f"{self.path} exists; --overwrite replaces it")

    def check_left(self) -> None:
        """Raise if rows of an earlier run may not be replaced. The lock is held."""
        if self.unfinished.stat().st_size and not (self.overwrite or self.resume):
            raise DestinationExistsError(f"{self.unfinished} {LEFT}")


def _check_ours(path: Path, magic: bytes) -> None:
    """Raise if ``path`` exists and was not written by this command."""
    if not os.path.lexists(path):
        return
    is_ours = path.is_file() and not path.is_symlink()
    if is_ours:
        with path.open("rb") as file:  # it may be cut short within the magic
            is_ours = magic.startswith(file.read(len(magic)))
    if not is_ours:
        raise DestinationExistsError(f"{path} is in the way and is not of this command; move it away")


@dataclass(slots=True)
class LocalWriter:
    """Appends rows to ``OUT.unfinished``, which is open and locked."""

    output: Output
    descriptor: int
    columns: Columns | None = None

    def begin(self, run: Run, columns: Columns, seen: Callable[[dict[str, Any]], None]) -> int:
        self.columns = columns
        num_rows = self._go_on(run, seen) if self.output.resume else 0
        if not num_rows:
            os.ftruncate(self.descriptor, 0)
            self.output.run.write_bytes(run.encoded())
        return num_rows

    def _go_on(self, run: Run, seen: Callable[[dict[str, Any]], None]) -> int:
        """Reads the rows of the earlier run; removes an incomplete last line."""
        num_rows, num_bytes = 0, 0
        with self.output.unfinished.open("rb") as file:
            for line in file:
                if not num_rows:
                    run.check(self.output.run.read_bytes() if self.output.run.exists() else b"", file.name)
                if line.endswith(b"\n"):
                    seen(row_of(line, file.name))
                    num_rows, num_bytes = num_rows + 1, num_bytes + len(line)
        os.ftruncate(self.descriptor, num_bytes)
        return num_rows

    def write(self, rows: Sequence[Row]) -> None:
        assert self.columns is not None
        data = encoded(rows, self.columns)
        while data:
            data = data[os.write(self.descriptor, data) :]


def encoded(rows: Iterable[Row], columns: Columns) -> bytes:
    return b"".join([columns.line(row) for row in rows])


def row_of(line: bytes, where: str) -> dict[str, Any]:
    """Raises DestinationExistsError if the line is damaged."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DestinationExistsError(f"{where} is damaged; start afresh with --overwrite") from error
    assert isinstance(found, dict)
    return found


@contextmanager
def open_output(output: Output) -> Iterator[LocalWriter]:
    """Writer of rows; the file is published when the block ends without an error. Otherwise ``OUT.unfinished`` stays,
    and a note on the error says so. Raises ``DestinationExistsError`` if existing files may not be replaced, or another
    run writes to the same file."""
    output.check()
    if output.is_parquet:
        import pyarrow.parquet  # noqa: F401  # if it is missing, that is to be known before the first prediction
    with _locked(output) as descriptor:
        writer = LocalWriter(output, descriptor)
        try:
            yield writer
            assert writer.columns is not None
            _publish(output, writer.columns)
        except BaseException as error:
            _keep(output, error)
            raise


@contextmanager
def _locked(output: Output) -> Iterator[int]:
    """``OUT.unfinished``, open and locked. The lock ends with the process."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(output.unfinished, flags, 0o666)
    try:
        _lock(descriptor, output)
        if output.overwrite:
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


def _publish(output: Output, columns: Columns) -> None:
    if not output.is_parquet:
        output.check_absent()
        output.unfinished.replace(output.path)
    else:
        _write_parquet(output, columns)
        output.check_absent()
        output.columns.replace(output.path)
        output.unfinished.unlink()
    output.run.unlink(missing_ok=True)


def _write_parquet(output: Output, columns: Columns) -> None:
    try:
        with output.unfinished.open("rb") as rows, output.columns.open("wb") as file:
            copy_to_parquet(rows, file, columns)
    except BaseException:
        output.columns.unlink(missing_ok=True)
        raise


def copy_to_parquet(rows: Iterable[bytes], file: BinaryIO, columns: Columns) -> None:
    """Copy JSON Lines to Parquet, one row group at a time. Floats are read back exactly."""
    import pyarrow as pa
    from pyarrow import parquet

    schema, lines = columns.schema(), iter(rows)
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(lines, ROW_GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist([columns.of_line(line) for line in group], schema=schema))


def _keep(output: Output, error: BaseException) -> None:
    """After a failure: remove an empty file; keep one with predictions and name it in the error."""
    num_rows = _num_lines(output.unfinished)
    if num_rows:
        error.add_note(f"the {num_rows:,} rows that were done are kept in {output.unfinished}; --resume continues")
    else:
        output.unfinished.unlink(missing_ok=True)
        output.run.unlink(missing_ok=True)


def _num_lines(path: Path) -> int:
    """Complete lines; 0 without a file. Counted there, because a signal may come between writing and counting."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)
