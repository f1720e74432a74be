"""``ckpt-tools scan``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.options import form_option
from ckpt_tools.cli.output import find_source_folder, print_item, print_json, print_markdown, print_wrapped
from ckpt_tools.errors import UnsafeError
from ckpt_tools.messages.wording import escape_unprintable, format_count, format_size, join_names

if TYPE_CHECKING:
    from ckpt_tools.verification.scan import Finding, ScanReport


@click.command(
    "scan",
    cls=options.ConverterCommand,
    examples=("ckpt-tools scan downloaded.bin", "ckpt-tools scan run --exclude '*.svg' --format sarif"),
)
@click.argument("src", metavar="SRC...", nargs=-1, required=True)
@options.option_of("storage_options")
@click.option(
    "--allow",
    multiple=True,
    metavar="MODULE.NAME",
    help="A class or function that you vouch for, by its exact name. Repeatable.",
)
@click.option(
    "--allow-configuration",
    is_flag=True,
    help="Do not fail for configuration: you know that the programs that will read it import no names in it.",
)
@options.option_of("exclude", "Do not look at files whose name or path matches. Repeatable.")
@form_option("text", "json", "markdown", "sarif")
@options.output_options
def scan_command(src: tuple[str, ...], form: str, quiet: bool, **scan_options: Any) -> None:
    """Prove that loading any file of SRC runs no code, or list what is not proved.

    Nothing is executed. Exits with 0 if every byte of every file was accounted for
    and nothing would run. Otherwise exits with 7: also for configuration (JSON, YAML, TOML and
    settings in a checkpoint), because the program that reads it may import names in it.
    Several SRC are scanned one after the other.
    """
    from ckpt_tools import scan

    reports = [scan(each, **scan_options) for each in src]
    results = _ScanResults(src, reports, has_exclusions=bool(scan_options["exclude"]))
    if form == "json":
        print_json(reports[0].to_json() if len(reports) == 1 else [each.to_json() for each in reports])
    elif form == "sarif":
        print_json(results.to_sarif())
    elif form == "markdown":
        results.print_markdown()
    else:
        results.print_text()
    if results.num_findings:
        raise UnsafeError(
            f"{join_names(results.unsafe)} is not proved to be safe: {format_count(results.num_findings, 'finding')}"
        )


class _ScanResults:
    """The reports of several sources, as one result."""

    def __init__(self, sources: Sequence[str], reports: Sequence[ScanReport], *, has_exclusions: bool) -> None:
        self.has_exclusions = has_exclusions
        self.reports, self.folders = reports, [find_source_folder(src) for src in sources]
        self.unsafe = [src for src, report in zip(sources, reports, strict=True) if not report.clean]
        self.num_findings = sum(report.num_findings for report in reports)
        self.allowed = sorted({name for report in reports for name in report.allowed})
        self.names = list(dict.fromkeys(name for report in reports for name in report.names))
        # The files of one source are named as it does.
        shown = self.folders if len(reports) > 1 else [""]
        pairs = zip(shown, reports, strict=True)
        self.findings = [
            (self._get_file_name(folder, each), each) for folder, report in pairs for each in report.findings
        ]

    def _get_file_name(self, folder: str, finding: Finding) -> str:
        return f"{folder}/{finding.file}" if folder else finding.file

    def to_sarif(self) -> dict[str, Any]:
        """One log with a run for each source."""
        logs = [report.to_sarif(folder) for folder, report in zip(self.folders, self.reports, strict=True)]
        return {**logs[0], "runs": [run for log in logs for run in log["runs"]]}

    def print_text(self) -> None:
        for file, finding in self.findings:
            place = f" ({finding.place})" if finding.place else ""
            print_item(escape_unprintable(f"{finding.danger.value}: {file}{place}"), escape_unprintable(finding.what))
        if self.num_findings > len(self.findings):
            print_wrapped(f"and {self.num_findings - len(self.findings):,} more")
        for line in self._list_totals():
            print_wrapped(line)

    def print_markdown(self) -> None:
        title = f"ckpt-tools scan: {join_names([report.source for report in self.reports])}"
        verdict = f"{format_count(self.num_findings, 'finding')}" if self.num_findings else "nothing is found"
        rows = [(each.danger.value, file, each.place, each.what) for file, each in self.findings]
        print_markdown(title, [verdict, *self._list_totals()], ("danger", "file", "place", "what"), rows)

    def _list_totals(self) -> list[str]:
        """Totals of the proof, and the names that are or could be allowed."""
        files, num_bytes = (sum(getattr(each, name) for each in self.reports) for name in ("num_files", "num_bytes"))
        num_pickles = sum(each.num_pickles for each in self.reports)
        proved_text = f"{format_count(files, 'file')} ({format_size(num_bytes)}), {format_count(num_pickles, 'pickle')}"
        num_configurations = sum(each.num_configurations for each in self.reports)
        num_excluded = sum(len(each.excluded) for each in self.reports)
        is_everything_proved = not (self.num_findings or num_configurations or num_excluded)
        lines = [f"nothing would run: proved {proved_text}" if is_everything_proved else f"proved: {proved_text}"]
        if num_configurations:
            lines.append(f"configuration, not proved: {format_count(num_configurations, 'file')}")
        if self.has_exclusions:  # also if no name matches: the glob may be mistyped
            lines.append(f"excluded by you, not looked at: {format_count(num_excluded, 'file')}")
        if any(finding.danger.value == "configuration" for _, finding in self.findings):
            lines.append("if the programs that will read it import no names in configuration: --allow-configuration")
        if self.allowed:
            lines.append(f"allowed by you: {', '.join(self.allowed)}")
        if self.names:
            names = " ".join(f"--allow {name}" for name in self.names)
            lines.append(f"if you trust the code of these names on the loading machine: {names}")
        return lines
