"""``ckpt-tools inspect``, ``cat`` and ``formats``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import MAX_NOTES, print_json, progress, show_notes
from ckpt_tools.cli.wrapping import columns, echo, say, say_columns, say_pairs
from ckpt_tools.core.option_names import option
from ckpt_tools.core.wording import count, listed, one_line, printable, size, tensor_count, ties
from ckpt_tools.errors import SeveralCheckpointsError

if TYPE_CHECKING:
    from ckpt_tools.core.collapsing import TensorLine, TensorSummary
    from ckpt_tools.core.module_tree import ModuleSummary
    from ckpt_tools.core.summary import Summary, TensorStats


MAX_VALUE_CHARS = 400
"""Most characters of one hyperparameter group or entry; ``--json`` has more."""

MAX_PART_CHARS = 80
"""Most characters of a dict or list within an entry that is longer than ``MAX_VALUE_CHARS``."""

MAX_NAME_CHARS = 40

FIRST_OPTIONS = ("lr", "betas", "momentum", "eps", "weight_decay")
"""Hyperparameters that are shown first."""

GAP = "  "


def _only_with(name: str) -> Any:
    """A callback that refuses an option without the flag ``name``, which is read before it."""

    def check(context: click.Context, given: click.Parameter, value: Any) -> Any:
        if value is not None and value is not False and not context.params.get(name):
            raise click.UsageError(f"{given.opts[0]} is for --{name}; give both", context)
        return value

    return check


@click.command(
    "inspect",
    cls=options.Command,
    examples=(
        "ckpt-tools inspect run/step-1000",
        "ckpt-tools inspect s3://bucket/run@latest --tree --depth 2",
        "ckpt-tools inspect model --stats --include '*.weight'",
    ),
)
@options.source
@options.reading
@click.option(
    "--tensors", is_flag=True, is_eager=True, help="List the tensors; those that differ in a number share a line."
)
@click.option(
    "--all",
    "list_all",
    is_flag=True,
    callback=_only_with("tensors"),
    help="With --tensors, list every tensor in a line of its own. --json always does.",
)
@click.option("--tree", is_flag=True, is_eager=True, help="Show the modules with their parameters, sizes and dtypes.")
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    metavar="N",
    callback=_only_with("tree"),
    help="With --tree, the number of levels. Default: all.",
)
@click.option(
    "--stats", is_flag=True, help="Read the tensors, and show minimum, maximum, mean, norm, zeros, NaN and Inf of each."
)
@click.option("--sample", is_flag=True, help="With --stats, read at most 16 blocks of each tensor.")
@click.option("--include", multiple=True, metavar="GLOB", help="List only tensors whose names match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Do not list tensors whose names match. Repeatable.")
@options.running
@options.as_json
@options.moving
def inspect_command(
    src: str,
    tensors: bool,
    list_all: bool,
    tree: bool,
    depth: int | None,
    as_json: bool,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Show what a checkpoint holds, from its headers alone.

    --tensors, --tree and --stats show a list in place of the summary. Of a folder of several checkpoints, it lists
    them, as ls does.
    """
    from ckpt_tools import inspect

    try:
        with progress("reading", quiet=quiet or not chosen["stats"]) as on_progress:
            summary = inspect(src, on_progress=on_progress, **chosen)
    except SeveralCheckpointsError:
        if as_json or tensors or tree or chosen["stats"] or not _show_run(src, chosen["storage_options"]):
            raise
        return
    if as_json:
        found = summary.to_json(tensors=tensors)
        print_json(found | {"modules": [each.to_json() for each in summary.modules(depth)]} if tree else found)
        return
    if tensors and list_all:
        header = ("tensor", "slot", "kind", "dtype", "shape", "bytes", "shards")
        say_columns(header, map(_cells, summary.tensors), right=(5, 6))
    elif tensors:
        _show_collapsed(summary.lines())
    if tree:
        _space(after=tensors)
        _show_tree(summary.modules(depth))
    if summary.stats is not None:
        _space(after=tensors or tree)
        _show_stats(summary.stats)
    if not (tensors or tree or chosen["stats"]):
        _show_summary(summary)


def _space(*, after: bool) -> None:
    if after:
        echo("")


def _show_summary(summary: Summary) -> None:
    say_pairs((printable(name), printable(value)) for name, value in _rows(summary))
    show_notes(summary.notes, MAX_NOTES)


def _show_run(src: str, storage_options: Mapping[str, str]) -> bool:
    """``ls`` of a folder of checkpoints; False if it is not one."""
    from ckpt_tools import ls
    from ckpt_tools.cli.runs import show_listing

    found = ls(src, storage_options=storage_options).checkpoints
    names = [each.name for each in found if each.name != "."]
    if len(names) < 2:
        return False
    show_listing(found)
    place = src.rstrip("/")
    named = f"{place}/{names[0]}" if "@" in place else f"{place}@latest or {place}/{names[0]}"
    say(printable(f"{count(len(names), 'checkpoint')}; name one: {named}"))
    return True


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "source", summary.source
    yield "format", summary.format
    yield "step", _known(summary.step)
    yield "epoch", _known(summary.epoch)
    yield "world size", _known(summary.world_size)
    yield "parameters", f"{summary.num_parameters:,}"
    shards = f"{count(summary.num_shards, 'shard')} of {count(summary.num_files, 'file')}"
    yield "tensors", f"{tensor_count(summary.tensors_by_role)} in {shards}"
    yield "size", f"{size(summary.num_bytes)} of tensors in {size(summary.file_bytes)} of files"
    yield "dtypes", ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in summary.bytes_by_dtype.items())
    yield "optimizer", ", ".join(summary.optimizer_slots) or "none"
    yield from _group_rows(summary)
    if summary.aliases:
        yield "tied", ties(summary.aliases)
    if summary.values:
        yield "no tensors", f"{listed(summary.values)}; see --json"
    if summary.naming:
        yield "names", summary.naming
    if summary.wrapping:
        yield "wrappers", f"{listed(summary.wrapping)} in names; {option('strip', 'auto')} takes them off"
    for name, value in islice(summary.extras.items(), MAX_NOTES):
        yield _cut(name), _folded(value)
    if len(summary.extras) > MAX_NOTES:
        yield "", f"and {count(len(summary.extras) - MAX_NOTES, 'more entry', 'more entries')}; see --json"


def _known(number: int | float | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 3]}..."


def _folded(value: Any) -> str:
    """``value`` on one line. If it is long, what is long in it is shown as its size, and else the whole of it."""
    if len(one_line(value, MAX_VALUE_CHARS)) < MAX_VALUE_CHARS or not isinstance(value, dict | list):
        return one_line(value, MAX_VALUE_CHARS)
    if isinstance(value, dict):
        short = {name: _size_if_long(part) for name, part in value.items()}
        if len(text := one_line(short, MAX_VALUE_CHARS)) < MAX_VALUE_CHARS:
            return text
    return f"{_num_items(value)}; see --json"


def _size_if_long(part: Any) -> Any:
    is_long = isinstance(part, dict | list) and len(one_line(part, MAX_PART_CHARS)) == MAX_PART_CHARS
    return f"<{_num_items(part)}>" if is_long else part


def _num_items(value: dict[str, Any] | list[Any]) -> str:
    return count(len(value), "key" if isinstance(value, dict) else "item")


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


def _cells(tensor: TensorSummary) -> tuple[str, ...]:
    texts = (tensor.name, tensor.slot, tensor.kind, tensor.dtype, _shape(tensor.shape))
    return (*map(printable, texts), f"{tensor.num_bytes:,}", f"{tensor.num_shards:,}")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _show_collapsed(lines: Sequence[TensorLine]) -> None:
    """Print a line for all tensors that differ in the numbers in their names. Slots are shown if there are others than
    weights."""
    slots = [", ".join(slot if kind in ("parameter", "state") else kind for slot, kind in line.slots) for line in lines]
    has_slots = set(slots) - {"weight"}
    header = ("tensor", "shape", "dtype", "count", "size", *(["slots"] if has_slots else []))
    rows = [
        (
            printable(str(line.names)),
            _shape(line.shape),
            line.dtype,
            f"x{len(line.names):,}",
            size(line.num_bytes),
            *([printable(each)] if has_slots else []),
        )
        for line, each in zip(lines, slots, strict=True)
    ]
    say_columns(header, rows, right=(3, 4))


def _show_tree(rows: Sequence[ModuleSummary]) -> None:
    """Print the modules; on a terminal each below the one that it is in, in a pipe by their whole names. The optimizer
    has a column if its state is there."""
    is_terminal = columns(sys.stdout) is not None
    has_state = any(each.state_bytes for each in rows)
    header = ("module", "parameters", "weights", *(["optimizer"] if has_state else []), "dtypes")
    cells = [
        (
            printable(f"{GAP * each.depth}{each.name.rpartition('.')[2] or '.'}" if is_terminal else each.name or "."),
            f"{each.num_parameters:,}",
            size(each.weight_bytes),
            *([size(each.state_bytes)] if has_state else []),
            ", ".join(each.dtypes),
        )
        for each in rows
    ]
    say_columns(header, cells, right=range(1, len(header) - 1))


def _show_stats(stats: Iterable[TensorStats]) -> None:
    """Print the statistics of each tensor; of a sample, with the number of elements that were read."""
    from math import prod

    rows = [(each, prod(each.shape)) for each in stats]
    is_sample = any(each.num_read < numel and each.min is not None for each, numel in rows)
    header = ("tensor", "slot", "min", "max", "mean", "norm", "zeros", "NaN", "Inf", *(["read"] if is_sample else []))
    say_columns(
        header,
        [
            (
                *map(printable, (each.name, each.slot)),
                *map(_number, (each.min, each.max, each.mean, each.norm, each.num_zeros, each.num_nan, each.num_inf)),
                *([f"{each.num_read:,} of {numel:,}"] if is_sample else []),
            )
            for each, numel in rows
        ],
        right=range(2, len(header)),
    )


def _number(value: int | float | None) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


@click.command("cat", cls=options.Command, examples=("ckpt-tools cat run/step-1000 'encoder.weight[0:2, :]'",))
@options.source
@click.argument("name", metavar="'NAME[INDEX]'")
@click.option(
    "--slot",
    metavar="SLOT",
    help="What of the parameter: weight, master, exp_avg, ... Default: its master if there is one, else the weight.",
)
@options.reading
@click.option("--all", "list_all", is_flag=True, help="Print every element. Default: of more than 1,000, the edges.")
@options.as_json
@options.talking
def cat_command(src: str, name: str, list_all: bool, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Print a part of one tensor, as numpy prints it. Only that part is read.

    INDEX has integers, slices and an ellipsis, as numpy takes them: 'encoder.weight[0:2, :]'. --json prints every
    element of it.
    """
    from ckpt_tools import cat

    found = cat(src, name, **chosen)
    if as_json:
        print_json(found.to_json())
        return
    width = columns(sys.stdout)
    echo(found.text(all=list_all, **({} if width is None else {"width": width - 1})))


@click.command("formats", cls=options.Command, examples=("ckpt-tools formats",))
@options.as_json
@options.verbose
def formats_command(as_json: bool) -> None:
    """List the formats that can be read and written."""
    from ckpt_tools import list_formats

    found = list_formats()
    if as_json:
        print_json([row.to_json() for row in found])
        return
    rows = [(row.name, "yes" if row.reads else "", "yes" if row.writes else "", row.holds, row.about) for row in found]
    say_columns(("format", "read", "write", "holds", "description"), rows)
