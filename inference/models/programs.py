"""Checkpoints that are programs: ``torch.export`` (``.pt2``) and TorchScript.

Loading one runs its author's code, so it is loaded only if the user names the kind of program. torch reads it whole,
with its own names, shapes and dtypes; no architecture is needed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from ckpt_tools.errors import FormatError, SourceNotFoundError, UsageError

from ..common.urls import open_file
from .architectures import EXPORTED, PROGRAMS, SCRIPTED
from .passes import Passes
from .results import BATCH, Array, TensorSpec
from .task import TaskOptions
from .tensors import DATATYPES, Network, Shapes, Tensors, name_outputs, tensors_of
from .users_code import EXAMPLE, Description, described_by, task_of_module

MAX_ROWS = 2**31
"""In the place of an infinite bound."""


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded program: an ExportedProgram or a TorchScript module, and the BLAKE3 of its file."""

    kind: str
    found: Any
    digest: str

    @property
    def module(self) -> nn.Module:
        found: nn.Module = self.found.module() if self.kind == EXPORTED else self.found
        return found


def load_program(
    kind: str, url: str | Path, device: str | torch.device, storage_options: Mapping[str, Any] | None
) -> Program:
    """Load the program at ``url`` to ``device``. Raises FormatError if it is not such a program. SourceNotFoundError if
    there is no such file."""
    try:
        with open_file(str(url), storage_options) as file:
            data = file.read()  # at once, so that the digest is of what is run
        with _silence_torch():
            return Program(kind, _READERS[kind](BytesIO(data), device), f"blake3:{blake3(data).hexdigest()}")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise SourceNotFoundError(f"there is no file {url}") from error
    except PermissionError as error:
        raise FormatError(f"{url} cannot be read ({error.strerror})") from error
    except _FAILURES as error:
        raise FormatError(f"{url} is not {PROGRAMS[kind]}, or is damaged") from error


def _load_exported(file: BinaryIO, device: str | torch.device) -> ExportedProgram:
    program = torch.export.load(file)
    if torch.device(device).type != "cpu":
        program = move_to_device_pass(program, device)
    return program


_READERS: Mapping[str, Callable[[BinaryIO, str | torch.device], Any]] = {
    EXPORTED: _load_exported,
    SCRIPTED: lambda file, device: torch.jit.load(file, map_location=device).eval(),
}

_FAILURES = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, OSError, BadZipFile)
"""Errors of torch's readers, which do not tell a damaged file from another kind of file."""


@contextmanager
def _silence_torch() -> Iterator[None]:
    """Silences torch's traceback for an unreadable file, and TorchScript's deprecation warning."""
    logger = logging.getLogger("torch.export")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def make_program_task(program: Program, device: str | torch.device, options: TaskOptions) -> Tensors:
    """The task of a program. TorchScript knows no shapes: raises UsageError without a description."""
    description = described_by(options.architecture)
    if program.kind == EXPORTED:
        return _task_of_exported(program.found, device, description or Description(), options.passes())
    if description is None:
        raise UsageError(
            f"{SCRIPTED} does not say the shapes of its inputs; write {SCRIPTED}:MODULE, and in this module of yours a "
            f"line such as {EXAMPLE}"
        )
    return task_of_module(program.found, description, options)


def _task_of_exported(
    program: ExportedProgram, device: str | torch.device, said: Description, passes: Passes
) -> Tensors:
    """The task of a program of torch.export, which knows its tensors. Raises UsageError if one has no batch, or the
    description has other inputs."""
    signed = ProgramSignature.from_program(program)
    inputs = signed.tensor_specs(signed.inputs)
    if not inputs:
        raise UsageError("the program takes no tensor")
    if said.inputs not in (None, inputs):
        taken = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in inputs)
        raise UsageError(f"inputs of {said.name} is not what the program takes: {taken}")
    least, most = signed.batch_range()
    full = max(least, min(passes.full, most))
    network = Network(
        inputs,
        partial(_call_program, program.module(), program, signed),
        torch.device(device),
        None,
        said.names,
        (signed.example_shapes(), signed.example_shapes()),
        check=signed.check_row,
        is_listed=False,
    )
    outputs = said.outputs or signed.tensor_specs(signed.outputs)
    return tensors_of(network, Passes(full, passes.exact, least), declared=outputs, files=said.files)


def _call_program(
    module: nn.Module, program: ExportedProgram, signed: ProgramSignature, given: Mapping[str, Tensor]
) -> Any:
    leaves = [value if name is None else given[name] for name, value in signed.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return module(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class ProgramSignature:
    """Tensors of a program by name, without elements: sizes are numbers or symbols. ``leaves`` are its arguments in
    order: the name of a tensor, or None and a constant. ``ranges`` has the least and the most of a symbol."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    leaves: tuple[tuple[str | None, Any], ...]
    ranges: Mapping[Any, Any]

    @classmethod
    def from_program(cls, program: ExportedProgram) -> ProgramSignature:
        """Raises UsageError if an input or an output is a number that changes."""
        nodes = {node.name: node for node in program.graph.nodes}
        signature = program.graph_signature
        leaves = [_leaf_of(each.arg) for each in signature.input_specs if each.kind.name == "USER_INPUT"]
        results = [_leaf_of(each.arg) for each in signature.output_specs if each.kind.name == "USER_OUTPUT"]
        inputs = {name: nodes[name].meta["val"] for name, _ in leaves if name is not None}
        values = [value if name is None else nodes[name].meta["val"] for name, value in results]
        outputs = name_outputs(pytree.tree_unflatten(values, program.call_spec.out_spec))
        return cls(inputs, outputs, tuple(leaves), program.range_constraints)

    def tensor_specs(self, tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
        """Raises UsageError if the first dimension of one is not the batch, or its dtype is none of the protocol."""
        return tuple(self._tensor_spec(name, each) for name, each in tensors.items())

    def _tensor_spec(self, name: str, tensor: Tensor) -> TensorSpec:
        if tensor.dtype not in DATATYPES:
            raise UsageError(f"the program's {name} is of {tensor.dtype}, which the protocol does not have")
        if not tensor.dim() or _size_expression(tensor.shape[0]) not in self._batch_sizes():
            raise UsageError(
                f"the program's {name} is {list(tensor.shape)}; the first dimension of every input and output has to "
                "be the batch"
            )
        if any(
            self._batch_sizes() & getattr(_size_expression(size), "free_symbols", set()) for size in tensor.shape[1:]
        ):
            raise UsageError(
                f"the program's {name} is {list(tensor.shape)}; the batch has to be its first dimension alone"
            )
        sizes = (size if isinstance(size, int) else BATCH for size in tensor.shape[1:])
        return TensorSpec(name, DATATYPES[tensor.dtype], (BATCH, *sizes))

    def _batch_sizes(self) -> set[Any]:
        """First dimensions of the inputs: one number, or symbols."""
        found = {_size_expression(each.shape[0]) for each in self.inputs.values() if each.dim()}
        is_fixed = len(found) == 1 and all(isinstance(each, int) for each in found)
        return found if is_fixed or all(_is_symbol(each) for each in found) else set()

    def batch_range(self) -> tuple[int, int]:
        """The least and the most rows."""
        bounds = [self._size_bounds(each) for each in self._batch_sizes()]
        return max(1, *(int(low) for low, _ in bounds)), min(int(min(high, MAX_ROWS)) for _, high in bounds)

    def _size_bounds(self, size: Any) -> tuple[Any, Any]:
        return (size, size) if isinstance(size, int) else (self.ranges[size].lower, self.ranges[size].upper)

    def example_shapes(self) -> Shapes:
        """The shapes of a row that the program was made with."""
        return tuple(
            tuple(size if isinstance(size, int) else int(size.node.hint) for size in each.shape[1:])
            for each in self.inputs.values()
        )

    def check_row(self, row: Mapping[str, Array]) -> None:
        """Raises FormatError for sizes that the program does not take, alone or together."""
        bound: dict[Any, int] = {}
        sizes = list(self._symbolic_sizes(row))
        for name, have, want in (each for each in sizes if _is_symbol(each[2])):
            low, high = self._size_bounds(want)
            if not low <= have <= high:
                raise FormatError(f"{name} has the size {have}; the program takes {low} to {high}")
            if bound.setdefault(want, have) != have:
                raise FormatError(f"{name} has the size {have}, and another tensor {bound[want]}; they must be equal")
        for name, have, want in sizes:
            if (wanted := want.subs(bound)) != have:
                raise FormatError(f"{name} has the size {have}; the program takes {wanted}")

    def _symbolic_sizes(self, row: Mapping[str, Array]) -> Iterator[tuple[str, int, Any]]:
        """Each dimension of a row that is a symbol or is computed from some."""
        for name, values in row.items():
            wanted: Sequence[Any] = self.inputs[name].shape[1:]
            for place, (have, want) in enumerate(zip(values.shape, wanted, strict=True)):
                if not isinstance(want, int):
                    yield f"dimension {place + 1} of {name}", have, _size_expression(want)


def _leaf_of(argument: Any) -> tuple[str | None, Any]:
    """The name of a tensor and None, or None and a constant. Raises UsageError for a number that changes."""
    kind = type(argument).__name__
    if kind == "ConstantArgument":
        return None, argument.value
    if kind != "TensorArgument":
        raise UsageError(f"the program's {argument.name} is not a tensor; export it with tensors and constants alone")
    return argument.name, None


def _size_expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _is_symbol(expression: Any) -> bool:
    return getattr(expression, "is_Symbol", False)
