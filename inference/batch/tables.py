"""Rows of Parquet, JSON Lines, CSV and text files as inputs, read on demand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from ckpt_tools.errors import FormatError, UsageError

from ..common.errors import describe_error
from ..common.urls import open_file
from .items import MAX_BYTES, CellContent, Content, InputItem, MissingContent

INPUT_COLUMNS = ("text", "image", "path", "file")  # input columns to look for without ``--column``
PARQUET_ROWS = 64  # rows read at once, which may be images of some megabytes each


@dataclass(frozen=True, slots=True)
class TablePart:
    """A file of rows, or one row group of a Parquet file. ``column`` has the inputs and ``truth`` the true labels; a
    text has no columns. ``prefix`` begins the names of its rows, and ``first`` is the number of its first row.
    ``num_rows`` is None if that is known only after reading. ``span`` says which part of the whole input it is, from 0
    to 1."""

    url: str
    kind: str
    prefix: str
    span: tuple[float, float]
    column: str = ""
    truth: str | None = None
    first: int = 0
    num_rows: int | None = None
    group: int | None = None

    @property
    def base(self) -> str:
        """The folder of the file, which names in it are relative to."""
        return self.url.rpartition("/")[0] or "/"

    def items(self) -> Iterator[InputItem]:
        """Items of the rows; a bad row is one without content. Raises FormatError if the file cannot be read at all."""
        start, end = self.span
        with open_table(self.url) as file:
            for number, (content, truth, share) in enumerate(self._read_rows(file), self.first):
                yield InputItem(f"{self.prefix}{number}", content, truth, start + (end - start) * share)

    def _read_rows(self, file: BinaryIO) -> Iterator[tuple[Content, str | int | None, float]]:
        size = max(1, file.seek(0, io.SEEK_END))
        file.seek(0)
        if self.kind == "Parquet":
            yield from self._read_parquet_rows(file)
        elif self.kind == "text":
            for line in read_lines(file):
                yield self._parse_line(line), None, file.tell() / size
        else:
            for record in _read_json_records(file) if self.kind == "JSON Lines" else _read_csv_records(file):
                yield *self._parse_record(record), file.tell() / size

    def _read_parquet_rows(self, file: BinaryIO) -> Iterator[tuple[Content, str | int | None, float]]:
        from pyarrow import ArrowException, parquet

        columns = [self.column, *([self.truth] if self.truth else [])]
        try:
            batches = parquet.ParquetFile(file).iter_batches(PARQUET_ROWS, row_groups=[self.group], columns=columns)
            records = (record for batch in batches for record in batch.to_pylist())
            for done, record in enumerate(records, 1):
                yield *self._parse_record(record), done / max(1, self.num_rows or 1)
        except (ArrowException, OSError) as error:
            raise FormatError(f"{self.url} cannot be read ({describe_error(error)})") from error

    def _parse_line(self, line: bytes | MissingContent) -> Content:
        if isinstance(line, MissingContent):
            return line
        return CellContent(line.rstrip(b"\r\n").decode("utf-8", "surrogateescape"), self.base)

    def _parse_record(self, record: dict[str, Any] | MissingContent) -> tuple[Content, str | int | None]:
        if isinstance(record, MissingContent):
            return record, None
        content, truth = self._parse_cell(record), record.get(self.truth or "")
        if truth is not None and (isinstance(truth, bool) or not isinstance(truth, str | int)):
            return MissingContent(f"its {self.truth} is neither a text nor a whole number"), None
        return content, truth

    def _parse_cell(self, record: dict[str, Any]) -> Content:
        value = record.get(self.column)
        if isinstance(value, dict):
            # As datasets of Hugging Face keep images: {"bytes": ..., "path": ...}.
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value if len(value) <= MAX_BYTES else MissingContent(f"it has more than {MAX_BYTES // 2**20} MiB")
        if isinstance(value, str):
            return CellContent(value, self.base)
        return MissingContent(f"it has no {self.column}" if value is None else f"its {self.column} is not a text")


@contextmanager
def open_table(url: str) -> Iterator[BinaryIO]:
    """The file at ``url``, local or remote, opened at its beginning. Raises FormatError."""
    try:
        with open_file(url) as file:
            yield file
    except OSError as error:
        raise FormatError(f"{url} cannot be read ({error.strerror or error})") from error


def read_lines(file: BinaryIO) -> Iterator[bytes | MissingContent]:
    """Lines of a file. A line longer than an input may be is ``MissingContent``, and not held in memory."""
    while line := file.readline(MAX_BYTES):
        if len(line) < MAX_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(MAX_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield MissingContent(f"it has more than {MAX_BYTES // 2**20} MiB")


def _read_json_records(file: BinaryIO) -> Iterator[dict[str, Any] | MissingContent]:
    for line in read_lines(file):
        if isinstance(line, MissingContent):
            yield line
        elif line.strip():
            yield _parse_json_record(line)


def _parse_json_record(line: bytes) -> dict[str, Any] | MissingContent:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return MissingContent(f"it is not JSON ({describe_error(error)})")
    return record if isinstance(record, dict) else MissingContent("it is not a JSON object")


def _read_csv_records(file: BinaryIO) -> Iterator[dict[str, Any] | MissingContent]:
    """Records by the names in the first line. Bytes that are not UTF-8 are kept until a text is decoded."""
    csv.field_size_limit(MAX_BYTES)
    rows = csv.reader(_decode_lines(file), strict=True)
    names = next(rows, [])
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield MissingContent(f"it is not CSV ({error})")
            continue
        if row:
            has_all = len(row) == len(names)
            yield (
                dict(zip(names, row, strict=True))
                if has_all
                else MissingContent(f"it has {len(row)} fields, and the first line has {len(names)}")
            )


def _decode_lines(file: BinaryIO) -> Iterator[str]:
    is_first = True
    for line in read_lines(file):
        text = "\n" if isinstance(line, MissingContent) else line.decode("utf-8", "surrogateescape")
        yield text.removeprefix("\ufeff") if is_first else text
        is_first = False


def split_table(table: TablePart, column: str | None, truth: str | None) -> list[TablePart]:
    """One part per row group of a Parquet file, ``table`` itself for any other file, with the names of the columns.
    Raises UsageError if a column is not there, or which one holds the inputs is not clear. FormatError if the file is
    damaged."""
    if table.kind == "text":
        if column or truth:
            raise UsageError(f"{table.url} is a text: each line is an input, and there are no columns")
        return [table]
    names = read_column_names(table.url, table.kind)
    table = replace(table, column=_choose_column(table.url, names, column), truth=truth)
    if truth is not None:
        _check_column(table.url, names, truth)
    return _split_row_groups(table) if table.kind == "Parquet" else [table]


def _split_row_groups(table: TablePart) -> list[TablePart]:
    with open_table(table.url) as file:
        metadata = _open_parquet(table.url, file).metadata
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    start, end = table.span
    share, first, groups = (end - start) / max(1, sum(sizes)), 0, []
    for group, size in enumerate(sizes):
        span = (start + share * first, start + share * (first + size))
        groups.append(replace(table, span=span, first=first, num_rows=size, group=group))
        first += size
    return groups


def read_column_names(url: str, kind: str) -> list[str]:
    """Names of the columns; for JSON Lines, those of the first row that has any."""
    with open_table(url) as file:
        if kind == "Parquet":
            return list(_open_parquet(url, file).schema_arrow.names)
        if kind == "CSV":
            return next(csv.reader(_decode_lines(file), strict=True), [])
        return list(next((record for record in _read_json_records(file) if isinstance(record, dict)), {}))


def _open_parquet(url: str, file: BinaryIO) -> Any:
    from pyarrow import ArrowException, parquet

    try:
        return parquet.ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise FormatError(f"{url} is not a Parquet file ({describe_error(error)})") from error


def _choose_column(url: str, names: list[str], column: str | None) -> str:
    if column is not None:
        _check_column(url, names, column)
        return column
    fitting = [name for name in INPUT_COLUMNS if name in names]
    if len(fitting) != 1:
        raise UsageError(f"{url} has the columns {_join_names(names)}; say by --column which one holds the inputs")
    return fitting[0]


def _check_column(url: str, names: list[str], column: str) -> None:
    if column not in names:
        raise UsageError(f"{url} has no column {column}; it has {_join_names(names)}")


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:20]) or "none"
