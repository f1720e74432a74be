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
from .prediction import find_device
from .results import BATCH, TensorSpec
from .task import TaskOptions
from .tensors import TORCH_DTYPES, FileFunctions, Network, TensorTask, call_in_order, make_tensor_task

EXAMPLE = 'inputs = {"image": ("FP32", [-1, 3, 224, 224])}'


@dataclass(frozen=True, slots=True, eq=False)
class NetworkDescription:
    """Description of a network in a module of the user's: ``inputs`` and ``outputs`` with datatype and shape by name,
    and the functions ``decode`` and ``encode``; each may be missing."""

    name: str = ""
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    functions: FileFunctions = field(default_factory=FileFunctions)

    @classmethod
    def from_module(cls, module: ModuleType) -> NetworkDescription:
        """Raises UsageError if ``inputs`` or ``outputs`` is something else."""
        functions = FileFunctions(_get_function(module, "decode"), _get_function(module, "encode"))
        return cls(module.__name__, _parse_specs(module, "inputs"), _parse_specs(module, "outputs"), functions)

    def require_inputs(self) -> tuple[TensorSpec, ...]:
        """Raises UsageError if there are none."""
        if self.inputs is None:
            raise UsageError(f"{self.name} does not say what its network takes; add a line such as {EXAMPLE}")
        return self.inputs

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs or ())


def _get_function(module: ModuleType, name: str) -> Callable[..., Any] | None:
    function = getattr(module, name, None)
    if function is not None and not callable(function):
        raise UsageError(f"{name} of {module.__name__} is a {type(function).__name__}, not a function")
    return function


def _parse_specs(module: ModuleType, attribute: str) -> tuple[TensorSpec, ...] | None:
    specs = getattr(module, attribute, None)
    if specs is None:
        return None
    if not isinstance(specs, Mapping) or not specs:
        raise UsageError(f"{attribute} of {module.__name__} is not a dictionary such as {EXAMPLE}")
    return tuple(_parse_spec(f"{attribute} of {module.__name__}", name, each) for name, each in specs.items())


def _parse_spec(where: str, name: object, value: object) -> TensorSpec:
    match value:
        case (str(datatype), [-1, *sizes]) if datatype in TORCH_DTYPES:
            valid_sizes = tuple(size for size in sizes if type(size) is int and (size > 0 or size == BATCH))
            if len(valid_sizes) == len(sizes):
                return TensorSpec(str(name), datatype, (BATCH, *valid_sizes))
    raise UsageError(
        f"{where} has {value!r} for {name}; it is a datatype ({', '.join(TORCH_DTYPES)}) and a shape that begins with "
        f"-1, the batch, as in {EXAMPLE}"
    )


def read_description(architecture: Architecture) -> NetworkDescription | None:
    """Description in the user's own module; None if there is no such module."""
    module = architecture.users_module
    return None if module is None else NetworkDescription.from_module(module)


def build_model(architecture: Architecture, folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
    """The module that the user's function returns, with the parameters that it made."""
    module, place = architecture.users_module, f"{architecture.library}:{architecture.name}"
    function = getattr(module, architecture.name, None)
    if not callable(function):
        raise UsageError(f"the module {architecture.library} has no function {architecture.name}")
    try:
        result = function(**architecture.arguments)
    except Exception as error:
        raise UsageError(f"{place} cannot build the model: {references.describe_error(error)}") from error
    # A function for training may return its blocks and its loss too.
    model = result.get("model") if isinstance(result, Mapping) else result
    if not isinstance(model, nn.Module):
        raise UsageError(f"{place} returned a {type(model).__name__}, not a torch.nn.Module")
    return model.to(dtype=dtype)


def make_task(model: nn.Module, options: TaskOptions) -> TensorTask:
    """The task of a network of the user's, which gets its inputs in the order of its description. Floats are cast to
    the dtype of ``options`` if it is given. Raises UsageError if it does not take them, or gives something else than
    tensors."""
    description = read_description(options.architecture)
    assert description is not None
    return make_module_task(model, description, options)


def make_module_task(model: nn.Module, description: NetworkDescription, options: TaskOptions) -> TensorTask:
    inputs, dtype = description.require_inputs(), options.model.get_torch_dtype()
    network = Network(inputs, call_in_order(model), find_device(model), dtype, description.output_names)
    return make_tensor_task(
        network, options.make_passes(), outputs=description.outputs, functions=description.functions
    )
