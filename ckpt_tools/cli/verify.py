"""``ckpt-tools verify``, ``diff``, ``checksum`` and ``sign``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.options import form_option
from ckpt_tools.cli.output import (
    MAX_NOTES,
    find_source_folder,
    print_item,
    print_json,
    print_markdown,
    print_result,
    print_wrapped,
    show_notes,
)
from ckpt_tools.cli.reporting import show_progress
from ckpt_tools.core.options import QuantizationKeywords, ReadKeywords, SelectKeywords
from ckpt_tools.errors import DifferenceError
from ckpt_tools.messages.wording import (
    escape_unprintable,
    format_count,
    format_size,
    format_tensor_count,
    format_ties,
    join_names,
)

if TYPE_CHECKING:
    from ckpt_tools.verification.report import Difference, DifferenceRow, VerifyReport


MAX_MODULES = 8
"""A model's blocks, its head and its embeddings. More make the summary longer than a glance."""


@click.command("diff", cls=options.ConverterCommand, examples=("ckpt-tools diff run/step-1000 run/step-2000 --top 5",))
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@options.options_of(SelectKeywords, config=options.SIZES_CONFIG_HELP)
@options.option_of("state", "Compare the weights alone, or everything. Default: all.")
@options.option_of("workers")
@options.listing_options
@form_option("text", "json", "markdown")
@options.transfer_options
def diff_command(a: str, b: str, top: int | None, form: str, quiet: bool, **keywords: Any) -> None:
    """Show which tensors of A and B differ, and by how much, in any two formats.

    A summary comes first, then the largest differences, with one line for tensors that differ for the same reason.
    --recipe, --rename and --key-map change names of A to those
    of B.
    --from, --tag, --model-key and --optim-key say how A is read. Exits with 6 if anything differs.
    """
    from ckpt_tools import diff

    with show_progress("comparing", quiet=quiet) as on_progress:
        report = diff(a, b, on_progress=on_progress, **keywords)
    if form == "json":
        print_json(report.to_json())
    elif form == "markdown":
        _print_markdown_report(f"ckpt-tools diff: {a} and {b}", report, _format_equality(report, _EQUAL_IN_DIFF), top)
    else:
        _show_report(report, _EQUAL_IN_DIFF, top=top)
    _exit_if_different(report)


_EQUAL_IN_DIFF = "are the same, bit for bit"


def _format_equality(report: VerifyReport, claim: str) -> str:
    """The sentence of a report without differences."""
    text = f"{_format_tensor_counts(report)}, {format_size(report.num_bytes)}: all {claim}"
    if not report.num_files:
        return text
    return (
        f"{text}; {format_count(report.num_files, 'file')} {'is' if report.num_files == 1 else 'are'} as "
        f"{_format_lists(report)}"
    )


def _format_lists(report: VerifyReport) -> str:
    return (
        f"{join_names([escape_unprintable(name) for name in report.lists])} say{'s' if len(report.lists) == 1 else ''}"
    )


def _show_report(report: VerifyReport, claim: str, *, top: int | None) -> None:
    """The differences, or one line that says that there are none."""
    if report.equal:
        print_wrapped(_format_equality(report, claim))
    else:
        print_wrapped(_format_summary_line(report))
        for name, what in _list_totals(report):
            print_item(name, what)
        _show_rows(report, top)
    if report.signature:
        print_wrapped(escape_unprintable(_format_signature(report)))
    if report.tied:
        print_wrapped(escape_unprintable(f"{format_ties(report.tied)} on one side, and not on the other"))
    show_notes(report.notes)


def _format_signature(report: VerifyReport) -> str:
    return f"the signature {report.signature} is by the private key to --public-key, and no signed file has changed"


def _format_tensor_counts(report: VerifyReport) -> str:
    """``116 tensors (29 weights, 87 of the optimizer) and 1 tied name``."""
    tied = f" and {format_count(len(report.tied), 'tied name')}" if report.tied else ""
    return f"{format_tensor_count(report.tensors_by_role)}{tied}"


def _exit_if_different(report: VerifyReport) -> None:
    """End the command with the exit code of differences if there are any. They are a result and not an error."""
    if not report.equal:
        raise click.exceptions.Exit(DifferenceError.exit_code)


def _format_summary_line(report: VerifyReport) -> str:
    """``3 of 640 tensors differ: 2 in values, 1 missing``."""
    if report.num_wrong_files and report.lists:
        verb = "is" if report.num_wrong_files == 1 else "are"
        files = (
            f"{report.num_wrong_files:,} of {format_count(report.num_files, 'file')} {verb} not as "
            f"{_format_lists(report)}"
        )
        return f"{files}; no tensor was read"
    verb = "differs" if report.num_differing == 1 else "differ"
    aspects = report.summary.aspects.items()
    aspects_text = ", ".join(
        f"{number:,} {aspect}" if aspect in ("missing", "unexpected") else f"{number:,} in {aspect}"
        for aspect, number in aspects
        if aspect not in ("entry", "file")
    )
    text = f"{report.num_differing:,} of {format_count(report.num_compared, 'tensor')} {verb}: {aspects_text}"
    other_counts = {"value beside the tensors": report.num_entries, "file of the model": report.num_wrong_files}
    other_sentences = [
        f"{number:,} {what if number == 1 else what.replace(' ', 's ', 1)} {'differs' if number == 1 else 'differ'}"
        for what, number in other_counts.items()
        if number
    ]
    return "; ".join(
        [
            text if report.num_differing else f"{_format_tensor_counts(report)} are the same, bit for bit",
            *other_sentences,
        ]
    )


def _list_totals(report: VerifyReport) -> Iterator[tuple[str, str]]:
    """The largest difference of each group of tensors, and how many differ in each module."""
    for group, difference in report.summary.largest.items():
        yield f"largest difference of {group}", _format_deviation(difference)
    modules = [f"{escape_unprintable(name)} {number:,}" for name, number in report.summary.modules.items()]
    if modules:
        yield "by module", join_names(modules, MAX_MODULES)


def _format_deviation(difference: Difference) -> str:
    deviation = difference.deviation
    assert deviation is not None
    if deviation.num_one_nan:
        return escape_unprintable(f"NaN on one side only, in {difference.key}")
    return escape_unprintable(f"{deviation.max_abs:.6g} (relative {deviation.max_rel:.3g}), in {difference.key}")


def _show_rows(report: VerifyReport, top: int | None) -> None:
    rows, num_more = _select_rows(report, top)
    for row in rows:
        print_item(escape_unprintable(row.name), escape_unprintable(row.what))
    if num_more:
        print_wrapped(f"and {num_more:,} more; --all lists them")


def _select_rows(report: VerifyReport, top: int | None) -> tuple[tuple[DifferenceRow, ...], int]:
    """All rows; with ``top`` the first of the folded ones, and the number of differences that are left out."""
    if top is None:
        return report.summary.rows, 0
    folded = report.summary.folded
    return folded[:top], sum(row.count for row in folded[top:])


def _print_markdown_report(title: str, report: VerifyReport, equality: str, top: int | None) -> None:
    rows, num_more = _select_rows(report, top)
    lines = (
        [equality]
        if report.equal
        else [_format_summary_line(report), *(f"{name}: {what}" for name, what in _list_totals(report))]
    )
    more_sentences = [f"and {num_more:,} more"] if num_more else []
    more_sentences += [_format_signature(report)] if report.signature else []
    notes = [f"{note.outcome.value}: {note.what} ({note.why})" for note in report.notes[:MAX_NOTES]]
    print_markdown(
        title, [*lines, *more_sentences, *notes], ("name", "difference"), [(row.name, row.what) for row in rows]
    )


@click.command(
    "verify",
    cls=options.ConverterCommand,
    examples=(
        "ckpt-tools verify run/step-1000",
        "ckpt-tools verify run/step-1000 model --state model",
    ),
)
@options.source_argument
@click.argument("dst", metavar="[DST]", required=False)
@options.options_of(SelectKeywords, config=options.SIZES_CONFIG_HELP)
@options.option_of("state", "The --state of the conversion.")
@options.option_of("dtype")
@options.option_of("buffers")
@options.option_of("like")
@options.option_of("drop")
@options.option_of("fill")
@options.option_of("untie")
@options.options_of(QuantizationKeywords)
@click.option(
    "--digests",
    metavar="FILE",
    help="Check SRC against these digests of its tensors, or these of its files as sha256sum, b2sum, md5sum or "
    "Megatron-Core write them. Default: those stored with SRC.",
)
@click.option("--public-key", metavar="FILE", help="First check the signature of SRC, or of --digests, with this key.")
@click.option("--signature", metavar="FILE", help="The file of the signature. Default: stored with what it signs.")
@options.option_of("workers")
@options.listing_options
@form_option("text", "json", "markdown", "sarif")
@options.transfer_options
def verify_command(src: str, dst: str | None, top: int | None, form: str, quiet: bool, **keywords: Any) -> None:
    """Check that DST holds the tensors of SRC bit for bit; without DST, that SRC agrees with its own checksums.

    Lists of other tools are checked too, if they are with SRC: SHA256SUMS, integrity.json, the hashes of hf download.
    Give the same options as for the conversion to DST. Exits with 6 if a tensor or a file differs.
    """
    from ckpt_tools import verify

    with show_progress("verifying", quiet=quiet) as on_progress:
        report = verify(src, dst, on_progress=on_progress, **keywords)
    if dst:
        claim = "are bit for bit the same"
    elif report.num_digests is None:
        claim = "are whole; no digests are stored with them (see checksum)"
    else:
        claim = f"are whole, and match {format_count(report.num_digests, 'recorded digest')}"
    if form == "json":
        print_json(report.to_json())
    elif form == "sarif":
        print_json(report.to_sarif(src, find_source_folder(src)))
    elif form == "markdown":
        _print_markdown_report(
            f"ckpt-tools verify: {src}" + (f" and {dst}" if dst else ""), report, _format_equality(report, claim), top
        )
    else:
        _show_verification(report, claim, dst, top)
    _exit_if_different(report)


def _show_verification(report: VerifyReport, claim: str, dst: str | None, top: int | None) -> None:
    if not report.equal:
        print_wrapped("verification failed")
    _show_report(report, claim, top=top)
    if dst and set(report.summary.aspects) - {"file"} == {"dtype"}:  # config.json states the dtype too
        print_wrapped(
            "Every difference is in dtype. Was DST converted with --dtype? Then give verify the same --dtype."
        )


@click.command("checksum", cls=options.ConverterCommand, examples=("ckpt-tools checksum model.safetensors",))
@options.source_argument
@click.option("--output", metavar="FILE", help="The file to write; - prints the digests. Default: stored with SRC.")
@options.options_of(ReadKeywords)
@options.option_of("workers")
@options.option_of("overwrite", "Replace existing digests.")
@options.json_option
@options.transfer_options
def checksum_command(src: str, output: str | None, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write the digests of a checkpoint's tensors, for verify to check.

    They are stored in the folder of SRC, or beside its file.
    """
    from ckpt_tools import checksum

    with show_progress("hashing", quiet=quiet) as on_progress:
        report = checksum(src, output=output, on_progress=on_progress, **keywords)
    tensors = f"{format_tensor_count(report.tensors_by_role)}, {format_size(report.num_bytes)}"
    is_json = as_json or report.destination is None
    print_result(report, is_json, lambda _: print_wrapped(f"{report.destination}: digests of {tensors}"))


@click.command(
    "sign", cls=options.ConverterCommand, examples=("ckpt-tools sign model.safetensors --private-key key.pem",)
)
@click.argument("src", metavar="SRC")
@click.option("--private-key", metavar="FILE", required=True, help="An elliptic-curve private key in PEM format.")
@click.option("--signature", metavar="FILE", help="The file of the signature. Default: stored with SRC.")
@options.option_of("overwrite", "Replace an existing signature.")
@options.json_option
@options.verbosity_options
def sign_command(src: str, as_json: bool, **keywords: Any) -> None:
    """Sign every file of a checkpoint, or a list of digests, with OpenSSF model-signing."""
    from ckpt_tools import sign

    print_result(sign(src, **keywords), as_json, lambda report: print_wrapped(report.signature))
