"""``ckpt-tools verify``, ``diff``, ``checksum`` and ``sign``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json, progress, show_notes
from ckpt_tools.cli.wrapping import say, say_item
from ckpt_tools.core.wording import count, listed, printable, size
from ckpt_tools.errors import DifferenceError

if TYPE_CHECKING:
    from ckpt_tools.verification.report import Difference, VerifyReport


MAX_MODULES = 8
"""A model's blocks, its head and its embeddings. More make the summary longer than a glance."""


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@options.storage
@options.reading
@options.state("Compare the weights alone, or everything. Default: all.")
@options.weights
@options.naming
@options.sizes
@options.workers
@options.listing
@options.as_json
@options.talking
def diff_command(a: str, b: str, top: int | None, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Show which tensors of A and B differ, and by how much, in any two formats.

    A summary comes first, then the largest differences. --recipe, --rename and --key-map change names of A to those
    of B.
    --from, --tag, --model-key and --optim-key say how A is read. Exits with 6 if anything differs.
    """
    from ckpt_tools import diff

    with progress("comparing", quiet=quiet) as on_progress:
        report = diff(a, b, on_progress=on_progress, **chosen)
    if as_json:
        print_json(report.to_json())
    else:
        _show_report(report, "are the same, bit for bit", top=top)
    _exit_by(report)


def _show_report(report: VerifyReport, same: str, *, top: int | None) -> None:
    """The differences, or one line that says that there are none."""
    if report.equal:
        say(f"{count(report.num_tensors, 'tensor')}, {size(report.num_bytes)}: all {same}")
    else:
        _show_summary(report)
        _show_rows(report, top)
    show_notes(report.notes)


def _exit_by(report: VerifyReport) -> None:
    """End the command with the exit code of differences if there are any. They are a result and not an error."""
    if not report.equal:
        raise click.exceptions.Exit(DifferenceError.exit_code)


def _verdict(report: VerifyReport) -> str:
    """``3 of 640 tensors differ: 2 in values, 1 missing``."""
    verb = "differs" if report.num_differing == 1 else "differ"
    kinds = ", ".join(_kind(aspect, number) for aspect, number in report.summary.aspects.items() if aspect != "entry")
    entries = (
        f"{count(report.num_entries, 'value')} beside the tensors {'differs' if report.num_entries == 1 else 'differ'}"
    )
    if not report.num_differing:
        return f"{count(report.num_tensors, 'tensor')} are the same, bit for bit; {entries}"
    text = f"{report.num_differing:,} of {count(report.num_compared, 'tensor')} {verb}: {kinds}"
    return f"{text}; {entries}" if report.num_entries else text


def _kind(aspect: str, number: int) -> str:
    return f"{number:,} {aspect}" if aspect in ("missing", "unexpected") else f"{number:,} in {aspect}"


def _show_summary(report: VerifyReport) -> None:
    summary = report.summary
    say(_verdict(report))
    for group, difference in summary.largest.items():
        say_item(f"largest difference of {group}", _largest(difference))
    modules = [f"{printable(name)} {number:,}" for name, number in summary.modules.items()]
    if modules:
        say_item("by module", listed(modules, MAX_MODULES))


def _largest(difference: Difference) -> str:
    deviation = difference.deviation
    assert deviation is not None
    if deviation.num_one_nan:
        return printable(f"NaN on one side only, in {difference.key}")
    return printable(f"{deviation.max_abs:.6g} (relative {deviation.max_rel:.3g}), in {difference.key}")


def _show_rows(report: VerifyReport, top: int | None) -> None:
    rows = report.summary.rows
    for row in rows[:top]:
        say_item(printable(row.name), printable(row.what))
    if top is not None and len(rows) > top:
        say(f"and {len(rows) - top:,} more; --all lists them")


@click.command("verify")
@options.source
@click.argument("dst", metavar="[DST]", required=False)
@options.reading
@options.state("The --state of the conversion.")
@options.choosing
@options.sizes
@options.like
@click.option("--digests", metavar="FILE", help="Check SRC against these digests. Default: those stored with SRC.")
@click.option("--public-key", metavar="FILE", help="First check the signature of SRC, or of --digests, with this key.")
@click.option("--signature", metavar="FILE", help="The file of the signature. Default: stored with what it signs.")
@options.workers
@options.listing
@options.as_json
@options.talking
def verify_command(src: str, dst: str | None, top: int | None, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Check that DST holds the tensors of SRC bit for bit; without DST, that SRC agrees with its own checksums.

    Give the same options as for the conversion to DST. Exits with 6 if a tensor differs.
    """
    from ckpt_tools import verify

    with progress("verifying", quiet=quiet) as on_progress:
        report = verify(src, dst, on_progress=on_progress, **chosen)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report, dst, top)
    _exit_by(report)


def _show(report: VerifyReport, dst: str | None, top: int | None) -> None:
    if not report.equal:
        say("verification failed")
    _show_report(report, "are bit for bit the same" if dst else _whole(report.num_digests), top=top)
    if dst and set(report.summary.aspects) == {"dtype"}:
        say("Every difference is in dtype. Was DST converted with --dtype? Then give verify the same --dtype.")


def _whole(num_digests: int | None) -> str:
    if num_digests is None:
        return "are whole; no digests are stored with them (see checksum)"
    return f"are whole, and match {count(num_digests, 'recorded digest')}"


@click.command("checksum")
@options.source
@click.option("--output", metavar="FILE", help="The file to write; - prints the digests. Default: stored with SRC.")
@options.reading
@options.workers
@click.option("--overwrite", is_flag=True, help="Replace existing digests.")
@options.as_json
@options.talking
def checksum_command(src: str, output: str | None, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Write the digests of a checkpoint's tensors, for verify to check.

    They are stored in the folder of SRC, or beside its file.
    """
    from ckpt_tools import checksum

    with progress("hashing", quiet=quiet) as on_progress:
        report = checksum(src, output=output, on_progress=on_progress, **chosen)
    if as_json or report.destination is None:
        print_json(report.to_json())
    else:
        say(f"{report.destination}: digests of {count(report.num_tensors, 'tensor')}, {size(report.num_bytes)}")


@click.command("sign")
@click.argument("src", metavar="SRC")
@click.option("--private-key", metavar="FILE", required=True, help="An elliptic-curve private key in PEM format.")
@click.option("--signature", metavar="FILE", help="The file of the signature. Default: stored with SRC.")
@click.option("--overwrite", is_flag=True, help="Replace an existing signature.")
@options.as_json
@options.verbose
def sign_command(src: str, as_json: bool, **chosen: Any) -> None:
    """Sign every file of a checkpoint, or a list of digests, with OpenSSF model-signing."""
    from ckpt_tools import sign

    report = sign(src, **chosen)
    if as_json:
        print_json(report.to_json())
    else:
        say(report.signature)
