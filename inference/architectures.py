"""The module that a checkpoint's weights belong in: our own model, or one that a library or the user builds.

A checkpoint has names and numbers, and no code. The architecture comes from the ``config.json`` beside the weights if
transformers wrote one, or from the user:

- ``ours``: the Vision Transformer of the training package
- ``hf``: the class that ``config.json`` names, of transformers, without any code of the folder (``trust_remote_code``)
- ``torchvision:NAME`` and ``timm:NAME``, with arguments as in ``torchvision:resnet18?num_classes=10``
- ``module:function``: a function of the user's own that is called without arguments and returns the module
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import FormatError, UsageError

if TYPE_CHECKING:
    from torch import nn

OURS = "ours"
HUGGING_FACE = "hf"
LIBRARIES = ("torchvision", "timm")
CONFIG = "config.json"

HOW_TO_NAME = "write ours, hf, torchvision:NAME, timm:NAME or module:function"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What ``text`` says. ``library`` is ``ours``, ``hf``, ``torchvision``, ``timm``, or the user's own module.

    Raises:
        UsageError: the text is none of these.
    """

    library: str
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Of the words of a command line; nothing is imported."""
        if text in (OURS, HUGGING_FACE):
            return cls(text)
        library, has_name, rest = text.partition(":")
        name, _, query = rest.partition("?")
        if not has_name or not all(part.isidentifier() for part in library.split(".")) or not name:
            raise UsageError(f"--architecture {text} is not an architecture; {HOW_TO_NAME}")
        if query and library not in LIBRARIES:
            raise UsageError(f"--architecture {text}: only torchvision and timm take arguments; {HOW_TO_NAME}")
        return cls(library, name, _arguments(text, query))

    def build(self, folder: Path | None) -> nn.Module:
        """The module, on the CPU and with weights that are still to be loaded. ``folder`` is where ``config.json``
        lies.

        Raises:
            UsageError: there is no such model, or its package is missing. FormatError: ``config.json`` is not usable.
        """
        if self.library == OURS:
            from .training_package import models

            return models.build_model()
        if self.library == HUGGING_FACE:
            return _transformers_model(folder)
        if self.library in LIBRARIES:
            return self._of_library()
        return self._of_user()

    def _of_library(self) -> nn.Module:
        library = _imported("torchvision.models" if self.library == "torchvision" else "timm", self.library)
        try:
            if self.library == "torchvision":
                return library.get_model(self.name, weights=None, **self.arguments)
            return library.create_model(self.name, pretrained=False, **self.arguments)
        except (ValueError, RuntimeError, TypeError) as error:
            raise UsageError(f"{self.library} cannot build {self.name}: {_one_line(error)}") from error

    def _of_user(self) -> nn.Module:
        from torch import nn

        module = _imported(self.library, self.library)
        function = getattr(module, self.name, None)
        if not callable(function):
            raise UsageError(f"the module {self.library} has no function {self.name}")
        model = function()
        if not isinstance(model, nn.Module):
            raise UsageError(f"{self.library}:{self.name} returned a {type(model).__name__}, not a torch.nn.Module")
        return model


def architecture_of(text: str | None, folder: Path | None) -> Architecture:
    """What the user says, else what lies beside the weights in ``folder``, else our own model."""
    if text is not None:
        return Architecture.parse(text)
    return Architecture(HUGGING_FACE if folder is not None and _is_transformers(folder / CONFIG) else OURS)


def _arguments(text: str, query: str) -> dict[str, Any]:
    """``num_classes=10&dropout=0.5`` as keyword arguments; a value that is no literal of Python is text."""
    found: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, has_value, value = part.partition("=")
        if not has_value or not key.isidentifier():
            raise UsageError(f"--architecture {text}: {part!r} is not NAME=VALUE")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def _is_transformers(config: Path) -> bool:
    return config.is_file() and "model_type" in _read_config(config)


def _read_config(config: Path) -> dict[str, Any]:
    try:
        found = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise FormatError(f"{config} cannot be read ({_one_line(error)})") from error
    if not isinstance(found, dict):
        raise FormatError(f"{config} is not a JSON object")
    return found


def _transformers_model(folder: Path | None) -> nn.Module:
    """The class that ``architectures`` names, with transformers' own defaults; weights are not read here."""
    if folder is None or not _is_transformers(folder / CONFIG):
        raise FormatError(f"there is no {CONFIG} of transformers beside the weights, which says what the model is")
    transformers = _imported("transformers", "transformers")
    names = _read_config(folder / CONFIG).get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise FormatError(f"{folder / CONFIG} does not name one class in architectures; name the model another way")
    model_class = getattr(transformers, str(names[0]), None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise FormatError(
            f"{folder / CONFIG} names {names[0]}, which this version of transformers does not have; a class that "
            "comes with the checkpoint is code, and is not run"
        )
    try:
        return model_class(transformers.AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{folder / CONFIG} is not usable: {_one_line(error)}") from error


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"the architecture needs the package {package}, which is not installed") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
