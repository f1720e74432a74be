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
from .passes import ForwardPasses
from .results import BATCH, Array, TensorSpec
from .task import TaskOptions
from .tensors import DATATYPES, Network, RowShapes, TensorTask, make_tensor_task, name_outputs
from .users_code import EXAMPLE, NetworkDescription, make_module_task, read_description

MAX_ROWS = 2**31
"""In the place of an infinite bound."""


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A loaded program: an ExportedProgram or a TorchScript module, and the BLAKE3 of its file."""

    kind: str
    program: Any
    digest: str

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.program.module() if self.kind == EXPORTED else self.program
        return module


def load_program(
    kind: str, url: str | Path, device: str | torch.device, storage_options: Mapping[str, Any] | None
) -> LoadedProgram:
    """Load the program at ``url`` to ``device``. Raises FormatError if it is not such a program. SourceNotFoundError if
    there is no such file."""
    try:
        with open_file(str(url), storage_options) as file:
            data = file.read()  # at once, so that the digest is of what is run
        with _silence_torch():
            return LoadedProgram(kind, _READERS[kind](BytesIO(data), device), f"blake3:{blake3(data).hexdigest()}")
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


def make_program_task(loaded: LoadedProgram, device: str | torch.device, options: TaskOptions) -> TensorTask:
    """The task of a program. TorchScript knows no shapes: raises UsageError without a description."""
    description = read_description(options.architecture)
    if loaded.kind == EXPORTED:
        return _make_exported_task(loaded.program, device, description or NetworkDescription(), options.make_passes())
    if description is None:
        raise UsageError(
            f"{SCRIPTED} does not say the shapes of its inputs; write {SCRIPTED}:MODULE, and in this module of yours a "
            f"line such as {EXAMPLE}"
        )
    return make_module_task(loaded.program, description, options)


def _make_exported_task(
    program: ExportedProgram, device: str | torch.device, description: NetworkDescription, passes: ForwardPasses
) -> TensorTask:
    """The task of a program of torch.export, which knows its tensors. Raises UsageError if one has no batch, or the
    description has other inputs."""
    signature = ProgramSignature.from_program(program)
    inputs = signature.make_specs(signature.inputs)
    if not inputs:
        raise UsageError("the program takes no tensor")
    if description.inputs not in (None, inputs):
        taken = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in inputs)
        raise UsageError(f"inputs of {description.name} is not what the program takes: {taken}")
    min_rows, max_rows = signature.find_batch_range()
    full_size = max(min_rows, min(passes.full_size, max_rows))
    network = Network(
        inputs,
        partial(_call_program, program.module(), program, signature),
        torch.device(device),
        None,
        description.output_names,
        (signature.list_example_shapes(), signature.list_example_shapes()),
        check_row=signature.check_row,
        gives_list=False,
    )
    outputs = description.outputs or signature.make_specs(signature.outputs)
    passes = ForwardPasses(full_size, passes.exact, min_rows)
    return make_tensor_task(network, passes, outputs=outputs, functions=description.functions)


def _call_program(
    module: nn.Module, program: ExportedProgram, signature: ProgramSignature, tensors: Mapping[str, Tensor]
) -> Any:
    leaves = [value if name is None else tensors[name] for name, value in signature.leaves]
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
        leaves = [_parse_leaf(each.arg) for each in signature.input_specs if each.kind.name == "USER_INPUT"]
        results = [_parse_leaf(each.arg) for each in signature.output_specs if each.kind.name == "USER_OUTPUT"]
        inputs = {name: nodes[name].meta["val"] for name, _ in leaves if name is not None}
        values = [value if name is None else nodes[name].meta["val"] for name, value in results]
        outputs = name_outputs(pytree.tree_unflatten(values, program.call_spec.out_spec))
        return cls(inputs, outputs, tuple(leaves), program.range_constraints)

    def make_specs(self, tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
        """Raises UsageError if the first dimension of one is not the batch, or its dtype is none of the protocol."""
        return tuple(self._make_spec(name, each) for name, each in tensors.items())

    def _make_spec(self, name: str, tensor: Tensor) -> TensorSpec:
        if tensor.dtype not in DATATYPES:
            raise UsageError(f"the program's {name} is of {tensor.dtype}, which the protocol does not have")
        batch_sizes = self._find_batch_sizes()
        if not tensor.dim() or _get_expression(tensor.shape[0]) not in batch_sizes:
            raise UsageError(
                f"the program's {name} is {list(tensor.shape)}; the first dimension of every input and output has to "
                "be the batch"
            )
        if any(batch_sizes & getattr(_get_expression(size), "free_symbols", set()) for size in tensor.shape[1:]):
            raise UsageError(
                f"the program's {name} is {list(tensor.shape)}; the batch has to be its first dimension alone"
            )
        sizes = (size if isinstance(size, int) else BATCH for size in tensor.shape[1:])
        return TensorSpec(name, DATATYPES[tensor.dtype], (BATCH, *sizes))

    def _find_batch_sizes(self) -> set[Any]:
        """First dimensions of the inputs: one number, or symbols."""
        sizes = {_get_expression(each.shape[0]) for each in self.inputs.values() if each.dim()}
        is_fixed = len(sizes) == 1 and all(isinstance(each, int) for each in sizes)
        return sizes if is_fixed or all(_is_symbol(each) for each in sizes) else set()

    def find_batch_range(self) -> tuple[int, int]:
        """The least and the most rows."""
        bounds = [self._get_bounds(each) for each in self._find_batch_sizes()]
        return max(1, *(int(low) for low, _ in bounds)), min(int(min(high, MAX_ROWS)) for _, high in bounds)

    def _get_bounds(self, size: Any) -> tuple[Any, Any]:
        return (size, size) if isinstance(size, int) else (self.ranges[size].lower, self.ranges[size].upper)

    def list_example_shapes(self) -> RowShapes:
        """The shapes of a row that the program was made with."""
        return tuple(
            tuple(size if isinstance(size, int) else int(size.node.hint) for size in each.shape[1:])
            for each in self.inputs.values()
        )

    def check_row(self, row: Mapping[str, Array]) -> None:
        """Raises FormatError for sizes that the program does not take, alone or together."""
        values: dict[Any, int] = {}
        sizes = list(self._list_symbolic_sizes(row))
        for name, size, symbol in (each for each in sizes if _is_symbol(each[2])):
            low, high = self._get_bounds(symbol)
            if not low <= size <= high:
                raise FormatError(f"{name} has the size {size}; the program takes {low} to {high}")
            if values.setdefault(symbol, size) != size:
                raise FormatError(
                    f"{name} has the size {size}, and another tensor {values[symbol]}; they must be equal"
                )
        for name, size, expression in sizes:
            if (wanted := expression.subs(values)) != size:
                raise FormatError(f"{name} has the size {size}; the program takes {wanted}")

    def _list_symbolic_sizes(self, row: Mapping[str, Array]) -> Iterator[tuple[str, int, Any]]:
        """Each dimension of a row that is a symbol or is computed from some."""
        for name, array in row.items():
            wanted: Sequence[Any] = self.inputs[name].shape[1:]
            for place, (size, wanted_size) in enumerate(zip(array.shape, wanted, strict=True)):
                if not isinstance(wanted_size, int):
                    yield f"dimension {place + 1} of {name}", size, _get_expression(wanted_size)


def _parse_leaf(argument: Any) -> tuple[str | None, Any]:
    """The name of a tensor and None, or None and a constant. Raises UsageError for a number that changes."""
    kind = type(argument).__name__
    if kind == "ConstantArgument":
        return None, argument.value
    if kind != "TensorArgument":
        raise UsageError(f"the program's {argument.name} is not a tensor; export it with tensors and constants alone")
    return argument.name, None


def _get_expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _is_symbol(expression: Any) -> bool:
    return getattr(expression, "is_Symbol", False)
