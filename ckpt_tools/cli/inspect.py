"""``ckpt-tools inspect``, ``cat`` and ``formats``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.output import (
    MAX_NOTES,
    echo,
    get_terminal_width,
    print_json,
    print_pairs,
    print_table,
    print_wrapped,
    show_notes,
)
from ckpt_tools.cli.reporting import show_progress
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadKeywords
from ckpt_tools.errors import SeveralCheckpointsError
from ckpt_tools.messages.wording import (
    escape_unprintable,
    format_count,
    format_one_line,
    format_size,
    format_tensor_count,
    format_ties,
    join_names,
)

if TYPE_CHECKING:
    from ckpt_tools.core.collapsing import TensorLine
    from ckpt_tools.core.module_tree import ModuleSummary
    from ckpt_tools.core.summary import Summary, TensorStats


MAX_VALUE_CHARS = 400
"""Most characters of one hyperparameter group or entry; ``--json`` has more."""

MAX_PART_CHARS = 80
"""Most characters of a dict or list within an entry that is longer than ``MAX_VALUE_CHARS``."""

MAX_NAME_CHARS = 40

FIRST_OPTIONS = ("lr", "betas", "momentum", "eps", "weight_decay")
"""Hyperparameters that are shown first."""

INDENT = "  "


def _require_flag(flag: str) -> Any:
    """A callback that refuses an option without the flag ``flag``, which is read before it."""

    def check_flag(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value is not None and value is not False and not context.params.get(flag):
            raise click.UsageError(f"{parameter.opts[0]} is for --{flag}; give both", context)
        return value

    return check_flag


@click.command(
    "inspect",
    cls=options.ConverterCommand,
    examples=(
        "ckpt-tools inspect run/step-1000",
        "ckpt-tools inspect s3://bucket/run@latest --tree --depth 2",
        "ckpt-tools inspect model --stats --include '*.weight'",
    ),
)
@options.source_argument
@options.options_of(ReadKeywords)
@click.option(
    "--tensors", is_flag=True, is_eager=True, help="List the tensors; those that differ in a number share a line."
)
@click.option(
    "--all",
    "list_all",
    is_flag=True,
    callback=_require_flag("tensors"),
    help="With --tensors, list every tensor in a line of its own. --json always does.",
)
@click.option("--tree", is_flag=True, is_eager=True, help="Show the modules with their parameters, sizes and dtypes.")
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    metavar="N",
    callback=_require_flag("tree"),
    help="With --tree, the number of levels. Default: all.",
)
@click.option(
    "--stats", is_flag=True, help="Read the tensors, and show minimum, maximum, mean, norm, zeros, NaN and Inf of each."
)
@click.option("--sample", is_flag=True, help="With --stats, read at most 16 blocks of each tensor.")
@options.option_of("include", "List only tensors whose names match. Repeatable.")
@options.option_of("exclude", "Do not list tensors whose names match. Repeatable.")
@options.option_of("memory")
@options.option_of("workers")
@options.json_option
@options.transfer_options
def inspect_command(
    src: str,
    tensors: bool,
    list_all: bool,
    tree: bool,
    depth: int | None,
    as_json: bool,
    quiet: bool,
    **keywords: Any,
) -> None:
    """Show what a checkpoint holds, from its headers alone.

    --tensors, --tree and --stats show a list in place of the summary. Of a folder of several checkpoints, it lists
    them, as ls does.
    """
    from ckpt_tools import inspect

    try:
        with show_progress("reading", quiet=quiet or not keywords["stats"]) as on_progress:
            summary = inspect(src, on_progress=on_progress, **keywords)
    except SeveralCheckpointsError:
        if as_json or tensors or tree or keywords["stats"] or not _show_run_listing(src, keywords["storage_options"]):
            raise
        return
    if as_json:
        summary_json = summary.to_json(tensors=tensors)
        print_json(
            summary_json | {"modules": [each.to_json() for each in summary.modules(depth)]} if tree else summary_json
        )
        return
    if tensors and list_all:
        header = ("tensor", "slot", "kind", "dtype", "shape", "bytes", "shards")
        tensor_rows = []
        for each in summary.tensors:
            texts = (each.name, each.slot, each.kind, each.dtype, _format_shape(each.shape))
            tensor_rows.append((*map(escape_unprintable, texts), f"{each.num_bytes:,}", f"{each.num_shards:,}"))
        print_table(header, tensor_rows, right_aligned=(5, 6))
    elif tensors:
        _show_collapsed_tensors(summary.lines())
    if tree:
        _print_separator(is_needed=tensors)
        _show_tree(summary.modules(depth))
    if summary.stats is not None:
        _print_separator(is_needed=tensors or tree)
        _show_stats(summary.stats)
    if not (tensors or tree or keywords["stats"]):
        rows = _list_summary_rows(summary)
        print_pairs((escape_unprintable(name), escape_unprintable(value)) for name, value in rows)
        show_notes(summary.notes, MAX_NOTES)


def _print_separator(*, is_needed: bool) -> None:
    if is_needed:
        echo("")


def _show_run_listing(src: str, storage_options: Mapping[str, str]) -> bool:
    """``ls`` of a folder of checkpoints; False if it is not one."""
    from ckpt_tools import ls
    from ckpt_tools.cli.runs import show_listing

    checkpoints = ls(src, storage_options=storage_options).checkpoints
    names = [each.name for each in checkpoints if each.name != "."]
    if len(names) < 2:
        return False
    show_listing(checkpoints)
    url = src.rstrip("/")
    example_urls = f"{url}/{names[0]}" if "@" in url else f"{url}@latest or {url}/{names[0]}"
    print_wrapped(escape_unprintable(f"{format_count(len(names), 'checkpoint')}; name one: {example_urls}"))
    return True


def _list_summary_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "source", summary.source
    yield "format", summary.format
    yield "step", _format_if_known(summary.step)
    yield "epoch", _format_if_known(summary.epoch)
    yield "world size", _format_if_known(summary.world_size)
    yield "parameters", f"{summary.num_parameters:,}"
    shards = f"{format_count(summary.num_shards, 'shard')} of {format_count(summary.num_files, 'file')}"
    yield "tensors", f"{format_tensor_count(summary.tensors_by_role)} in {shards}"
    yield "size", f"{format_size(summary.num_bytes)} of tensors in {format_size(summary.file_bytes)} of files"
    yield "dtypes", ", ".join(f"{name} {format_size(num_bytes)}" for name, num_bytes in summary.bytes_by_dtype.items())
    yield "optimizer", ", ".join(summary.optimizer_slots) or "none"
    yield from _list_group_rows(summary)
    if summary.aliases:
        yield "tied", format_ties(summary.aliases)
    if summary.values:
        yield "no tensors", f"{join_names(summary.values)}; see --json"
    if summary.naming:
        yield "names", summary.naming
    if summary.wrapping:
        yield "wrappers", f"{join_names(summary.wrapping)} in names; {format_option('strip', 'auto')} takes them off"
    for name, value in islice(summary.extras.items(), MAX_NOTES):
        short_name = name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 3]}..."
        yield short_name, _format_value(value)
    if len(summary.extras) > MAX_NOTES:
        yield "", f"and {format_count(len(summary.extras) - MAX_NOTES, 'more entry', 'more entries')}; see --json"


def _format_if_known(number: int | float | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _format_value(value: Any) -> str:
    """``value`` on one line. If it is long, what is long in it is shown as its size, and else the whole of it."""
    if len(format_one_line(value, MAX_VALUE_CHARS)) < MAX_VALUE_CHARS or not isinstance(value, dict | list):
        return format_one_line(value, MAX_VALUE_CHARS)
    if isinstance(value, dict):
        short = {name: _replace_if_long(part) for name, part in value.items()}
        if len(text := format_one_line(short, MAX_VALUE_CHARS)) < MAX_VALUE_CHARS:
            return text
    return f"{_count_items(value)}; see --json"


def _replace_if_long(part: Any) -> Any:
    is_long = isinstance(part, dict | list) and len(format_one_line(part, MAX_PART_CHARS)) == MAX_PART_CHARS
    return f"<{_count_items(part)}>" if is_long else part


def _count_items(value: dict[str, Any] | list[Any]) -> str:
    return format_count(len(value), "key" if isinstance(value, dict) else "item")


def _list_group_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    groups = summary.groups
    if not groups:
        return
    total = sum(group.num_tensors for group in groups)
    yield "groups", f"{format_count(len(groups), 'parameter group')} of {format_count(total, 'parameter')}"
    for number, group in enumerate(groups[:MAX_NOTES]):
        set_options = {name: value for name, value in group.options.items() if value is not None and value is not False}
        first_options = {name: set_options[name] for name in FIRST_OPTIONS if name in set_options}
        yield (
            f"  group {number}",
            f"{format_count(group.num_tensors, 'parameter')}; "
            f"{format_one_line({**first_options, **set_options}, MAX_VALUE_CHARS)}",
        )
    if len(groups) > MAX_NOTES:
        yield "", f"and {format_count(len(groups) - MAX_NOTES, 'more group')}; see --json"


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _show_collapsed_tensors(lines: Sequence[TensorLine]) -> None:
    """Print a line for all tensors that differ in the numbers in their names. Slots are shown if there are others than
    weights."""
    slot_texts = [
        ", ".join(slot if kind in ("parameter", "state") else kind for slot, kind in line.slots) for line in lines
    ]
    has_slots = set(slot_texts) - {"weight"}
    header = ("tensor", "shape", "dtype", "count", "size", *(["slots"] if has_slots else []))
    rows = [
        (
            escape_unprintable(str(line.names)),
            _format_shape(line.shape),
            line.dtype,
            f"x{len(line.names):,}",
            format_size(line.num_bytes),
            *([escape_unprintable(each)] if has_slots else []),
        )
        for line, each in zip(lines, slot_texts, strict=True)
    ]
    print_table(header, rows, right_aligned=(3, 4))


def _show_tree(rows: Sequence[ModuleSummary]) -> None:
    """Print the modules; on a terminal each below the one that it is in, in a pipe by their whole names. The optimizer
    has a column if its state is there."""
    is_terminal = get_terminal_width(sys.stdout) is not None
    has_state = any(each.state_bytes for each in rows)
    header = ("module", "parameters", "weights", *(["optimizer"] if has_state else []), "dtypes")
    cells = [
        (
            escape_unprintable(
                f"{INDENT * each.depth}{each.name.rpartition('.')[2] or '.'}" if is_terminal else each.name or "."
            ),
            f"{each.num_parameters:,}",
            format_size(each.weight_bytes),
            *([format_size(each.state_bytes)] if has_state else []),
            ", ".join(each.dtypes),
        )
        for each in rows
    ]
    print_table(header, cells, right_aligned=range(1, len(header) - 1))


def _show_stats(stats: Iterable[TensorStats]) -> None:
    """Print the statistics of each tensor; of a sample, with the number of elements that were read."""
    from math import prod

    rows = [(each, prod(each.shape)) for each in stats]
    is_sample = any(each.num_read < numel and each.min is not None for each, numel in rows)
    header = ("tensor", "slot", "min", "max", "mean", "norm", "zeros", "NaN", "Inf", *(["read"] if is_sample else []))
    print_table(
        header,
        [
            (
                *map(escape_unprintable, (each.name, each.slot)),
                *map(
                    _format_number,
                    (each.min, each.max, each.mean, each.norm, each.num_zeros, each.num_nan, each.num_inf),
                ),
                *([f"{each.num_read:,} of {numel:,}"] if is_sample else []),
            )
            for each, numel in rows
        ],
        right_aligned=range(2, len(header)),
    )


def _format_number(value: int | float | None) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


@click.command("cat", cls=options.ConverterCommand, examples=("ckpt-tools cat run/step-1000 'encoder.weight[0:2, :]'",))
@options.source_argument
@click.argument("name", metavar="'NAME[INDEX]'")
@click.option(
    "--slot",
    metavar="SLOT",
    help="What of the parameter: weight, master, exp_avg, ... Default: its master if there is one, else the weight.",
)
@options.options_of(ReadKeywords)
@click.option("--all", "list_all", is_flag=True, help="Print every element. Default: of more than 1,000, the edges.")
@options.json_option
@options.output_options
def cat_command(src: str, name: str, list_all: bool, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Print a part of one tensor, as numpy prints it. Only that part is read.

    INDEX has integers, slices and an ellipsis, as numpy takes them: 'encoder.weight[0:2, :]'. --json prints every
    element of it.
    """
    from ckpt_tools import cat

    tensor_slice = cat(src, name, **keywords)
    if as_json:
        print_json(tensor_slice.to_json())
        return
    width = get_terminal_width(sys.stdout)
    echo(tensor_slice.text(all=list_all, **({} if width is None else {"width": width - 1})))


@click.command("formats", cls=options.ConverterCommand, examples=("ckpt-tools formats",))
@options.json_option
@options.verbosity_options
def formats_command(as_json: bool) -> None:
    """List the formats that can be read and written."""
    from ckpt_tools import list_formats

    formats = list_formats()
    if as_json:
        print_json([row.to_json() for row in formats])
        return
    rows = [
        (row.name, "yes" if row.reads else "", "yes" if row.writes else "", row.holds, row.about) for row in formats
    ]
    print_table(("format", "read", "write", "holds", "description"), rows)
