"""Output file in a store: parts while the run lasts, one file at the end.

Objects cannot be appended to, so rows go into ``OUT.unfinished/rows-000000001000.jsonl``, some thousand each, beside
``run.json``, which identifies the run. At the end OUT is assembled from them in one upload, which is invisible before
it is complete, and the parts are removed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ckpt_tools.errors import DestinationExistsError, StoreError

from ..common.urls import file_system, store_errors
from .output import LEFT, PARQUET_SUFFIX, Run, check_options, copy_to_parquet, encoded, row_of
from .rows import Columns, Row

PART_ROWS, PART_SECONDS = 1000, 60.0  # limits of a part, which is the most that a killed process loses


@dataclass(frozen=True, slots=True)
class RemoteOutput:
    """Output file ``url``. Raises UsageError for another suffix, or contradicting options."""

    url: str
    overwrite: bool
    resume: bool = False

    def __post_init__(self) -> None:
        check_options(self.url, overwrite=self.overwrite, resume=self.resume)

    @property
    def path(self) -> str:
        return self.url

    @property
    def is_parquet(self) -> bool:
        return self.url.endswith(PARQUET_SUFFIX)


@dataclass(slots=True)
class RemoteWriter:
    """Writer to ``path`` of the fsspec file system ``fs``. ``token`` detects another run that writes there."""

    output: RemoteOutput
    fs: Any
    path: str
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    columns: Columns | None = None
    waiting: list[Row] = field(default_factory=list)
    num_stored: int = 0
    stored_at: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> str:
        return f"{self.path}.unfinished"

    def check(self) -> None:
        """Raise if existing files prevent writing. Writes nothing."""
        self.check_absent()
        if self.parts() and not (self.output.overwrite or self.output.resume):
            raise DestinationExistsError(f"{self.output.url}.unfinished {LEFT}")

    def check_absent(self) -> None:
        if self.fs.exists(self.path) and not self.output.overwrite:
            raise DestinationExistsError(f"{self.output.url} exists; --overwrite replaces it")

    def parts(self) -> list[str]:
        """Paths of the parts, sorted by the fixed-width number of their first row."""
        found = self.fs.find(self.folder) if self.fs.exists(self.folder) else []
        return sorted(path for path in found if path.rpartition("/")[2].startswith("rows-"))

    def begin(self, run: Run, columns: Columns, seen: Callable[[dict[str, Any]], None]) -> int:
        self.columns = columns
        with store_errors(self.output.url):
            parts = self.parts()
            if self.output.resume and parts:
                self._go_on(run, parts, seen)
            else:
                self._remove()
            self.fs.pipe_file(f"{self.folder}/run.json", run.encoded())
            self.fs.pipe_file(f"{self.folder}/writer", self.token.encode())
        return self.num_stored

    def _go_on(self, run: Run, parts: Sequence[str], seen: Callable[[dict[str, Any]], None]) -> None:
        where = f"{self.output.url}.unfinished"
        run.check(self.fs.cat_file(f"{self.folder}/run.json"), where)
        for part in parts:
            if part != self._part(self.num_stored):
                raise DestinationExistsError(
                    f"{where} lacks rows from {self.num_stored:,} on; start afresh with --overwrite"
                )
            for line in self.fs.cat_file(part).splitlines():
                seen(row_of(line, where))
                self.num_stored += 1

    def _part(self, first: int) -> str:
        return f"{self.folder}/rows-{first:012d}.jsonl"

    def write(self, rows: Sequence[Row]) -> None:
        self.waiting += rows
        if len(self.waiting) >= PART_ROWS or time.monotonic() - self.stored_at >= PART_SECONDS:
            self.store()

    def store(self) -> None:
        """Upload the waiting rows as a part."""
        if not self.waiting:
            return
        assert self.columns is not None
        with store_errors(self.output.url):
            self.fs.pipe_file(self._part(self.num_stored), encoded(self.waiting, self.columns))
        self.num_stored += len(self.waiting)
        self.waiting, self.stored_at = [], time.monotonic()

    def publish(self) -> None:
        """Publish the complete file, unless another run has written to it meanwhile."""
        self.store()
        with store_errors(self.output.url):
            self.check_absent()
            if self.fs.cat_file(f"{self.folder}/writer") != self.token.encode():
                raise DestinationExistsError(f"another run is writing to {self.output.url}")
            self._put_together()
            self._remove()

    def _put_together(self) -> None:
        file = self.fs.open(self.path, "wb", autocommit=False)
        try:
            self._copy(file)
            file.close()
        except BaseException:
            file.discard()
            raise
        file.commit()

    def _copy(self, file: BinaryIO) -> None:
        assert self.columns is not None
        lines = (line for part in self.parts() for line in self.fs.cat_file(part).splitlines(keepends=True))
        if self.output.is_parquet:
            copy_to_parquet(lines, file, self.columns)
        else:
            file.writelines(lines)

    def _remove(self) -> None:
        for path in [*self.parts(), f"{self.folder}/run.json", f"{self.folder}/writer"]:
            if self.fs.exists(path):
                self.fs.rm_file(path)


@contextmanager
def open_remote(output: RemoteOutput) -> Iterator[RemoteWriter]:
    """The remote counterpart of :func:`.output.open_output`."""
    if output.is_parquet:
        import pyarrow.parquet  # noqa: F401  # if it is missing, that is to be known before the first prediction
    fs, path = file_system(output.url)
    writer = RemoteWriter(output, fs, path)
    try:
        with store_errors(output.url):
            writer.check()
    except OSError as error:
        raise StoreError(f"{output.url} cannot be looked up ({error})") from error
    try:
        yield writer
        writer.publish()
    except BaseException as error:
        _keep(writer, error)
        raise


def _keep(writer: RemoteWriter, error: BaseException) -> None:
    try:
        writer.store()
    except Exception as failed:
        error.add_note(f"{len(writer.waiting):,} rows could not be kept ({failed})")
    if writer.num_stored:
        error.add_note(
            f"the {writer.num_stored:,} rows that were done are kept in {writer.output.url}.unfinished; "
            "--resume continues"
        )
