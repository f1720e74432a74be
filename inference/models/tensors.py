"""The task of a network that takes tensors and gives tensors.

A network takes a batch of rows, and the first dimension of each of its outputs is the batch too. A few rows of random
values are predicted when it is loaded: they show the names and the shapes of its outputs, and whether a row's answer
depends on the rows around it, as the scores of CLIP do. Such a network gets passes of one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ckpt_tools.errors import CkptError, FormatError, UsageError

from ..common.errors import describe_error
from .passes import InPasses, Passes, pack_bytes
from .results import (
    ANSWER,
    BATCH,
    BYTES,
    DTYPES,
    Array,
    Columns,
    ModelInput,
    TensorSpec,
    concatenate_rows,
    predict_by_group,
    shape_fits,
    text_column,
)

Call = Callable[[Mapping[str, Tensor]], Any]
Shapes = tuple[tuple[int, ...], ...]  # of a row, for each input

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{f"INT{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
}
DATATYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

HOW_TO_BUILD = "build it in a function of yours, as module:function, with inputs beside it"

IMAGE_SIZES, SAMPLES, TOKENS = (128, 160), (4000, 6000), (5, 7)
"""Two sizes that a dimension of any size has in random rows: of images, of a sound, of anything else."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A network, which is called with tensors of ``inputs`` by name, on ``device``, floats as ``dtype`` if it is given.
    ``check`` raises FormatError for a row that it does not take, and ``below`` has bounds of integers. ``examples`` are
    shapes of a row that it takes. If ``is_listed``, its answer is a list with a mapping for each row."""

    inputs: tuple[TensorSpec, ...]
    call: Call
    device: torch.device
    dtype: torch.dtype | None = None
    names: tuple[str, ...] = ()
    examples: tuple[Shapes, Shapes] = ((), ())
    below: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[Mapping[str, Array]], None] = lambda _: None
    is_listed: bool | None = None  # None until it has been asked

    @torch.inference_mode()
    def outputs_of(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """The outputs [n, ...] of n rows, by name, on the CPU. Raises UsageError if they are no such tensors."""
        found, many = self.call_network(rows), len(rows[0])
        if self.is_listed:
            found = {name: each.unsqueeze(0) for name, each in name_outputs(found[0]).items()}
        outputs = _rename_outputs(name_outputs(found), self.names)
        for name, each in outputs.items():
            if each.shape[:1] != (many,):
                raise UsageError(
                    f"the output {name} has the shape {list(each.shape)} for {many} rows; its first dimension has to "
                    "be the batch"
                )
        return {name: each.detach().cpu() for name, each in outputs.items()}

    @torch.inference_mode()
    def call_network(self, rows: Sequence[Tensor]) -> Any:
        """The network's own answer."""
        return self.call({spec.name: self._to_device(each) for spec, each in zip(self.inputs, rows, strict=True)})

    def _to_device(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, self.dtype if rows.is_floating_point() else None)

    def random_rows(self, many: int, shapes: Shapes, seed: int = 0) -> tuple[Tensor, ...]:
        """Random values of the inputs. Integers are below ``below``, by default 0 and 1; masks are full."""
        generator = torch.Generator().manual_seed(seed)

        def values(spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
            dtype = TORCH_DTYPES[spec.datatype]
            if dtype.is_floating_point:
                return torch.randn(many, *shape, generator=generator).to(dtype)
            if "mask" in spec.name:
                return torch.ones(many, *shape, dtype=dtype)
            below = self.below.get(spec.name, 256 if spec.datatype == "UINT8" else 2)
            return torch.randint(below, (many, *shape), generator=generator).to(dtype)

        return tuple(values(spec, shape) for spec, shape in zip(self.inputs, shapes, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class FileFunctions:
    """Functions of the user's: ``decode`` makes one row of the bytes of a file, a tuple or a mapping for several
    inputs, and ``encode`` an object of JSON of a row's outputs."""

    decode: Callable[[bytes], Any] | None = None
    encode: Callable[[dict[str, Any]], Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tensors(InPasses):
    """Answers rows of tensors with the outputs of a network. Rows of one shape share a pass; none is padded. Outputs
    whose shapes differ between rows are an array of objects."""

    network: Network
    outputs: tuple[TensorSpec, ...]
    passes: Passes
    files: FileFunctions = field(default_factory=FileFunctions)

    labels: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.files.encode is not None:
            if any(spec.name == ANSWER for spec in self.outputs):
                raise UsageError(f"the network has an output named {ANSWER}, which is the name of what encode gives")
            object.__setattr__(self, "outputs", (*self.outputs, TensorSpec(ANSWER, BYTES, (BATCH,))))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.network.inputs

    def decode(self, data: bytes, name: str) -> ModelInput:
        """Raises FormatError too if there is no function for it."""
        if self.files.decode is None:
            raise FormatError(f"{name} cannot be read: the model takes tensors, and has no function decode")
        try:
            found = self.files.decode(data)
        except Exception as error:
            # A function of the user's, and of the library that it reads with.
            raise FormatError(f"{name} cannot be read: {describe_error(error)}") from error
        row = self._decoded_row(found, name)
        self._check_row(row, name)
        return row[0] if len(row) == 1 else row

    def _decoded_row(self, found: Any, name: str) -> tuple[Array, ...]:
        names = [spec.name for spec in self.inputs]
        if isinstance(found, Mapping):
            if set(found) != set(names):
                raise FormatError(f"{name}: decode gives {', '.join(map(str, found))}; inputs has {', '.join(names)}")
            found = tuple(found[each] for each in names)
        return tuple(map(np.asarray, found if isinstance(found, tuple) else (found,)))

    def _check_row(self, row: Sequence[Array], name: str) -> None:
        if len(row) != len(self.inputs):
            raise FormatError(f"{name} has {len(row)} arrays; the model takes {len(self.inputs)}")
        for spec, given in zip(self.inputs, row, strict=True):
            if given.dtype != DTYPES[spec.datatype] or not shape_fits(given.shape, spec.shape[1:]):
                raise FormatError(
                    f"{name} has for {spec.name} {given.dtype} {list(given.shape)}; the model takes {spec.datatype} "
                    f"{list(spec.shape[1:])}, -1 being any size"
                )
        self.network.check({spec.name: given for spec, given in zip(self.inputs, row, strict=True)})

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        rows = [tuple(map(np.asarray, each)) if isinstance(each, tuple) else (each,) for each in inputs]
        for number, row in enumerate(rows):
            self._check_row(row, f"row {number}")
        columns = predict_by_group(rows, lambda row: tuple(part.shape for part in row), self._predict_group)
        return columns if self.files.encode is None else {**columns, ANSWER: self._encode_rows(columns, len(rows))}

    def measure_passes(self) -> None:
        """Find the sizes of forward passes, if inputs have one shape. ``encode`` is not called: it may not take the
        answer of zeros."""
        if all(spec.row_bytes is not None for spec in self.inputs):
            row = tuple(spec.zeros() for spec in self.inputs)
            self._predict_group([row], tuple(part.shape for part in row))

    def _predict_group(self, rows: Sequence[tuple[Array, ...]], shapes: Shapes) -> Columns:
        """Outputs of rows of one shape."""
        tensors = [tensor_of(np.stack(parts)) for parts in zip(*rows, strict=True)]
        examples: list[Tensor] = []

        def random() -> Tensor:
            examples.extend(self.network.random_rows(self.passes.full, shapes))
            return torch.arange(self.passes.full)

        def probe(numbers: Tensor) -> Tensor:
            return pack_bytes(self.network.outputs_of([each[numbers] for each in examples]))

        passes: list[Columns] = []
        shown = ", ".join("x".join(map(str, shape)) for shape in shapes)
        for numbers, kept in self.passes.split_numbers(len(rows), shown, probe, random):
            outputs = self.network.outputs_of([each[numbers] for each in tensors])
            # Copies: a network may give the same memory again.
            found = {name: array_of(each[:kept]).copy() for name, each in outputs.items()}
            self._check_outputs(found)
            passes.append(found)
        return {name: concatenate_rows([each[name] for each in passes]) for name in passes[0]}

    def _check_outputs(self, found: Columns) -> None:
        """Raises UsageError for other outputs than the metadata has. Sizes that random rows had may differ."""
        for spec in self.outputs:
            have = found.get(spec.name)
            if spec.name != ANSWER and (
                have is None or have.dtype != DTYPES[spec.datatype] or have.ndim != len(spec.shape)
            ):
                shown = "missing" if have is None else f"{have.dtype} {list(have.shape)}"
                raise UsageError(f"the output {spec.name} is {shown}; it was {spec.datatype} {list(spec.shape)} before")

    def _encode_rows(self, columns: Columns, many: int) -> Array:
        assert self.files.encode is not None
        given = ({name: column[number] for name, column in columns.items()} for number in range(many))
        return text_column([_json_of(self.files.encode, row) for row in given])


def _json_of(encode: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> str:
    try:
        return json.dumps(encode(row), allow_nan=False)
    except Exception as error:
        # A function of the user's.
        raise UsageError(f"encode does not give JSON: {type(error).__name__}: {describe_error(error)}") from error


def name_outputs(found: Any) -> dict[str, Tensor]:
    """The tensors of a network's answer by name: ``output`` for a tensor, ``output_0`` and so on for a sequence, and
    the keys of a mapping, a dataclass or a named tuple; inner names are joined by ``_``. None is left out. Raises
    UsageError for anything else, and for two tensors of one name."""
    outputs: dict[str, Tensor] = {}
    for name, each in _named_leaves(found, ""):
        if not isinstance(each, Tensor) or each.dtype not in DATATYPES:
            kind = each.dtype if isinstance(each, Tensor) else type(each).__name__
            raise UsageError(f"the output {name} is of {kind}; outputs are tensors of {', '.join(TORCH_DTYPES)}")
        if name in outputs:
            raise UsageError(f"the network has two outputs named {name}")
        outputs[name] = each
    if not outputs:
        raise UsageError("the network has no output")
    return outputs


def _named_leaves(found: Any, name: str) -> Iterator[tuple[str, Any]]:
    if found is None:
        return
    keys = _named_fields(found)
    if keys is not None:
        for key, each in keys:
            yield from _named_leaves(each, f"{name}_{key}" if name else str(key))
    elif isinstance(found, tuple | list):
        for number, each in enumerate(found):
            yield from _named_leaves(each, f"{name or 'output'}_{number}")
    else:
        yield name or "output", found


def _named_fields(found: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(found, Mapping):
        return list(found.items())
    if is_dataclass(found):
        return [(each.name, getattr(found, each.name)) for each in fields(found)]
    return list(found._asdict().items()) if hasattr(found, "_asdict") else None


def _rename_outputs(outputs: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """``outputs`` with ``names``: these are the keys of the network's own mapping, or in the order of its sequence."""
    if not names or set(names) <= set(outputs):
        return {name: outputs[name] for name in names} if names else outputs
    if len(names) != len(outputs) or not all(name.startswith("output") for name in outputs):
        raise UsageError(f"the network gives {', '.join(outputs)}; outputs has {', '.join(names)}")
    return dict(zip(names, outputs.values(), strict=True))


def call_in_order(model: nn.Module) -> Call:
    """A call of the model with the inputs in their order."""
    return lambda tensors: model(*tensors.values())


def tensor_of(values: Array) -> Tensor:
    """A tensor of a numpy array, which shares its memory."""
    if values.dtype == DTYPES["BF16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def array_of(values: Tensor) -> Array:
    if values.dtype == torch.bfloat16:
        return values.contiguous().view(torch.int16).numpy().view(DTYPES["BF16"])
    return values.numpy()


def tensors_of(
    network: Network,
    passes: Passes,
    *,
    declared: Sequence[TensorSpec] | None = None,
    files: FileFunctions | None = None,
) -> Tensors:
    """The task of a network. ``declared`` are its outputs if they are known; others are found by random rows. Raises
    UsageError if it does not take these, or an output is not a tensor whose first dimension is the batch."""
    if not network.examples[0]:
        network = replace(network, examples=(_example_shapes(network.inputs, 0), _example_shapes(network.inputs, 1)))
    try:
        network, passes = _examine_rows(network, passes)
        found = _found_outputs(network, passes)
    except Exception as error:
        if isinstance(error, CkptError) or declared is None:
            raise _not_answered(network, error) from error
        # Random rows are none that it takes: nothing is known of rows in company.
        network, passes, found = replace(network, is_listed=True), replace(passes, full=1, least=1), tuple(declared)
    if declared is not None:
        _check_declared(declared, found)
    return Tensors(network, tuple(declared or found), passes, files or FileFunctions())


def _not_answered(network: Network, error: Exception) -> UsageError:
    if isinstance(error, UsageError):
        return error
    shown = ", ".join(
        f"{spec.name} {spec.datatype} {list(shape)}"
        for spec, shape in zip(network.inputs, network.examples[0], strict=True)
    )
    return UsageError(
        f"the network does not answer random values ({shown}): {describe_error(error)[:300]}; say by inputs and "
        "outputs, in a module of yours, what it takes and gives"
    )


def _example_shapes(inputs: Sequence[TensorSpec], which: int) -> Shapes:
    return tuple(
        tuple(_sizes_to_try(spec)[which] if size == BATCH else size for size in spec.shape[1:]) for spec in inputs
    )


def _sizes_to_try(spec: TensorSpec) -> tuple[int, int]:
    if len(spec.shape) > 3:
        return IMAGE_SIZES
    return SAMPLES if len(spec.shape) == 2 and TORCH_DTYPES[spec.datatype].is_floating_point else TOKENS


def _examine_rows(network: Network, passes: Passes) -> tuple[Network, Passes]:
    """The network with ``is_listed``, and its passes: of one row if a row's answer depends on the others."""
    if network.is_listed is None:
        many = min(2, passes.full)
        found = network.call_network(network.random_rows(many, network.examples[0]))
        is_listed = (
            isinstance(found, list) and len(found) == many and all(_named_fields(each) is not None for each in found)
        )
        network = replace(network, is_listed=is_listed)
    if network.is_listed:
        return network, replace(passes, full=1)
    if passes.full == 1 or not _depends_on_others(network, passes.full):
        return network, passes
    if passes.least > 1:
        raise UsageError(
            f"a row's answer depends on the others, and the program takes at least {passes.least}; export it for one"
        )
    return network, replace(passes, full=1)


def _depends_on_others(network: Network, many: int) -> bool:
    """Whether the first or the last row's answer has other bits with other rows between them."""
    rows = network.random_rows(many, network.examples[0])
    others = network.random_rows(many, network.examples[0], seed=1)
    mixed = [torch.cat([row[:1], other[1:-1], row[-1:]]) for row, other in zip(rows, others, strict=True)]
    found, again = pack_bytes(network.outputs_of(rows)), pack_bytes(network.outputs_of(mixed))
    return found.shape != again.shape or not torch.equal(found[[0, -1]], again[[0, -1]])


def _found_outputs(network: Network, passes: Passes) -> tuple[TensorSpec, ...]:
    """The outputs of random rows. A dimension that is 0, or that differs between two shapes, is any size."""
    shapes = []
    for seed, example in enumerate(network.examples):
        found = network.outputs_of(network.random_rows(passes.least, example, seed))
        shapes.append({name: tuple(each.shape[1:]) for name, each in found.items()})
    dtypes = {name: DATATYPES[each.dtype] for name, each in found.items()}
    if shapes[0].keys() != shapes[1].keys() or any(len(shapes[0][name]) != len(shapes[1][name]) for name in dtypes):
        raise UsageError("the network gives other outputs for other shapes of its inputs")
    return tuple(
        TensorSpec(
            name, dtypes[name], (BATCH, *_common_sizes(shapes[0][name], shapes[1][name], bool(network.is_listed)))
        )
        for name in dtypes
    )


def _common_sizes(first: Sequence[int], second: Sequence[int], is_listed: bool) -> Iterator[int]:
    for place, (size, other) in enumerate(zip(first, second, strict=True)):
        yield size if size == other > 0 and not (is_listed and place == 0) else BATCH


def _check_declared(declared: Sequence[TensorSpec], found: Sequence[TensorSpec]) -> None:
    by_name = {spec.name: spec for spec in found}
    for spec in declared:
        have = by_name.get(spec.name, TensorSpec(spec.name, BYTES, (BATCH,)))
        fits = len(have.shape) == len(spec.shape) and all(
            BATCH in (size, want) or size == want for size, want in zip(have.shape, spec.shape, strict=True)
        )
        if have.datatype != spec.datatype or not fits:
            raise UsageError(
                f"outputs says that {spec.name} is {spec.datatype} {list(spec.shape)}; the network gives "
                f"{have.datatype} {list(have.shape)}"
            )
