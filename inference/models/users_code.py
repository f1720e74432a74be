"""Networks of the user's own code: the function that builds the module, and the lines beside it that describe it.

Names, dtypes and shapes of tensors are in such lines::

    inputs = {"image": ("FP32", [-1, 3, 224, 224])}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ckpt_tools.errors import UsageError

from ..common.training_package import references
from .architectures import Architecture
from .prediction import device_of
from .results import BATCH, TensorSpec
from .task import TaskOptions
from .tensors import TORCH_DTYPES, FileFunctions, Network, Tensors, call_in_order, tensors_of

EXAMPLE = 'inputs = {"image": ("FP32", [-1, 3, 224, 224])}'


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """Description of a network in a module of the user's: ``inputs`` and ``outputs`` with datatype and shape by name,
    and the functions ``decode`` and ``encode``; each may be missing."""

    name: str = ""
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    files: FileFunctions = field(default_factory=FileFunctions)

    @classmethod
    def from_module(cls, module: ModuleType) -> Description:
        """Raises UsageError if ``inputs`` or ``outputs`` is something else."""
        files = FileFunctions(_function_of(module, "decode"), _function_of(module, "encode"))
        return cls(module.__name__, _specs_of(module, "inputs"), _specs_of(module, "outputs"), files)

    def needed_inputs(self) -> tuple[TensorSpec, ...]:
        """Raises UsageError if there are none."""
        if self.inputs is None:
            raise UsageError(f"{self.name} does not say what its network takes; add a line such as {EXAMPLE}")
        return self.inputs

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs or ())


def _function_of(module: ModuleType, name: str) -> Callable[..., Any] | None:
    found = getattr(module, name, None)
    if found is not None and not callable(found):
        raise UsageError(f"{name} of {module.__name__} is a {type(found).__name__}, not a function")
    return found


def _specs_of(module: ModuleType, attribute: str) -> tuple[TensorSpec, ...] | None:
    given = getattr(module, attribute, None)
    if given is None:
        return None
    if not isinstance(given, Mapping) or not given:
        raise UsageError(f"{attribute} of {module.__name__} is not a dictionary such as {EXAMPLE}")
    return tuple(_parse_spec(f"{attribute} of {module.__name__}", name, each) for name, each in given.items())


def _parse_spec(where: str, name: object, given: object) -> TensorSpec:
    match given:
        case (str(datatype), [-1, *sizes]) if datatype in TORCH_DTYPES:
            known = tuple(size for size in sizes if type(size) is int and (size > 0 or size == BATCH))
            if len(known) == len(sizes):
                return TensorSpec(str(name), datatype, (BATCH, *known))
    raise UsageError(
        f"{where} has {given!r} for {name}; it is a datatype ({', '.join(TORCH_DTYPES)}) and a shape that begins with "
        f"-1, the batch, as in {EXAMPLE}"
    )


def described_by(architecture: Architecture) -> Description | None:
    """Description in the user's own module; None if there is no such module."""
    module = architecture.users_module
    return None if module is None else Description.from_module(module)


def build_model(architecture: Architecture, folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
    """The module that the user's function returns, with the parameters that it made."""
    module, place = architecture.users_module, f"{architecture.library}:{architecture.name}"
    function = getattr(module, architecture.name, None)
    if not callable(function):
        raise UsageError(f"the module {architecture.library} has no function {architecture.name}")
    try:
        built = function(**architecture.arguments)
    except Exception as error:
        raise UsageError(f"{place} cannot build the model: {references.describe_error(error)}") from error
    # A function for training may return its blocks and its loss too.
    model = built.get("model") if isinstance(built, Mapping) else built
    if not isinstance(model, nn.Module):
        raise UsageError(f"{place} returned a {type(model).__name__}, not a torch.nn.Module")
    return model.to(dtype=dtype)


def make_task(model: nn.Module, options: TaskOptions) -> Tensors:
    """The task of a network of the user's, which gets its inputs in the order of its description. Floats are cast to
    the dtype of ``options`` if it is given. Raises UsageError if it does not take them, or gives something else than
    tensors."""
    description = described_by(options.architecture)
    assert description is not None
    return task_of_module(model, description, options)


def task_of_module(model: nn.Module, description: Description, options: TaskOptions) -> Tensors:
    inputs = description.needed_inputs()
    network = Network(inputs, call_in_order(model), device_of(model), options.model.torch_dtype(), description.names)
    return tensors_of(network, options.passes(), declared=description.outputs, files=description.files)
