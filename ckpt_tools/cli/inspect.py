"""``ckpt-tools inspect`` and ``formats``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import MAX_NOTES, print_json, show_notes
from ckpt_tools.cli.wrapping import columns, echo, say, say_columns, say_pairs
from ckpt_tools.core.option_names import option
from ckpt_tools.core.wording import count, listed, one_line, printable, size

if TYPE_CHECKING:
    from ckpt_tools.core.summary import Summary, TensorSummary


MAX_VALUE_CHARS = 400
"""Most characters of one hyperparameter group or entry; ``--json`` has more."""

MAX_NAME_CHARS = 40

FIRST_OPTIONS = ("lr", "betas", "momentum", "eps", "weight_decay")
"""Hyperparameters that are shown first."""

GAP = "  "


@click.command("inspect")
@options.source
@options.reading
@click.option("--tensors", is_flag=True, help="List every tensor.")
@options.as_json
@options.talking
def inspect_command(src: str, tensors: bool, as_json: bool, quiet: bool, **reading: Any) -> None:
    """Show what a checkpoint holds, from its headers alone."""
    from ckpt_tools import inspect

    summary = inspect(src, **reading)
    if as_json:
        print_json(summary.to_json(tensors=tensors))
        return
    say_pairs((printable(name), printable(value)) for name, value in _rows(summary))
    show_notes(summary.notes, MAX_NOTES)
    if tensors:
        _show_tensors(summary)


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "source", summary.source
    yield "format", summary.format
    yield "step", _known(summary.step)
    yield "epoch", _known(summary.epoch)
    yield "world size", _known(summary.world_size)
    yield "parameters", f"{summary.num_parameters:,}"
    shards = f"{count(summary.num_shards, 'shard')} of {count(summary.num_files, 'file')}"
    yield "tensors", f"{count(summary.num_tensors, 'tensor')} in {shards}"
    yield "size", f"{size(summary.num_bytes)} of tensors in {size(summary.file_bytes)} of files"
    yield "dtypes", ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in summary.bytes_by_dtype.items())
    yield "optimizer", ", ".join(summary.optimizer_slots) or "none"
    yield from _group_rows(summary)
    if summary.aliases:
        yield "tied", listed([f"{alias} = {owner}" for alias, owner in summary.aliases.items()], MAX_NOTES)
    if summary.naming:
        yield "names", summary.naming
    if summary.wrapping:
        yield "wrappers", f"{listed(summary.wrapping)} in names; {option('strip', 'auto')} takes them off"
    for name, value in islice(summary.extras.items(), MAX_NOTES):
        yield _cut(name), one_line(value, MAX_VALUE_CHARS)
    if len(summary.extras) > MAX_NOTES:
        yield "", f"and {count(len(summary.extras) - MAX_NOTES, 'more entry', 'more entries')}; see --json"


def _known(number: int | float | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 3]}..."


def _group_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    groups = summary.groups
    if not groups:
        return
    total = sum(group.num_tensors for group in groups)
    yield "groups", f"{count(len(groups), 'parameter group')} of {count(total, 'parameter')}"
    for number, group in enumerate(groups[:MAX_NOTES]):
        said = {name: value for name, value in group.options.items() if value is not None and value is not False}
        first = {name: said[name] for name in FIRST_OPTIONS if name in said}
        yield (
            f"  group {number}",
            f"{count(group.num_tensors, 'parameter')}; {one_line({**first, **said}, MAX_VALUE_CHARS)}",
        )
    if len(groups) > MAX_NOTES:
        yield "", f"and {count(len(groups) - MAX_NOTES, 'more group')}; see --json"


def _show_tensors(summary: Summary) -> None:
    """Print one line per tensor; on a narrow terminal, the name on a line of its own."""
    rows = [_HEADINGS, *map(_cells, summary.tensors)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    width = columns(sys.stdout)
    if width is None or sum(widths) + len(GAP) * (len(widths) - 1) <= width:
        for row in rows:
            echo(_aligned(row, widths))
        return
    for name, block in groupby(rows[1:], key=itemgetter(0)):
        echo("\n".join(folded(name, width)))
        for row in block:
            say(f"{GAP}{_aligned(row[1:], widths[1:])}")


_HEADINGS = ("tensor", "slot", "kind", "dtype", "shape", "bytes", "shards")


def _cells(tensor: TensorSummary) -> tuple[str, ...]:
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    texts = (tensor.name, tensor.slot, tensor.kind, tensor.dtype, shape)
    return (*map(printable, texts), f"{tensor.num_bytes:,}", f"{tensor.num_shards:,}")


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Text to the left, the two numbers at the end to the right."""
    *texts, num_bytes, num_shards = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    numbers = (cell.strip().rjust(width) for cell, width in zip((num_bytes, num_shards), widths[-2:], strict=True))
    return GAP.join([*texts, *numbers])


def folded(name: str, width: int) -> list[str]:
    """``name`` in lines of at most ``width``, broken behind dots; a part that is longer stays whole."""
    lines = [""]
    for part in re.split(r"(?<=\.)", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


@click.command("formats")
@options.as_json
def formats_command(as_json: bool) -> None:
    """List the formats that can be read and written."""
    from ckpt_tools import list_formats

    found = list_formats()
    if as_json:
        print_json([row.to_json() for row in found])
        return
    rows = [(row.name, "yes" if row.reads else "", "yes" if row.writes else "", row.holds, row.about) for row in found]
    say_columns(("format", "read", "write", "holds", "description"), rows)
