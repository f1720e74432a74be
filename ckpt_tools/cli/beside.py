"""``train``, ``predict`` and ``serve``: commands of the packages beside the converter, which an extra installs.

The converter does not know these packages. Each is a distribution of its own, which names its commands as entry points.
A command is looked up and imported when it is the one asked for, so that no other command pays for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import process
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "ckpt_tools.commands"

_TREE = Path(__file__).parents[2]
"""The source tree, if this package is in one."""


class BesideCommand(click.Command):
    """A placeholder in the list of commands that loads the real one from the entry point of its name.

    ``package`` is the folder of the command in a source tree, and the end of its distribution's name.
    """

    def __init__(self, name: str, package: str, extra: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self.name: str = name
        self.package = package
        self.extra = extra

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **settings: Any
    ) -> click.Context:
        command = self.imported()
        if parent is not None and parent.params.get("quiet"):
            if all(each.name != "quiet" for each in command.params):
                raise UsageError(f"{self.name} has no --quiet")
            settings["default_map"] = {"quiet": True}
        return command.make_context(info_name, args, parent, **settings)

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
                f"pip install 'ckpt-tools[{self.extra}]' ({error})"
            ) from error
        return command

    def _entry_point(self) -> EntryPoint | None:
        """The entry point of the command's own distribution; another package cannot replace it."""
        # Importing it takes 20 ms, so that only these commands do.
        from importlib.metadata import PackageNotFoundError, distribution

        try:
            found = distribution(f"ckpt-tools-{self.package}").entry_points.select(group=GROUP, name=self.name)
        except PackageNotFoundError:
            return None
        return next(iter(found), None)

    def _not_installed(self) -> UsageError:
        if not (_TREE / self.package / "pyproject.toml").is_file():
            return UsageError(f"ckpt-tools {self.name} is not installed: pip install 'ckpt-tools[{self.extra}]'")
        return UsageError(
            f"ckpt-tools {self.name} is not installed from this source tree: "
            f"run pip install -e '.[{self.extra}]' -e ./training -e ./inference in it"
        )


train_command = BesideCommand(
    "train", "training", "train", "Train a small model whose checkpoints the other commands open."
)
predict_command = BesideCommand("predict", "inference", "serve", "Predict images, texts or tables with a checkpoint.")
serve_command = BesideCommand("serve", "inference", "serve", "Serve a model file over HTTP.")
