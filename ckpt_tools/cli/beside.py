"""``train``, ``predict``, ``serve`` and ``verify-forward``: commands of the packages beside the converter.

Their dependencies are extras, and the converter does not know these packages. A command is imported when it is the one
asked for, so that no other command pays for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from ckpt_tools.cli import process
from ckpt_tools.errors import UsageError


class ExternalCommand(click.Command):
    """A placeholder in the list of commands for the ``main`` of ``module``."""

    def __init__(self, name: str, module: str, extra: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self.name: str = name
        self.module = module
        self.extra = extra

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **settings: Any
    ) -> click.Context:
        command = self.import_command()
        if parent is not None and parent.params.get("quiet"):
            if all(each.name != "quiet" for each in command.params):
                raise UsageError(f"{self.name} has no --quiet")
            settings["default_map"] = {"quiet": True}
        return command.make_context(info_name, args, parent, **settings)

    def import_command(self) -> click.Command:
        """The command itself. Raises ``UsageError`` if something that it needs is missing."""
        process.restore_settings()
        try:
            command: click.Command = import_module(self.module).main
        except ImportError as error:
            raise UsageError(
                f"ckpt-tools {self.name} needs packages that are not installed: "
                f"pip install 'ckpt-tools[{self.extra}]' ({error})"
            ) from error
        return command


train_command = ExternalCommand(
    "train",
    "ckpt_tools_training.__main__",
    "train",
    "Train a small model whose checkpoints the other commands open.",
)
predict_command = ExternalCommand(
    "predict", "ckpt_tools_inference.batch.__main__", "serve", "Predict images, texts or tables with a checkpoint."
)
serve_command = ExternalCommand(
    "serve", "ckpt_tools_inference.serving.__main__", "serve", "Serve a model file over HTTP."
)
verify_forward_command = ExternalCommand(
    "verify-forward",
    "ckpt_tools_inference.forward.__main__",
    "serve",
    "Compare what the models of two checkpoints compute for the same inputs, layer by layer.",
)
