"""``ckpt-tools inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import MAX_NOTES, print_json, show, table
from ckpt_tools.core.wording import count, listed, size

if TYPE_CHECKING:
    from ckpt_tools.core.summary import Summary


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
    _show_summary(summary)
    if tensors:
        _show_tensors(summary)


def _show_summary(summary: Summary) -> None:
    drawn = table(None, "", "")
    drawn.show_header = False
    for name, value in _rows(summary):
        drawn.add_row(name, value)
    show(drawn)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    dtypes = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in summary.bytes_by_dtype.items())
    rows = [
        ("source", summary.source),
        ("format", summary.format),
        ("step", "unknown" if summary.step is None else f"{summary.step:,}"),
        ("world size", "unknown" if summary.world_size is None else str(summary.world_size)),
        ("parameters", f"{summary.num_parameters:,}"),
        (
            "tensors",
            f"{summary.num_tensors:,} in {count(summary.num_shards, 'shard')} of {count(summary.num_files, 'file')}",
        ),
        ("bytes", size(summary.num_bytes)),
        ("dtypes", dtypes),
        ("optimizer", ", ".join(summary.optimizer_slots) or "none"),
    ]
    if summary.group_sizes:
        rows.append(("groups", f"{len(summary.group_sizes)} of {', '.join(map(str, summary.group_sizes))} parameters"))
    if summary.aliases:
        rows.append(("tied", listed([f"{alias} = {owner}" for alias, owner in summary.aliases.items()], MAX_NOTES)))
    if summary.extras:
        rows.append(("extras", listed(summary.extras, MAX_NOTES)))
    return rows


def _show_tensors(summary: Summary) -> None:
    drawn = table(None, "tensor", "slot", "kind", "dtype", "shape", "bytes", "shards", right=("bytes", "shards"))
    for tensor in summary.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        drawn.add_row(
            tensor.name,
            tensor.slot,
            tensor.kind,
            tensor.dtype,
            shape,
            f"{tensor.num_bytes:,}",
            f"{tensor.num_shards:,}",
        )
    show(drawn)
