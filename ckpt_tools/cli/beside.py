"""``train``, ``predict`` and ``serve``: commands of the packages beside the converter, which an extra makes usable.

The converter does not know these packages. The distribution names their commands as entry points. A command is looked
up and imported when it is the one asked for, so that no other command pays for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import process
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DISTRIBUTION = "ckpt-tools"
GROUP = "ckpt_tools.commands"


class BesideCommand(click.Command):
    """A placeholder in the list of commands that loads the real command from the entry point of its name."""

    def __init__(self, name: str, extra: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self.name: str = name
        self.extra = extra

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **settings: Any
    ) -> click.Context:
        return self.imported().make_context(info_name, args, parent, **settings)

    def imported(self) -> click.Command:
        """The command itself. Raises ``UsageError`` if its package or something that the package needs is missing."""
        entry = self._entry_point()
        if entry is None:
            raise self._not_installed()
        process.give_back()
        try:
            command: click.Command = entry.load()
        except ImportError as error:
            if error.name == entry.module.partition(".")[0]:
                raise self._not_installed() from error
            raise UsageError(
                f"ckpt-tools {self.name} needs packages that are not installed: "
                f"pip install '{DISTRIBUTION}[{self.extra}]' ({error})"
            ) from error
        return command

    def _entry_point(self) -> EntryPoint | None:
        """The entry point of this distribution; another package cannot replace it."""
        # Importing it takes 20 ms, so that only these commands do.
        from importlib.metadata import PackageNotFoundError, distribution

        try:
            ours = distribution(DISTRIBUTION).entry_points.select(group=GROUP, name=self.name)
        except PackageNotFoundError:
            return None
        return next(iter(ours), None)

    def _not_installed(self) -> UsageError:
        return UsageError(
            f"ckpt-tools {self.name} is not installed with this copy of ckpt-tools, which looks like a source tree: "
            f"run pip install -e '.[{self.extra}]' in it"
        )


train_command = BesideCommand("train", "train", "Train a small model whose checkpoints the other commands open.")
predict_command = BesideCommand("predict", "serve", "Predict images, texts or tables with a checkpoint.")
serve_command = BesideCommand("serve", "serve", "Serve a model file over HTTP.")
