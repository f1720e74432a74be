"""Architectures: the module for a checkpoint's weights, from this package, a library, or the user.

A checkpoint has no code. The architecture comes from a ``config.json`` of transformers, of timm or of our training
beside the weights, or from the user:

- ``ours``: the Vision Transformer of the training package, and ``ours:NAME`` another of its models
- ``hf``: the class that ``config.json`` names, of transformers, without any code of the folder (``trust_remote_code``)
- ``torchvision:NAME`` and ``timm:NAME``, with arguments as in ``torchvision:resnet18?num_classes=10``; timm's own
  ``config.json`` beside the weights adds arguments, preparation and labels
- ``module:function`` or ``FILE.py:function``: a function of the user's own, with arguments as above, which returns the
  module, or a dictionary with it as ``model``, as for training
- ``torch.export`` and ``torchscript``: the file is a program, which has no weights to be filled; with ``:module``, a
  module of the user's own says more of it
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, UsageError

from ..common.errors import make_printable
from .config_folder import CONFIG, open_config_folder, read_config, refuse_quantized

OURS = "ours"
HUGGING_FACE = "hf"
EXPORTED, SCRIPTED = "torch.export", "torchscript"
PROGRAMS = {EXPORTED: "a program of torch.export", SCRIPTED: "a TorchScript archive"}

LIBRARIES = (OURS, HUGGING_FACE, "torchvision", "timm")
"""Origins of architectures that are not code of the user's."""

HOW_TO_NAME = (
    "write ours, ours:NAME, hf, torchvision:NAME, timm:NAME, module:function, FILE.py:function, torch.export or "
    "torchscript"
)
ASSUMED_NOTICE = (
    f"nothing says what the model is, so it is taken for {OURS}, the built-in Vision Transformer; name its "
    f"architecture with --architecture ({HOW_TO_NAME}), or the folder of its config.json with --config"
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A parsed architecture. ``library`` is ``ours``, ``hf``, ``torchvision``, ``timm``, a kind of program, or the
    user's own module. Raises UsageError if the text is none of these."""

    library: str
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_assumed: bool = False
    """Nothing says that the weights are of this architecture."""

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Parse ``--architecture``; imports nothing."""
        if text in (OURS, HUGGING_FACE, *PROGRAMS):
            return cls(text)
        file, is_file, rest = text.partition(".py:")
        library, has_name = file + ".py", is_file
        if not is_file:
            library, has_name, rest = text.partition(":")
        name, _, query = rest.partition("?")
        if library in PROGRAMS and all(part.isidentifier() for part in rest.split(".")):
            return cls(library, rest)
        is_module = is_file or all(part.isidentifier() for part in library.split("."))
        if not has_name or not is_module or not name:
            raise UsageError(f"--architecture {text} is not an architecture; {HOW_TO_NAME}")
        return cls(library, name, _parse_arguments(text, query))

    def check_not_quantized(self, folder: Path | None, *, dequantize: bool) -> None:
        """Raises UnsupportedError if transformers' files in ``folder`` say that the weights are quantized, unless these
        are dequantized."""
        if self.library == HUGGING_FACE and not dequantize:
            refuse_quantized(folder)

    @property
    def is_program(self) -> bool:
        """Whether the file is a program, and ``name`` a module of the user's that says more of it, if any."""
        return self.library in PROGRAMS

    @property
    def users_module(self) -> Any:
        """The module of the user's own, None if there is none. Raises UsageError if it cannot be imported."""
        if self.library in LIBRARIES:
            return None
        from ..common.training_package import references

        name = self.name if self.is_program else self.library
        try:
            return references.import_file_or_module(name) if name else None
        except Exception as error:
            raise UsageError(f"the module {name} cannot be imported: {references.describe_error(error)}") from error

    @property
    def builtin_name(self) -> str:
        return self.name or "vit"


def check_readable(url: str, architecture: str | None, config: str | Path | None) -> None:
    """Raises CkptError if there is no checkpoint that can be read at ``url``, or nothing tells its architecture. Prints
    one that is assumed. A program is read only when it is run."""
    if is_program(architecture):
        return
    refuse_unnamed_program(url)
    summary = ckpt_tools.inspect(url)
    with open_config_folder(summary.source, None, config) as folder:
        if find_architecture(architecture, folder, summary.source, None).is_assumed:
            click.echo(f"{make_printable(url)}: {ASSUMED_NOTICE}", err=True)


def is_program(architecture: str | None) -> bool:
    """Whether the user names a kind of program. Raises UsageError if the text is not an architecture."""
    return architecture is not None and Architecture.parse(architecture).is_program


def refuse_unnamed_program(url: str | Path) -> None:
    """Raises UsageError if the file's suffix is that of a program, which must be requested by name."""
    if str(url).endswith(".pt2"):
        raise UsageError(
            f"{url} is {PROGRAMS[EXPORTED]}, and to load it is to run it; if you trust it, name {EXPORTED} as its "
            "architecture"
        )


def refuse_tensor_options(kind: str, reading: Mapping[str, Any], dtype: object) -> None:
    """Raises UsageError for options that change tensors, which a program has of its own."""
    if reading or dtype is not None:
        raise UsageError(f"{PROGRAMS[kind]} has its own names and dtypes; leave out {', '.join(reading) or 'dtype'}")


def find_architecture(
    text: str | None, folder: Path | None, url: str | Path, storage_options: Mapping[str, Any] | None
) -> Architecture:
    """The architecture that the user names, or that ``config.json`` in ``folder`` names, or the training run that saved
    the checkpoint at ``url``, or our own model. Raises UsageError if the user names none, or the run's model is code of
    the user's. FormatError if ``config.json`` is not usable."""
    if text is not None:
        return Architecture.parse(text)
    config = read_config(folder)
    if "model_type" in config:
        return Architecture(HUGGING_FACE)
    if "architecture" in config:
        return _find_in_config(config, f"{folder}/{CONFIG}")
    return _find_in_run(url, storage_options)


def _find_in_run(url: str | Path, storage_options: Mapping[str, Any] | None) -> Architecture:
    from ..common.training_package import model_names, run_settings

    settings: Mapping[str, Any] = {}
    with suppress(CkptError):  # what cannot be read is refused when the weights are
        settings = run_settings.read_settings(ckpt_tools.open(url, storage_options=storage_options).manifest.extra)
    name = settings.get("model")
    if not isinstance(name, str):
        return Architecture(OURS, is_assumed=True)
    query = str(settings.get("model_arg") or "").replace("; ", "&")
    if name in model_names.MODELS:
        return Architecture.parse(f"{OURS}:{name}?{query}")
    if name.startswith("hf:"):
        raise UsageError(f"{url} is of a run with --model {name}; give --config {name.removeprefix('hf:')}")
    module, _, function = name.rpartition(":")
    arguments = f"?{query}" if query else ""
    raise UsageError(
        f"{url} is of a run with the model {name}, a function that the checkpoint does not have; name it with "
        f"--architecture {module}:{function}{arguments}, or with its file in the place of the module: {module}.py:"
        f"{function}{arguments}"
    )


def _find_in_config(config: Mapping[str, Any], path: str) -> Architecture:
    """Architecture of timm's or training's ``config.json``. A function is refused: a file beside weights chooses no
    code."""
    text = config["architecture"]
    try:
        architecture = Architecture("timm", text) if is_timm_name(text) else Architecture.parse(str(text))
    except UsageError as error:
        raise FormatError(f"{path} names {text!r}, which is not an architecture") from error
    if architecture.library not in (OURS, "torchvision", "timm"):
        raise FormatError(f"{path} names the function {text}; a file beside weights does not choose code, so name it")
    return architecture


def is_timm_name(text: object) -> bool:
    """Whether ``architecture`` in ``config.json`` is a bare name, as timm writes it."""
    return isinstance(text, str) and text.isidentifier() and text not in (OURS, HUGGING_FACE)


def _parse_arguments(text: str, query: str) -> dict[str, Any]:
    """``num_classes=10&dropout=0.5`` as keyword arguments. A value is TOML, as in ``--model-arg``, or a literal of
    Python; any other is text."""
    # The second one counts where both can read it.
    readers: tuple[Callable[[str], Any], ...] = (ast.literal_eval, lambda value: tomllib.loads(f"_={value}")["_"])
    arguments: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, has_value, value = part.partition("=")
        if not has_value or not key.isidentifier():
            raise UsageError(f"--architecture {text}: {part!r} is not NAME=VALUE")
        arguments[key] = value
        for read in readers:
            with suppress(ValueError, SyntaxError):
                arguments[key] = read(value)
    return arguments


def import_library(module: str, package: str) -> Any:
    """Raises UsageError if the package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"the architecture needs the package {package}, which is not installed") from error
