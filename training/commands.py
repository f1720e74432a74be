"""The class of the commands of training and inference."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ckpt_tools.arguments import check_not_empty
from ckpt_tools.errors import UsageError


class Command(click.Command):
    """A command that refuses empty values as they were typed, or written in its file of options.

    A type such as ``click.Path(path_type=Path)`` has made the current folder of an empty path by the time that the
    command runs.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        typed, _, _ = self.make_parser(ctx).parse_args(words)
        try:
            for label, name, is_required in self._parameters():
                for given in (typed, ctx.default_map or {}):
                    check_not_empty(label, given.get(name), is_required=is_required)
        except UsageError as error:
            raise click.UsageError(error.message, ctx) from error
        return rest

    def _parameters(self) -> Iterator[tuple[str, str, bool]]:
        """Each parameter as it is typed, its name, and whether it is an argument."""
        for each in self.params:
            is_argument = isinstance(each, click.Argument)
            label = str(each.name).upper() if is_argument else max(each.opts, key=len)
            yield label, str(each.name), is_argument
