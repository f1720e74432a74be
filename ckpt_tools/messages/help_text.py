"""Help of commands: options under headings, examples, and lines that break between words alone.

For the commands of the converter and for those of the packages beside it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click

NARROW_COLUMNS = 70
"""Below this, the first column of a list of options is narrower, so that words of the second fit."""


def wrap_words(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width``. A longer word has a line of its own."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


class WordWrapFormatter(click.HelpFormatter):
    """Help text that is not broken inside words or at hyphens: ``--world-size`` stays one word."""

    def write_text(self, text: str) -> None:
        """Paragraphs; one that begins with ``\\b`` is lines for a shell."""
        paragraphs = []
        for paragraph in text.split("\n\n"):
            is_code = paragraph.startswith("\b\n")
            lines = paragraph.splitlines()[1:] if is_code else [" ".join(paragraph.split())]
            paragraphs.append("\n".join(part for line in lines for part in self._wrap_line(line, hanging=4 * is_code)))
        self.write("\n\n".join(paragraphs) + "\n")

    def _wrap_line(self, text: str, *, hanging: int) -> list[str]:
        indent = " " * self.current_indent
        first_line, *more_lines = wrap_words(text, self._get_available_width(hanging)) or [""]
        return [f"{indent}{first_line}", *(f"{indent}{'':{hanging}}{line}" for line in more_lines)]

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        rows = list(rows)
        col_max = min(col_max, 24) if self.width < NARROW_COLUMNS else col_max
        first_column_width = min(max(len(term) for term, _ in rows), col_max) + col_spacing
        for term, text in rows:
            lines = wrap_words(" ".join(text.split()), self._get_available_width(first_column_width))
            head = f"{'':{self.current_indent}}{term:{first_column_width}}"
            if len(term) > first_column_width - col_spacing:
                self.write(f"{head.rstrip()}\n")
                head = " " * (self.current_indent + first_column_width)
            self.write(f"{head}{lines[0] if lines else ''}".rstrip() + "\n")
            for line in lines[1:]:
                self.write(f"{'':{self.current_indent + first_column_width}}{line}\n")

    def _get_available_width(self, used_columns: int) -> int:
        return max(self.width - self.current_indent - used_columns, 10)


class HelpContext(click.Context):
    """A context with the help of ``WordWrapFormatter``."""

    formatter_class = WordWrapFormatter


Headings = Mapping[str, Sequence[str]]
"""Names of parameters by the heading of the help that they stand under."""


class GroupedCommand(click.Command):
    """A command with ``-h`` beside ``--help``, whose help lists options under ``headings``, others under Options, and
    ends with ``examples``."""

    context_class: type[click.Context] = HelpContext
    headings: Headings = MappingProxyType({})

    def __init__(
        self, *args: Any, headings: Headings | None = None, examples: Sequence[str] = (), **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.headings = self.headings if headings is None else headings
        self.examples = tuple(examples)

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        # Not in the settings of a context: click keeps the option that the first context asks for.
        return ["-h", "--help"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click_options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        rows = {_get_option_name(each): row for each in click_options if (row := each.get_help_record(ctx)) is not None}
        groups = {title: [rows.pop(name) for name in names if name in rows] for title, names in self.headings.items()}
        for title, group in {**groups, "Options": list(rows.values())}.items():
            if group:
                with formatter.section(title):
                    formatter.write_dl(group)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Example"):
                formatter.write_text("\n".join(("\b", *self.examples)))
        super().format_epilog(ctx, formatter)


def _get_option_name(option: click.Option) -> str:
    """The name of the parameter; that of ``--help`` differs between versions of click."""
    return "help" if "--help" in option.opts else str(option.name)
