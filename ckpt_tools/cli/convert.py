"""``ckpt-tools convert``, ``reshard``, ``plan``, ``consolidate`` and ``make-loadable``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.output import echo, print_item, print_result, print_table, print_wrapped, show_notes
from ckpt_tools.cli.reporting import show_progress
from ckpt_tools.core.options import (
    AverageKeywords,
    ConvertKeywords,
    ExecutionKeywords,
    LoadableKeywords,
    MergeKeywords,
    QuantizationKeywords,
    ReadKeywords,
    ReshardKeywords,
)
from ckpt_tools.messages.wording import (
    escape_unprintable,
    format_count,
    format_size,
    format_tensor_count,
    format_ties,
    join_names,
)

if TYPE_CHECKING:
    from ckpt_tools.conversion.loadable import LoadableReport
    from ckpt_tools.conversion.report import ConvertReport, PlanReport


MAX_LISTED_PARTS = 10
CPUS_OF_A_PART = 2
SCHEDULERS = ("slurm", "kubernetes")

_destination_argument = click.argument("dst", metavar="DST")


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
@options.options_of(ConvertKeywords)
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
@options.json_option
@options.transfer_options
def convert_command(src: str, dst: str, dry_run: bool, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write a checkpoint in another format.

    SRC is a folder, a file or a URL (s3://, hf://, https://) of a checkpoint, or one of a run, as in
    run@latest. DST is a folder, or a file whose ending names the format, such as model.safetensors.
    """
    from ckpt_tools import convert, plan

    if dry_run:
        print_result(plan(src, dst, **keywords), as_json, _show_plan)
        return
    with show_progress("converting", quiet=quiet) as on_progress:
        report = convert(src, dst, on_progress=on_progress, **keywords)
    print_result(report, as_json, partial(_show_conversion, quiet=quiet))


@click.command(
    "reshard", cls=options.ConverterCommand, examples=("ckpt-tools reshard run/step-1000 resumed --world-size 16",)
)
@options.source_argument
@_destination_argument
@options.option_of("world_size", "The number of ranks to write for.", required=True)
@options.options_of(ReadKeywords, ExecutionKeywords)
@options.json_option
@options.transfer_options
def reshard_command(src: str, dst: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write the same checkpoint in the same format for another number of ranks."""
    from ckpt_tools import reshard

    with show_progress("resharding", quiet=quiet) as on_progress:
        report = reshard(src, dst, on_progress=on_progress, **keywords)
    print_result(report, as_json, partial(_show_conversion, quiet=quiet))


@click.command(
    "plan", cls=options.ConverterCommand, examples=("ckpt-tools plan run/step-1000 model --to hf --dtype bf16",)
)
@options.source_argument
@_destination_argument
@options.options_of(ConvertKeywords, without=("runner", "address", "resume", "fsync"))
@click.option(
    "--script",
    type=click.Choice(SCHEDULERS),
    help="Print the job that converts in parts, as many as --part 1/N says.",
)
@options.json_option
@options.output_options
def plan_command(src: str, dst: str, script: str | None, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Show what convert would read, write, cast, drop and remove. Nothing is written."""
    from ckpt_tools import plan

    report = plan(src, dst, **keywords)
    if script is None:
        print_result(report, as_json, _show_plan)
        return
    if keywords["part"] is None or as_json:
        raise click.UsageError("--script prints a job of parts: give --part 1/N, and no --json")
    from ckpt_tools.cli.job_scripts import format_job_script
    from ckpt_tools.core.part_number import PartNumber

    part = PartNumber.parse(keywords["part"], os.environ)
    echo(format_job_script(script, click.get_current_context(), part, report.peak_memory_bytes, CPUS_OF_A_PART))


@click.command(
    "consolidate",
    cls=options.ConverterCommand,
    examples=("ckpt-tools consolidate run/step-1000 model --max-shard-size 5GB",),
)
@options.source_argument
@_destination_argument
@options.option_of("to")
@options.options_of(ReshardKeywords, QuantizationKeywords)
@options.json_option
@options.transfer_options
def consolidate_command(src: str, dst: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write the model's weights alone, as safetensors or in the format that DST's ending implies."""
    from ckpt_tools import consolidate

    with show_progress("consolidating", quiet=quiet) as on_progress:
        report = consolidate(src, dst, on_progress=on_progress, **keywords)
    print_result(report, as_json, partial(_show_conversion, quiet=quiet))


@click.command(
    "merge-lora",
    cls=options.ConverterCommand,
    examples=("ckpt-tools merge-lora llama adapter merged --to safetensors",),
)
@click.argument("base", metavar="BASE")
@click.argument("adapter", metavar="ADAPTER")
@_destination_argument
@options.options_of(
    MergeKeywords,
    config="The folder with config.json, adapter_config.json or both. Default: beside BASE and ADAPTER.",
)
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
    print_result(report, as_json, partial(_show_conversion, quiet=quiet))


@click.command(
    "average",
    cls=options.ConverterCommand,
    examples=(
        "ckpt-tools average run/step-1000 run/step-2000 averaged --to hf",
        "ckpt-tools average run averaged --to hf --last 5 --every 1000",
        "ckpt-tools average run averaged.safetensors --last 5 --decay 0.9",
    ),
)
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@_destination_argument
@click.option(
    "--last",
    type=click.IntRange(min=1),
    metavar="K",
    help="Average the K complete checkpoints of largest steps of SRC.",
)
@click.option(
    "--every", type=click.IntRange(min=1), metavar="N", help="Average those of SRC whose step is a multiple of N."
)
@options.number_list_option(
    *("--coefficients", "C,C,...", float, "1,2,3"),
    "A positive number for each source: sum(C * SRC) / sum(C). Default: equal ones.",
)
@click.option(
    "--decay",
    type=float,
    metavar="D",
    help="Average exponentially: A is the first SRC, and then D * A + (1 - D) * SRC with each further one.",
)
@options.options_of(
    AverageKeywords,
    weights="The copy of a weight to average: its fp32 master if there is one, or the model's. Default: master.",
    buffers="Tensors that are buffers of the model, which are not averaged. Repeatable.",
)
@options.json_option
@options.transfer_options
def average_command(sources: tuple[str, ...], dst: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write the average of the weights of several checkpoints.

    SRC are checkpoints of any formats and world sizes with the same tensors, the oldest first, or one run with --last
    or --every. Sums are in fp32, cast once to the dtype of the last SRC; integers, bools and buffers are those of the
    last SRC.
    """
    from ckpt_tools import average

    with show_progress("averaging", quiet=quiet) as on_progress:
        report = average(sources, dst, on_progress=on_progress, **keywords)
    print_result(report, as_json, partial(_show_conversion, quiet=quiet))


def _show_plan(report: PlanReport) -> None:
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
    tensors = format_tensor_count(report.tensors_by_role, format_size(report.num_bytes))
    return f"{tensors} in {format_count(len(report.files), 'file')} ({format_size(report.file_bytes)})"


def _show_name_changes(report: PlanReport) -> None:
    if report.tied:
        print_wrapped(escape_unprintable(format_ties(report.tied)))
    if report.recipe is not None:
        recipe = report.recipe
        direction = " --inverse" if recipe.inverse else ""
        print_wrapped(escape_unprintable(f"recipe: {recipe.name}{direction} ({recipe.before} to {recipe.after})"))
    if report.renamed:
        pairs = join_names([f"{old} to {new}" for old, new in report.renamed.items()])
        print_wrapped(escape_unprintable(f"renamed: {format_count(len(report.renamed), 'name')} ({pairs})"))


def _show_files(sizes: Mapping[str, int]) -> None:
    rows = [(f"{num_bytes:,}", escape_unprintable(path)) for path, num_bytes in sizes.items()]
    print_table(("bytes", "file"), rows, right_aligned=(0,))


def _show_conversion(report: ConvertReport, *, quiet: bool) -> None:
    rate = format_size(report.bytes_written / max(report.seconds, 1e-9))
    if report.missing_parts:
        print_wrapped(
            f"{format_size(report.bytes_written)} of {report.destination} were written, {report.seconds:.2f} s "
            f"({rate}/s); {_format_missing_parts(report.missing_parts)}"
        )
        return
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


def _format_missing_parts(numbers: Sequence[int]) -> str:
    noun, verb = ("part", "is") if len(numbers) == 1 else ("parts", "are")
    return f"it is published when {noun} {join_names(list(map(str, numbers)), MAX_LISTED_PARTS)} {verb} too"


@click.command(
    "make-loadable", cls=options.ConverterCommand, examples=("ckpt-tools make-loadable foreign.pt loadable.pt",)
)
@options.source_argument
@_destination_argument
@options.options_of(
    LoadableKeywords,
    strict="Fail if something would be left out.",
    overwrite="Replace the file at DST, and nothing else.",
)
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
    print_result(report, as_json, _show_loadable)


def _show_loadable(report: LoadableReport) -> None:
    print_wrapped(
        f"{report.destination}: {format_count(report.num_storages, 'storage')}, {format_size(report.bytes_written)}"
    )
    for omitted in report.left_out:
        tensors = f" with {format_count(omitted.num_tensors, 'tensor')}" if omitted.num_tensors else ""
        print_item("left out", escape_unprintable(f"{omitted.place}: {omitted.kind}{tensors}"))
    for changed in report.replaced:
        print_item("replaced", escape_unprintable(f"{changed.place}: {changed.kind} by {changed.by}"))
