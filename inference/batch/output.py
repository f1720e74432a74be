"""Output file, local or in a store: rows are kept in parts as they are made, and published as one file at the end.

Objects of a store cannot be appended to, and a Parquet file cannot be read before its last byte is written. So rows go,
as JSON Lines, into ``OUT.unfinished/rows-000000001000.jsonl``, by the number of the first one, beside ``run.json``,
which names the model, the input and the options. At the end OUT is put together from them; it is absent, as it was, or
complete. A run that fails or is killed leaves the folder. The next run resumes with ``--resume`` if it has the same
``run.json``, and replaces the rows with ``--overwrite``.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError

from ..common.urls import find_file_system, is_url, translate_store_errors
from .rows import OutputColumns, OutputRow

JSON_SUFFIX, PARQUET_SUFFIX = ".jsonl", ".parquet"

PART_ROWS, PART_SECONDS = 1000, 60.0  # limits of a part in a store, which is the most that a killed process loses

# About 1 MB of columns; as Python objects, while they are converted, some 5 MB.
ROW_GROUP_ROWS = 4096

RUN_NAME, WHOLE_NAME, LOCK_NAME = "run.json", "whole", "lock"


@dataclass(frozen=True, slots=True)
class OutputFile:
    """Output file ``url``, a path or a URL. Raises UsageError for another suffix, or contradicting options."""

    url: str
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.url.endswith((JSON_SUFFIX, PARQUET_SUFFIX)):
            raise UsageError(f"--output ends in {JSON_SUFFIX} or {PARQUET_SUFFIX}, not {Path(self.url).name!r}")
        if self.overwrite and self.resume:
            raise UsageError("give either --resume or --overwrite")

    @property
    def is_remote(self) -> bool:
        return is_url(self.url)

    @property
    def is_parquet(self) -> bool:
        return self.url.endswith(PARQUET_SUFFIX)

    @property
    def rows_folder(self) -> str:
        """Folder of the rows so far. The suffix keeps ``*.jsonl`` and ``*.parquet`` from matching it."""
        return f"{self.url}.unfinished"

    def translate_store_errors(self) -> AbstractContextManager[None]:
        """Errors of a store's client in the block become StoreError; those of the local disk stay OSError."""
        return translate_store_errors(self.url) if self.is_remote else nullcontext()


@dataclass(frozen=True, slots=True)
class RunDigests:
    """Digests of what rows depend on, or equivalent text. Rows of two different runs are never mixed."""

    model: str
    input: str
    options: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def check_same(self, stored: bytes, where: str) -> None:
        """Raises DestinationExistsError if ``stored``, from an earlier run, differs from this run."""
        try:
            earlier = json.loads(stored)
            differing = [name for name, value in asdict(self).items() if earlier[name] != value]
        except (ValueError, KeyError, TypeError):
            differing = ["run"]
        if differing:
            raise DestinationExistsError(
                f"the rows in {where} are of another {' and '.join(differing)}; give what they were made with, or "
                "start afresh by --overwrite"
            )


@dataclass(slots=True)
class RowWriter:
    """Writes rows to ``path`` of the fsspec file system ``fs``. ``check_lock`` raises if another run has taken over."""

    output: OutputFile
    fs: Any
    path: str
    check_lock: Callable[[], None]
    columns: OutputColumns | None = None
    waiting_rows: list[OutputRow] = field(default_factory=list)
    num_stored: int = 0
    stored_at: float = field(default_factory=time.monotonic)

    def begin_run(self, run: RunDigests, columns: OutputColumns, take_row: Callable[[dict[str, Any]], None]) -> int:
        """Begin, once, before the first row. Calls ``take_row`` with each row of an earlier run, and returns their
        number. Raises DestinationExistsError if they are not of ``run``."""
        self.columns = columns
        with self.output.translate_store_errors():
            if self.output.resume:
                self._read_earlier_rows(run, take_row)
            else:
                self.remove_rows()
            self.fs.pipe_file(self._file_path(RUN_NAME), run.to_json())
        return self.num_stored

    def write(self, rows: Sequence[OutputRow]) -> None:
        """Write rows. They survive a killed process once this returns; in a store, once a part is full."""
        self.waiting_rows += rows
        is_due = len(self.waiting_rows) >= PART_ROWS or time.monotonic() - self.stored_at >= PART_SECONDS
        if is_due or not self.output.is_remote:
            self.store_part()

    def store_part(self) -> None:
        """Store the waiting rows as a part."""
        if not self.waiting_rows:
            return
        assert self.columns is not None
        self.check_lock()
        with self.output.translate_store_errors():
            self.fs.pipe_file(
                self._part_path(self.num_stored), b"".join(self.columns.to_line(row) for row in self.waiting_rows)
            )
        self.num_stored += len(self.waiting_rows)
        self.waiting_rows, self.stored_at = [], time.monotonic()

    def publish(self) -> None:
        """Put the file together. Without ``--overwrite``, one that has appeared meanwhile is not replaced."""
        self.store_part()
        self.check_lock()
        with self.output.translate_store_errors():
            if self.output.is_remote:
                self._upload_output()
            else:
                with self.fs.open(self._file_path(WHOLE_NAME), "wb") as file:
                    self._copy_rows(file)
                self.check_absent()
                Path(self._file_path(WHOLE_NAME)).replace(self.path)
            self.remove_rows()

    def check_absent(self) -> None:
        """Raises DestinationExistsError if the output exists and may not be replaced."""
        if not self.output.overwrite and self.fs.lexists(self.path):
            raise DestinationExistsError(f"{self.output.url} exists; --overwrite replaces it")

    def check_no_rows_left(self) -> None:
        """Raises DestinationExistsError if rows of an earlier run are there and may not be replaced."""
        if self.list_parts() and not (self.output.overwrite or self.output.resume):
            raise DestinationExistsError(
                f"{self.output.rows_folder} holds the rows of a run that did not finish; --resume continues with them, "
                "--overwrite starts afresh"
            )

    def list_parts(self) -> list[str]:
        """Paths of the parts, sorted by the fixed-width number of their first row."""
        try:
            paths = self.fs.ls(self._file_path("").rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path for path in paths if path.rpartition("/")[2].startswith("rows-"))

    def count_rows(self) -> int:
        """Rows in the parts. A signal may come between storing and counting, so that ``num_stored`` does not tell."""
        return sum(self.fs.cat_file(part).count(b"\n") for part in self.list_parts())

    def remove_rows(self) -> None:
        """Remove the files that a run writes; those of others in the folder stay."""
        for path in [*self.list_parts(), self._file_path(RUN_NAME), self._file_path(WHOLE_NAME)]:
            if self.fs.exists(path):
                self.fs.rm_file(path)

    def _file_path(self, name: str) -> str:
        return f"{self.path}.unfinished/{name}"

    def _part_path(self, first_row: int) -> str:
        return self._file_path(f"rows-{first_row:012d}.jsonl")

    def _read_earlier_rows(self, run: RunDigests, take_row: Callable[[dict[str, Any]], None]) -> None:
        """Read the rows of the earlier run. Its last part may end within a line."""
        for part in self.list_parts():
            if not self.num_stored:
                has_run = self.fs.exists(self._file_path(RUN_NAME))
                run.check_same(self.fs.cat_file(self._file_path(RUN_NAME)) if has_run else b"", self.output.rows_folder)
            if part != self._part_path(self.num_stored):
                raise self._make_damage_error(f"lacks rows from {self.num_stored:,} on")
            data = self.fs.cat_file(part)
            if not data.endswith(b"\n"):
                data = data[: data.rfind(b"\n") + 1]
                self.fs.pipe_file(part, data)
            for line in data.splitlines():
                try:
                    take_row(json.loads(line))
                except ValueError as error:
                    raise self._make_damage_error("is damaged") from error
                self.num_stored += 1

    def _make_damage_error(self, what: str) -> DestinationExistsError:
        return DestinationExistsError(f"{self.output.rows_folder} {what}; start afresh with --overwrite")

    def _upload_output(self) -> None:
        """Write the output to the store in one upload, which is invisible before it is complete."""
        self.check_absent()
        file = self.fs.open(self.path, "wb", autocommit=False)
        try:
            self._copy_rows(file)
            file.close()
        except BaseException:
            file.discard()
            raise
        file.commit()

    def _copy_rows(self, file: BinaryIO) -> None:
        assert self.columns is not None
        lines = (line for part in self.list_parts() for line in self.fs.cat_file(part).splitlines(keepends=True))
        if self.output.is_parquet:
            write_parquet(lines, file, self.columns)
        else:
            file.writelines(lines)


def write_parquet(lines: Iterable[bytes], file: BinaryIO, columns: OutputColumns) -> None:
    """Write JSON Lines as Parquet, one row group at a time. Floats are read back exactly."""
    import pyarrow as pa
    from pyarrow import parquet

    schema, remaining = columns.make_schema(), iter(lines)
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(remaining, ROW_GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist([columns.parse_line(line) for line in group], schema=schema))


@contextmanager
def open_output(output: OutputFile) -> Iterator[RowWriter]:
    """Writer of rows; the file is published when the block ends without an error. Otherwise ``OUT.unfinished`` stays,
    and a note on the error says so. Raises DestinationExistsError if existing files may not be replaced, or another run
    writes to the same file; StoreError."""
    if output.is_parquet:
        import pyarrow.parquet  # noqa: F401  # if it is missing, that is to be known before the first prediction
    fs, path = find_file_system(output.url)
    writer = RowWriter(output, fs, path, check_lock=lambda: None)
    try:
        with output.translate_store_errors():
            if not output.is_remote:
                _check_local_output(output, Path(path))
            writer.check_absent()
    except OSError as error:
        raise StoreError(f"{output.url} cannot be looked up ({error.strerror or error})") from error
    with _lock_remote_output(writer) if output.is_remote else _lock_local_output(writer):
        writer.check_absent()
        writer.check_no_rows_left()
        try:
            yield writer
            writer.publish()
        except BaseException as error:
            _keep_rows(writer, error)
            raise


def _check_local_output(output: OutputFile, path: Path) -> None:
    folder, unfinished = path.parent, Path(f"{path}.unfinished")
    if not folder.is_dir():
        raise StoreError(f"the folder of --output, {Path(output.url).parent}, does not exist; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"the folder of --output, {Path(output.url).parent}, cannot be written to")
    if path.is_dir():
        raise DestinationExistsError(f"{output.url} is a folder")
    if os.path.lexists(unfinished) and (unfinished.is_symlink() or not unfinished.is_dir()):
        raise DestinationExistsError(f"{output.rows_folder} is in the way and is not of this command; move it away")


@contextmanager
def _lock_remote_output(writer: RowWriter) -> Iterator[None]:
    """Hold ``OUT.unfinished`` in its store while the block runs; the Hub has no locks."""
    if writer.output.url.startswith("hf://"):
        yield
        return
    with ckpt_tools.claim(writer.output.rows_folder) as claim:
        writer.check_lock = claim.check
        yield


@contextmanager
def _lock_local_output(writer: RowWriter) -> Iterator[None]:
    """Hold ``OUT.unfinished``, which is made, while the block runs, and remove it then if nothing is in it. The lock
    ends with the process."""
    lock = Path(f"{writer.path}.unfinished", LOCK_NAME)
    lock.parent.mkdir(exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DestinationExistsError(f"another run is writing to {writer.output.url}") from error
        # Between opening and locking, a run that has ended may have removed this very file.
        if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(descriptor)):
            raise DestinationExistsError(f"another run has just written {writer.output.url}")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):
                lock.parent.rmdir()
    finally:
        os.close(descriptor)


def _keep_rows(writer: RowWriter, error: BaseException) -> None:
    """After a failure: keep the rows that were predicted and name their place in the error."""
    with suppress(Exception):
        writer.store_part()
    try:
        num_rows = writer.count_rows()
        if not num_rows:
            writer.remove_rows()
    except Exception:
        num_rows = writer.num_stored
    if num_rows:
        error.add_note(
            f"the {num_rows:,} rows that were done are kept in {writer.output.rows_folder}; --resume continues"
        )
