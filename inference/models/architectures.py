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
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, UsageError

from ..common.errors import errors_of_files, printable
from .config_folder import CONFIG, describing_folder, read_config, refuse_quantized
from .programs import PROGRAMS, check_asked

if TYPE_CHECKING:
    import torch
    from torch import nn

OURS = "ours"
HUGGING_FACE = "hf"
LIBRARIES = ("torchvision", "timm")

SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "image_size", "patch_size")
"""Sizes in the configurations of transformers, under their common names."""

HOW_TO_NAME = (
    "write ours, ours:NAME, hf, torchvision:NAME, timm:NAME, module:function, FILE.py:function, torch.export or "
    "torchscript"
)
ASSUMED = (
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
        return cls(library, name, _arguments(text, query))

    def check_plain(self, folder: Path | None, *, dequantize: bool) -> None:
        """Raises UnsupportedError if transformers' files in ``folder`` say that the weights are quantized, unless these
        are dequantized."""
        if self.library == HUGGING_FACE and not dequantize:
            refuse_quantized(folder)

    def build(self, folder: Path | None, dtype: torch.dtype | None = None) -> nn.Module:
        """The module on the CPU, with uninitialized parameters unless a function of the user's made it. ``folder`` has
        ``config.json``; without a ``dtype``, parameters have the architecture's own. Raises UsageError if there is no
        such model, or its package is missing. FormatError if ``config.json`` is not usable."""
        if self.library == OURS:
            with _unfilled():
                return self._of_training().to(dtype=dtype)
        if self.library == HUGGING_FACE:
            return _transformers_model(folder, dtype)
        if self.library in LIBRARIES:
            return self._of_library(folder).to(dtype=dtype)
        return self._of_user().to(dtype=dtype)

    def _of_training(self) -> nn.Module:
        from ..common.training_package import model_names, zoo

        if self.our_name not in model_names.MODELS:
            raise UsageError(f"--architecture {OURS}:{self.name}: training has no model of its own of this name")
        return zoo.build_own_model(self.our_name, **self.arguments)

    @property
    def is_program(self) -> bool:
        """Whether the file is a program, and ``name`` a module of the user's that says more of it, if any."""
        return self.library in PROGRAMS

    @property
    def users_module(self) -> Any:
        """The module of the user's own, None if there is none. Raises UsageError if it cannot be imported."""
        if self.library in (OURS, HUGGING_FACE, *LIBRARIES):
            return None
        from ..common.training_package import references

        name = self.name if self.is_program else self.library
        try:
            return references.import_file_or_module(name) if name else None
        except Exception as error:
            raise UsageError(f"the module {name} cannot be imported: {references.describe_error(error)}") from error

    @property
    def our_name(self) -> str:
        return self.name or "vit"

    def _of_library(self, folder: Path | None) -> nn.Module:
        library = _imported("torchvision.models" if self.library == "torchvision" else "timm", self.library)
        source = self._folder_of_timm(folder) if self.library == "timm" else None
        try:
            where = "" if source is None else f" as {source / CONFIG} says"
            with errors_of_files(f"{self.library} cannot build {self.name}{where}"), _unfilled():
                return self._made(library, source)
        except FormatError as error:
            if source is None:
                raise UsageError(error.message) from error
            raise

    def _folder_of_timm(self, folder: Path | None) -> Path | None:
        """``folder`` if its ``config.json`` is of timm. Raises UsageError if it is of another model of timm."""
        stated = read_config(folder).get("architecture")
        if not _is_of_timm(stated):
            return None
        # A name may end in a tag of weights: resnet18.a1_in1k
        if stated != self.name.partition(".")[0]:
            raise UsageError(f"{folder}/{CONFIG} says that the weights are of timm:{stated}, not of timm:{self.name}")
        return folder

    def _made(self, library: Any, source: Path | None) -> nn.Module:
        if self.library == "torchvision":
            return library.get_model(self.name, weights=None, **_no_backbone(library, self.name), **self.arguments)
        name = self.name if source is None else f"local-dir:{source}"
        return library.create_model(name, pretrained=False, **self.arguments)

    def _of_user(self) -> nn.Module:
        from torch import nn

        from ..common.training_package import references

        module = self.users_module
        function = getattr(module, self.name, None)
        if not callable(function):
            raise UsageError(f"the module {self.library} has no function {self.name}")
        try:
            made = function(**self.arguments)
        except Exception as error:
            raise UsageError(
                f"{self.library}:{self.name} cannot build the model: {references.describe_error(error)}"
            ) from error
        # A function for training may return its blocks and its loss too.
        model = made.get("model") if isinstance(made, Mapping) else made
        if not isinstance(model, nn.Module):
            raise UsageError(f"{self.library}:{self.name} returned a {type(model).__name__}, not a torch.nn.Module")
        return model


def check_there(url: str, architecture: str | None, config: str | Path | None) -> None:
    """Raises CkptError if there is no checkpoint that can be read at ``url``, or nothing tells its architecture. Prints
    one that is assumed. A program is read only when it is run."""
    if is_program(architecture):
        return
    check_asked(url)
    summary = ckpt_tools.inspect(url)
    with describing_folder(summary.source, None, config) as folder:
        if architecture_of(architecture, folder, summary.source, None).is_assumed:
            click.echo(f"{printable(url)}: {ASSUMED}", err=True)


def is_program(architecture: str | None) -> bool:
    """Whether the user names a kind of program. Raises UsageError if the text is not an architecture."""
    return architecture is not None and Architecture.parse(architecture).is_program


def _no_backbone(library: Any, name: str) -> dict[str, None]:
    """Keeps torchvision from downloading a backbone's weights, which the checkpoint has."""
    has_backbone = "weights_backbone" in signature(library.get_model_builder(name)).parameters
    return {"weights_backbone": None} if has_backbone else {}


def architecture_of(
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
        return _named_in(config, f"{folder}/{CONFIG}")
    return _of_run(url, storage_options)


def _of_run(url: str | Path, storage_options: Mapping[str, Any] | None) -> Architecture:
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


def _named_in(config: Mapping[str, Any], path: str) -> Architecture:
    """Architecture of timm's or training's ``config.json``. A function is refused: a file beside weights chooses no
    code."""
    text = config["architecture"]
    try:
        found = Architecture("timm", text) if _is_of_timm(text) else Architecture.parse(str(text))
    except UsageError as error:
        raise FormatError(f"{path} names {text!r}, which is not an architecture") from error
    if found.library not in (OURS, *LIBRARIES):
        raise FormatError(f"{path} names the function {text}; a file beside weights does not choose code, so name it")
    return found


def _is_of_timm(text: object) -> bool:
    """Whether ``architecture`` in ``config.json`` is a bare name, as timm writes it."""
    return isinstance(text, str) and text.isidentifier() and text not in (OURS, HUGGING_FACE)


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


def _transformers_model(folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
    """The class in ``architectures`` of ``config.json``, with transformers' defaults and without weights."""
    found = read_config(folder)
    if folder is None or "model_type" not in found:
        raise FormatError(f"there is no {CONFIG} of transformers beside the weights, which says what the model is")
    transformers = _imported("transformers", "transformers")
    names = found.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise FormatError(f"{folder / CONFIG} does not name one class in architectures; name the model another way")
    model_class = getattr(transformers, str(names[0]), None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise FormatError(
            f"{folder / CONFIG} names {names[0]}, which this version of transformers does not have; a class that "
            "comes with the checkpoint is code, and is not run"
        )
    with errors_of_files(f"{folder / CONFIG} is not usable"):
        config = transformers.AutoConfig.from_pretrained(folder)
        _check_sizes(config)
        with _default_dtype(dtype or getattr(config, "dtype", None)), _unfilled():
            return model_class(config)


def _check_sizes(config: Any) -> None:
    """Raises ValueError for a size that makes a model of no use, which transformers may build."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        for name in SIZES:
            value = getattr(part, name, None)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, str) or (isinstance(each, int | float) and each <= 0):
                    raise ValueError(f"{name} is {value!r}, and not a number from 1")


def _unfilled() -> AbstractContextManager[Any]:
    from .uninitialized import Unfilled

    return Unfilled()


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """dtype of parameters made in the block. A later cast would change tables that transformers keeps in fp32."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"the architecture needs the package {package}, which is not installed") from error
