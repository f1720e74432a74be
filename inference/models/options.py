"""Options of a loaded model, equal in the process that asks for it and in the one that loads it, and those of commands.

Without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args

import click

from ckpt_tools.errors import UsageError

from .architectures import Architecture

if TYPE_CHECKING:
    import torch

Command = TypeVar("Command", bound=Callable[..., Any])

ExactMode = Literal["buckets", "full", "off"]
"""``full``: every pass has the full size. ``buckets``: also smaller ones that were found equal. ``off``: any size."""


class TensorKeywords(TypedDict, total=False):
    """Keywords of ``TensorOptions``."""

    model_key: str | None
    include: Sequence[str]
    exclude: Sequence[str]
    rename: Sequence[str]
    key_map: str | Path | None
    recipe: str | Path | None
    inverse: bool
    dequantize: bool
    config: str | Path | None


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Arguments of :func:`inference.load_model` that choose and name tensors. Can be sent to other processes."""

    model_key: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    key_map: str | Path | None = None
    recipe: str | Path | None = None
    inverse: bool = False
    dequantize: bool = False
    config: str | Path | None = None

    def to_keywords(self) -> dict[str, Any]:
        """Those for ``ckpt_tools.load_into``, which takes sizes for a recipe, and how weights are quantized, from
        ``config``."""
        keywords = {name: value for name in self.__dataclass_fields__ if (value := getattr(self, name))}
        if not (self.recipe or self.dequantize):
            keywords.pop("config", None)
        return keywords

    @classmethod
    def take_from(cls, options: dict[str, Any]) -> TensorOptions:
        """Take these options out of a command's ``options``."""
        return cls(**{name: options.pop(name) for name in cls.__dataclass_fields__})


DEFAULT_READING = TensorOptions()


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Arguments of ``load_predictor``. Without a ``device``, the first GPU if there is one, else the CPU."""

    architecture: str | None = None
    device: str | None = None
    reading: TensorOptions = DEFAULT_READING
    exact: ExactMode = "full"
    max_batch: int | None = None
    dtype: str | None = None
    embeddings: bool = False
    max_new_tokens: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.exact not in get_args(ExactMode):
            raise UsageError(f"exact is buckets, full or off, not {self.exact}")
        if self.max_batch is not None and self.max_batch < 1:
            raise UsageError(f"a forward pass has at least one row, not {self.max_batch}")
        if self.max_pixels is not None and self.max_pixels < 1:
            raise UsageError(f"an image has at least one pixel, so that --max-pixels is not {self.max_pixels}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(f"at least one token is generated, not {self.max_new_tokens}")
        if self.architecture is not None:
            Architecture.parse(self.architecture)

    def get_torch_dtype(self) -> torch.dtype | None:
        """Raises UsageError if torch has no such dtype."""
        import torch

        dtype = None if self.dtype is None else getattr(torch, self.dtype, None)
        if self.dtype is not None and not isinstance(dtype, torch.dtype):
            raise UsageError(f"--dtype {self.dtype} is not a dtype of torch")
        return dtype

    def get_torch_device(self) -> torch.device:
        """Raises UsageError if torch has no such device."""
        import torch

        try:
            return torch.device(self.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise UsageError(f"--device {self.device} is not a device of torch") from error

    @classmethod
    def take_from(cls, options: dict[str, Any]) -> ModelOptions:
        """Take these options out of a command's ``options``."""
        names = cls.__dataclass_fields__.keys() & options.keys()
        return cls(reading=TensorOptions.take_from(options), **{name: options.pop(name) for name in names})


DEFAULT_OPTIONS = ModelOptions()

MODEL_HEADINGS = {
    "Model": ("model", "models", "models_file", "architecture", "config", "model_key", "dequantize"),
    "Names and selection": ("include", "exclude", "rename", "key_map", "recipe", "inverse"),
}
"""Options that every command has for its model, by heading of the help."""


def add_reading_options(command: Command) -> Command:
    """Adds the options. Help and metavariables are those of ``ckpt-tools convert``."""
    options = [
        click.option(
            "--config", metavar="DIR", help="Folder of config.json and the tokenizer, if not with the weights."
        ),
        click.option("--model-key", help="The key of the model in a DCP tree, e.g. app.model. Default: detected."),
        click.option("--include", multiple=True, metavar="GLOB", help="Take only tensors whose names match."),
        click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out tensors whose names match."),
        click.option("--rename", multiple=True, metavar="REGEX=REPL", help="Rename tensors, as '^model[.]='."),
        click.option("--key-map", metavar="FILE", help="A JSON file that maps old names to new names."),
        click.option(
            "--recipe",
            metavar="NAME|FILE",
            help="Map tensors to the model's, by a built-in recipe (see ckpt-tools recipes) or a TOML file.",
        ),
        click.option("--inverse", is_flag=True, help="Read the recipe from right to left."),
        click.option("--dequantize", is_flag=True, help="Make floating-point weights of quantized ones."),
    ]
    for option in reversed(options):
        command = option(command)
    return command
