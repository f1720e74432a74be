"""``ckpt-tools convert``, ``reshard``, ``plan``, ``consolidate`` and ``make-loadable``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json, show_notes, show_progress
from ckpt_tools.cli.wrapping import echo, print_item, print_table, print_wrapped
from ckpt_tools.core.format_names import FORMAT_BY_FILE_SUFFIX
from ckpt_tools.core.option_names import WrittenFormat, format_with_aliases
from ckpt_tools.messages.wording import (
    MAX_LISTED_NAMES,
    escape_unprintable,
    format_count,
    format_size,
    format_tensor_count,
    format_ties,
)

if TYPE_CHECKING:
    from ckpt_tools.conversion.loadable import LoadableReport
    from ckpt_tools.conversion.report import ConvertReport, PlanReport


_destination_argument = click.argument("dst", metavar="DST")
_to_option = click.option(
    "--to",
    metavar="FORMAT",
    help=f"The format to write: {format_with_aliases('to', get_args(WrittenFormat))}, or a plug-in's. "
    f"Default: by the ending of DST ({', '.join(FORMAT_BY_FILE_SUFFIX)}); with --like, safetensors.",
)
_state_option = options.state_option(
    "Write the weights alone, or the whole training state. Default: all if the format can hold it."
)
_max_shard_size_option = click.option(
    "--max-shard-size", metavar="SIZE", help="Split safetensors or torch output into files of at most this size."
)
_world_size_option = click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="The number of ranks to write for, in formats with files for each rank. Default: that of the source.",
)
_config_option = click.option(
    "--config",
    metavar="DIR",
    help="The folder with config.json, for sizes of the recipe too, and tokenizer and preprocessor files for the "
    "output. Default: beside SRC.",
)
_strict_option = click.option("--strict", is_flag=True, help="Fail if something would be dropped.")
_overwrite_option = click.option("--overwrite", is_flag=True, help="Replace the checkpoint at DST, and nothing else.")
_resume_option = click.option(
    "--resume",
    is_flag=True,
    help="Continue a killed run of the same conversion. If this run fails too, keep its output.",
)
_fsync_option = click.option("--fsync", is_flag=True, help="Wait until the output is safe from a power failure.")
_checksum_option = click.option("--checksum", is_flag=True, help="Also write the digests of the output, for verify.")

_writing_options = options.combine_decorators(
    options.execution_options,
    options.cluster_options,
    _strict_option,
    _overwrite_option,
    _resume_option,
    _fsync_option,
    _checksum_option,
)
"""The options of every command that writes a checkpoint."""


@click.command(
    "convert",
    cls=options.ConverterCommand,
    examples=(
        "ckpt-tools convert run/step-1000 model.safetensors",
        "ckpt-tools convert run/step-1000 resumed --to zero3 --world-size 8",
    ),
)
@options.source_argument
@_destination_argument
@_to_option
@_world_size_option
@options.reading_options
@_state_option
@options.selection_options
@_max_shard_size_option
@options.untie_option
@_config_option
@options.like_option
@_writing_options
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
@options.json_option
@options.transfer_options
def convert_command(src: str, dst: str, dry_run: bool, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write a checkpoint in another format."""
    from ckpt_tools import convert, plan

    if dry_run:
        _show_plan(plan(src, dst, **keywords), as_json)
        return
    with show_progress("converting", quiet=quiet) as on_progress:
        report = convert(src, dst, on_progress=on_progress, **keywords)
    _show_conversion(report, as_json, quiet)


@click.command(
    "reshard", cls=options.ConverterCommand, examples=("ckpt-tools reshard run/step-1000 resumed --world-size 16",)
)
@options.source_argument
@_destination_argument
@click.option(
    "--world-size", type=click.IntRange(min=1), metavar="N", required=True, help="The number of ranks to write for."
)
@options.reading_options
@_writing_options
@options.json_option
@options.transfer_options
def reshard_command(src: str, dst: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write the same checkpoint in the same format for another number of ranks."""
    from ckpt_tools import reshard

    with show_progress("resharding", quiet=quiet) as on_progress:
        report = reshard(src, dst, on_progress=on_progress, **keywords)
    _show_conversion(report, as_json, quiet)


@click.command(
    "plan", cls=options.ConverterCommand, examples=("ckpt-tools plan run/step-1000 model --to hf --dtype bf16",)
)
@options.source_argument
@_destination_argument
@_to_option
@_world_size_option
@options.reading_options
@_state_option
@options.selection_options
@_max_shard_size_option
@options.untie_option
@_config_option
@options.like_option
@options.execution_options
@_strict_option
@_overwrite_option
@_checksum_option
@options.json_option
@options.output_options
def plan_command(src: str, dst: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Show what convert would read, write, cast, drop and remove. Nothing is written."""
    from ckpt_tools import plan

    _show_plan(plan(src, dst, **keywords), as_json)


@click.command(
    "consolidate",
    cls=options.ConverterCommand,
    examples=("ckpt-tools consolidate run/step-1000 model --max-shard-size 5GB",),
)
@options.source_argument
@_destination_argument
@_to_option
@options.reading_options
@options.selection_options
@_max_shard_size_option
@options.untie_option
@_config_option
@options.like_option
@_writing_options
@options.json_option
@options.transfer_options
def consolidate_command(src: str, dst: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write the model's weights alone, as safetensors or in the format that DST's ending implies."""
    from ckpt_tools import consolidate

    with show_progress("consolidating", quiet=quiet) as on_progress:
        report = consolidate(src, dst, on_progress=on_progress, **keywords)
    _show_conversion(report, as_json, quiet)


@click.command(
    "merge-lora",
    cls=options.ConverterCommand,
    examples=("ckpt-tools merge-lora llama adapter merged --to safetensors",),
)
@click.argument("base", metavar="BASE")
@click.argument("adapter", metavar="ADAPTER")
@_destination_argument
@options.storage_option
@_to_option
@_world_size_option
@click.option(
    "--adapter", "adapter_name", metavar="NAME", help="The name of the adapter, if the training state has several."
)
@click.option(
    "--allow-missing", is_flag=True, help="Merge an adapter that lacks parts which adapter_config.json names."
)
@options.reading_options
@options.selection_options
@_max_shard_size_option
@options.untie_option
@click.option(
    "--config",
    metavar="DIR",
    help="The folder with config.json, adapter_config.json or both. Default: beside BASE and ADAPTER.",
)
@_writing_options
@options.json_option
@options.transfer_options
def merge_lora_command(base: str, adapter: str, dst: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write a base model with a LoRA adapter of PEFT merged into it.

    ADAPTER is a folder of PEFT, or a training state of any format with an adapter in it. Each weight becomes
    W + scale B A, in fp32, and is then cast to its dtype in BASE.
    """
    from ckpt_tools import merge_lora

    with show_progress("merging", quiet=quiet) as on_progress:
        report = merge_lora(base, adapter, dst, on_progress=on_progress, **keywords)
    _show_conversion(report, as_json, quiet)


def _show_plan(report: PlanReport, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json())
        return
    print_wrapped(f"{report.source_format} to {report.target_format}: {_format_sizes(report)}")
    print_wrapped(
        f"reads {format_size(report.bytes_read)}, writes {format_size(report.bytes_written)} in "
        f"{format_count(report.num_tasks, 'task')}"
    )
    print_wrapped(f"peak memory {format_size(report.peak_memory_bytes)}")
    _show_files(report.files)
    _show_name_changes(report)
    if report.removed_files:
        print_wrapped(
            f"removes {format_count(len(report.removed_files), 'file')} of DST, {format_size(report.removed_bytes)}"
        )
        _show_files(report.removed_files)
    show_notes(report.notes)


def _format_sizes(report: PlanReport) -> str:
    tensors, files = (
        format_tensor_count(report.tensors_by_role, format_size(report.num_bytes)),
        format_count(len(report.files), "file"),
    )
    return f"{tensors} in {files} ({format_size(report.file_bytes)})"


def _show_name_changes(report: PlanReport) -> None:
    if report.tied:
        print_wrapped(escape_unprintable(format_ties(report.tied)))
    if report.recipe is not None:
        recipe = report.recipe
        direction = " --inverse" if recipe.inverse else ""
        print_wrapped(escape_unprintable(f"recipe: {recipe.name}{direction} ({recipe.before} to {recipe.after})"))
    if report.renamed:
        pairs = [f"{old} to {new}" for old, new in islice(report.renamed.items(), MAX_LISTED_NAMES)]
        more = len(report.renamed) - len(pairs)
        text = ", ".join(pairs) + (f" and {more:,} more" if more else "")
        print_wrapped(escape_unprintable(f"renamed: {format_count(len(report.renamed), 'name')} ({text})"))


def _show_files(sizes: Mapping[str, int]) -> None:
    rows = [(f"{num_bytes:,}", escape_unprintable(path)) for path, num_bytes in sizes.items()]
    print_table(("bytes", "file"), rows, right_aligned=(0,))


def _show_conversion(report: ConvertReport, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(report.to_json())
        return
    rate = format_size(report.bytes_written / max(report.seconds, 1e-9))
    print_wrapped(f"{report.destination}: {_format_sizes(report.plan)}, {report.seconds:.2f} s ({rate}/s)")
    if report.bytes_recovered:
        print_wrapped(f"{format_size(report.bytes_recovered)} were kept from an earlier run")
    if report.digests:
        print_wrapped(f"digests in {report.digests}")
    _show_name_changes(report.plan)
    show_notes(report.plan.notes)
    if not quiet:
        print_wrapped("load it with:")
        for line in report.loading.split("\n"):  # as they are: code that is wrapped cannot be copied
            echo(f"  {escape_unprintable(line)}")


@click.command(
    "make-loadable", cls=options.ConverterCommand, examples=("ckpt-tools make-loadable foreign.pt loadable.pt",)
)
@options.source_argument
@_destination_argument
@click.option("--strict", is_flag=True, help="Fail if something would be left out.")
@click.option("--overwrite", is_flag=True, help="Replace the file at DST, and nothing else.")
@_fsync_option
@options.json_option
@options.transfer_options
def make_loadable_command(src: str, dst: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write a file of torch.save again, so that torch.load(weights_only=True) takes it.

    Objects of classes that it does not allow are left out or become plain values, and are
    listed. Tensors stay bit for bit as they are. Nothing is executed.
    """
    from ckpt_tools import make_loadable

    with show_progress("writing", quiet=quiet) as on_progress:
        report = make_loadable(src, dst, on_progress=on_progress, **keywords)
    if as_json:
        print_json(report.to_json())
    else:
        _show_loadable(report)


def _show_loadable(report: LoadableReport) -> None:
    print_wrapped(
        f"{report.destination}: {format_count(report.num_storages, 'storage')}, {format_size(report.bytes_written)}"
    )
    for omitted in report.left_out:
        tensors = f" with {format_count(omitted.num_tensors, 'tensor')}" if omitted.num_tensors else ""
        print_item("left out", escape_unprintable(f"{omitted.place}: {omitted.kind}{tensors}"))
    for changed in report.replaced:
        print_item("replaced", escape_unprintable(f"{changed.place}: {changed.kind} by {changed.by}"))
