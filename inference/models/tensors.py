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
from .passes import BatchedTask, ForwardPasses, pack_bytes
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
    does_shape_fit,
    make_text_column,
    predict_by_group,
)

NetworkCall = Callable[[Mapping[str, Tensor]], Any]
RowShapes = tuple[tuple[int, ...], ...]  # of a row, for each input

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
    ``check_row`` raises FormatError for a row that it does not take. Integers are below ``bounds``, by name.
    ``examples`` are shapes of a row that it takes. If ``gives_list``, its answer is a list with a mapping for each
    row."""

    inputs: tuple[TensorSpec, ...]
    call: NetworkCall
    device: torch.device
    dtype: torch.dtype | None = None
    output_names: tuple[str, ...] = ()
    examples: tuple[RowShapes, RowShapes] = ((), ())
    bounds: Mapping[str, int] = field(default_factory=dict)
    check_row: Callable[[Mapping[str, Array]], None] = lambda _: None
    gives_list: bool | None = None  # None until it has been asked

    @torch.inference_mode()
    def compute_outputs(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """The outputs [n, ...] of n rows, by name, on the CPU. Raises UsageError if they are no such tensors."""
        answer, num_rows = self.call_network(rows), len(rows[0])
        if self.gives_list:
            answer = {name: each.unsqueeze(0) for name, each in name_outputs(answer[0]).items()}
        outputs = _rename_outputs(name_outputs(answer), self.output_names)
        for name, each in outputs.items():
            if each.shape[:1] != (num_rows,):
                raise UsageError(
                    f"the output {name} has the shape {list(each.shape)} for {num_rows} rows; its first dimension has "
                    "to be the batch"
                )
        return {name: each.detach().cpu() for name, each in outputs.items()}

    @torch.inference_mode()
    def call_network(self, rows: Sequence[Tensor]) -> Any:
        """The network's own answer."""
        return self.call({spec.name: self._to_device(each) for spec, each in zip(self.inputs, rows, strict=True)})

    def _to_device(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, self.dtype if rows.is_floating_point() else None)

    def draw_rows(self, num_rows: int, shapes: RowShapes, seed: int = 0) -> tuple[Tensor, ...]:
        """Random values of the inputs. Integers are below ``bounds``, by default 0 and 1; masks are full."""
        generator = torch.Generator().manual_seed(seed)

        def draw_values(spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
            dtype = TORCH_DTYPES[spec.datatype]
            if dtype.is_floating_point:
                return torch.randn(num_rows, *shape, generator=generator).to(dtype)
            if "mask" in spec.name:
                return torch.ones(num_rows, *shape, dtype=dtype)
            bound = self.bounds.get(spec.name, 256 if spec.datatype == "UINT8" else 2)
            return torch.randint(bound, (num_rows, *shape), generator=generator).to(dtype)

        return tuple(draw_values(spec, shape) for spec, shape in zip(self.inputs, shapes, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class FileFunctions:
    """Functions of the user's: ``decode`` makes one row of the bytes of a file, a tuple or a mapping for several
    inputs, and ``encode`` an object of JSON of a row's outputs."""

    decode: Callable[[bytes], Any] | None = None
    encode: Callable[[dict[str, Any]], Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TensorTask(BatchedTask):
    """Answers rows of tensors with the outputs of a network. Rows of one shape share a pass; none is padded. Outputs
    whose shapes differ between rows are an array of objects."""

    network: Network
    outputs: tuple[TensorSpec, ...]
    passes: ForwardPasses
    functions: FileFunctions = field(default_factory=FileFunctions)

    labels: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.functions.encode is not None:
            if any(spec.name == ANSWER for spec in self.outputs):
                raise UsageError(f"the network has an output named {ANSWER}, which is the name of what encode gives")
            object.__setattr__(self, "outputs", (*self.outputs, TensorSpec(ANSWER, BYTES, (BATCH,))))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.network.inputs

    def decode(self, data: bytes, name: str) -> ModelInput:
        """Raises FormatError too if there is no function for it."""
        if self.functions.decode is None:
            raise FormatError(f"{name} cannot be read: the model takes tensors, and has no function decode")
        try:
            decoded = self.functions.decode(data)
        except Exception as error:
            # A function of the user's, and of the library that it reads with.
            raise FormatError(f"{name} cannot be read: {describe_error(error)}") from error
        row = self._arrange_row(decoded, name)
        self._check_row(row, name)
        return row[0] if len(row) == 1 else row

    def _arrange_row(self, decoded: Any, name: str) -> tuple[Array, ...]:
        names = [spec.name for spec in self.inputs]
        if isinstance(decoded, Mapping):
            if set(decoded) != set(names):
                raise FormatError(f"{name}: decode gives {', '.join(map(str, decoded))}; inputs has {', '.join(names)}")
            decoded = tuple(decoded[each] for each in names)
        return tuple(map(np.asarray, decoded if isinstance(decoded, tuple) else (decoded,)))

    def _check_row(self, row: Sequence[Array], name: str) -> None:
        if len(row) != len(self.inputs):
            raise FormatError(f"{name} has {len(row)} arrays; the model takes {len(self.inputs)}")
        for spec, array in zip(self.inputs, row, strict=True):
            if array.dtype != DTYPES[spec.datatype] or not does_shape_fit(array.shape, spec.shape[1:]):
                raise FormatError(
                    f"{name} has for {spec.name} {array.dtype} {list(array.shape)}; the model takes {spec.datatype} "
                    f"{list(spec.shape[1:])}, -1 being any size"
                )
        self.network.check_row({spec.name: array for spec, array in zip(self.inputs, row, strict=True)})

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        rows = [tuple(map(np.asarray, each)) if isinstance(each, tuple) else (each,) for each in inputs]
        for number, row in enumerate(rows):
            self._check_row(row, f"row {number}")
        columns = predict_by_group(rows, lambda row: tuple(part.shape for part in row), self._predict_group)
        return columns if self.functions.encode is None else {**columns, ANSWER: self._encode_rows(columns, len(rows))}

    def measure_passes(self) -> None:
        """Find the sizes of forward passes, if inputs have one shape. ``encode`` is not called: it may not take the
        answer of zeros."""
        if all(spec.row_bytes is not None for spec in self.inputs):
            row = tuple(spec.make_zeros() for spec in self.inputs)
            self._predict_group([row], tuple(part.shape for part in row))

    def _predict_group(self, rows: Sequence[tuple[Array, ...]], shapes: RowShapes) -> Columns:
        """Outputs of rows of one shape."""
        tensors = [to_tensor(np.stack(parts)) for parts in zip(*rows, strict=True)]
        example_tensors: list[Tensor] = []

        def draw_example_numbers() -> Tensor:
            example_tensors.extend(self.network.draw_rows(self.passes.full_size, shapes))
            return torch.arange(self.passes.full_size)

        def probe(numbers: Tensor) -> Tensor:
            return pack_bytes(self.network.compute_outputs([each[numbers] for each in example_tensors]))

        chunks: list[Columns] = []
        shape_text = ", ".join("x".join(map(str, shape)) for shape in shapes)
        for numbers, num_kept in self.passes.split_numbers(len(rows), shape_text, probe, draw_example_numbers):
            outputs = self.network.compute_outputs([each[numbers] for each in tensors])
            # Copies: a network may give the same memory again.
            columns = {name: to_array(each[:num_kept]).copy() for name, each in outputs.items()}
            self._check_outputs(columns)
            chunks.append(columns)
        return {name: concatenate_rows([each[name] for each in chunks]) for name in chunks[0]}

    def _check_outputs(self, columns: Columns) -> None:
        """Raises UsageError for other outputs than the metadata has. Sizes that random rows had may differ."""
        for spec in self.outputs:
            column = columns.get(spec.name)
            if spec.name != ANSWER and (
                column is None or column.dtype != DTYPES[spec.datatype] or column.ndim != len(spec.shape)
            ):
                kind = "missing" if column is None else f"{column.dtype} {list(column.shape)}"
                raise UsageError(f"the output {spec.name} is {kind}; it was {spec.datatype} {list(spec.shape)} before")

    def _encode_rows(self, columns: Columns, num_rows: int) -> Array:
        assert self.functions.encode is not None
        rows = ({name: column[number] for name, column in columns.items()} for number in range(num_rows))
        return make_text_column([_encode_json(self.functions.encode, row) for row in rows])


def _encode_json(encode: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> str:
    try:
        return json.dumps(encode(row), allow_nan=False)
    except Exception as error:
        # A function of the user's.
        raise UsageError(f"encode does not give JSON: {type(error).__name__}: {describe_error(error)}") from error


def name_outputs(answer: Any) -> dict[str, Tensor]:
    """The tensors of a network's answer by name: ``output`` for a tensor, ``output_0`` and so on for a sequence, and
    the keys of a mapping, a dataclass or a named tuple; inner names are joined by ``_``. None is left out. Raises
    UsageError for anything else, and for two tensors of one name."""
    outputs: dict[str, Tensor] = {}
    for name, each in _list_leaves(answer, ""):
        if not isinstance(each, Tensor) or each.dtype not in DATATYPES:
            kind = each.dtype if isinstance(each, Tensor) else type(each).__name__
            raise UsageError(f"the output {name} is of {kind}; outputs are tensors of {', '.join(TORCH_DTYPES)}")
        if name in outputs:
            raise UsageError(f"the network has two outputs named {name}")
        outputs[name] = each
    if not outputs:
        raise UsageError("the network has no output")
    return outputs


def _list_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    items = _list_fields(value)
    if items is not None:
        for key, each in items:
            yield from _list_leaves(each, f"{name}_{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from _list_leaves(each, f"{name or 'output'}_{number}")
    else:
        yield name or "output", value


def _list_fields(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value):
        return [(each.name, getattr(value, each.name)) for each in fields(value)]
    return list(value._asdict().items()) if hasattr(value, "_asdict") else None


def _rename_outputs(outputs: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """``outputs`` with ``names``: these are the keys of the network's own mapping, or in the order of its sequence."""
    if not names or set(names) <= set(outputs):
        return {name: outputs[name] for name in names} if names else outputs
    if len(names) != len(outputs) or not all(name.startswith("output") for name in outputs):
        raise UsageError(f"the network gives {', '.join(outputs)}; outputs has {', '.join(names)}")
    return dict(zip(names, outputs.values(), strict=True))


def call_in_order(model: nn.Module) -> NetworkCall:
    """A call of the model with the inputs in their order."""
    return lambda tensors: model(*tensors.values())


def to_tensor(values: Array) -> Tensor:
    """A tensor of a numpy array, which shares its memory."""
    if values.dtype == DTYPES["BF16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def to_array(values: Tensor) -> Array:
    if values.dtype == torch.bfloat16:
        return values.contiguous().view(torch.int16).numpy().view(DTYPES["BF16"])
    return values.numpy()


def make_tensor_task(
    network: Network,
    passes: ForwardPasses,
    *,
    outputs: Sequence[TensorSpec] | None = None,
    functions: FileFunctions | None = None,
) -> TensorTask:
    """The task of a network. ``outputs`` are those that it should have; without, they are found by random rows. Raises
    UsageError if it does not take these, or an output is not a tensor whose first dimension is the batch."""
    if not network.examples[0]:
        network = replace(network, examples=(_pick_shapes(network.inputs, 0), _pick_shapes(network.inputs, 1)))
    try:
        network, passes = _examine_rows(network, passes)
        actual = _find_outputs(network, passes)
    except Exception as error:
        if isinstance(error, CkptError) or outputs is None:
            raise _make_refusal(network, error) from error
        # Random rows are none that it takes: nothing is known of rows in company.
        network, passes = replace(network, gives_list=True), replace(passes, full_size=1, min_size=1)
        actual = tuple(outputs)
    if outputs is not None:
        _compare_specs(outputs, actual)
    return TensorTask(network, tuple(outputs or actual), passes, functions or FileFunctions())


def _make_refusal(network: Network, error: Exception) -> UsageError:
    if isinstance(error, UsageError):
        return error
    shapes = ", ".join(
        f"{spec.name} {spec.datatype} {list(shape)}"
        for spec, shape in zip(network.inputs, network.examples[0], strict=True)
    )
    return UsageError(
        f"the network does not answer random values ({shapes}): {describe_error(error)[:300]}; say by inputs and "
        "outputs, in a module of yours, what it takes and gives"
    )


def _pick_shapes(inputs: Sequence[TensorSpec], which: int) -> RowShapes:
    return tuple(
        tuple(_pick_sizes(spec)[which] if size == BATCH else size for size in spec.shape[1:]) for spec in inputs
    )


def _pick_sizes(spec: TensorSpec) -> tuple[int, int]:
    if len(spec.shape) > 3:
        return IMAGE_SIZES
    return SAMPLES if len(spec.shape) == 2 and TORCH_DTYPES[spec.datatype].is_floating_point else TOKENS


def _examine_rows(network: Network, passes: ForwardPasses) -> tuple[Network, ForwardPasses]:
    """The network with ``gives_list``, and its passes: of one row if a row's answer depends on the others."""
    if network.gives_list is None:
        num_rows = min(2, passes.full_size)
        answer = network.call_network(network.draw_rows(num_rows, network.examples[0]))
        is_list = isinstance(answer, list) and len(answer) == num_rows
        network = replace(network, gives_list=is_list and all(_list_fields(each) is not None for each in answer))
    if network.gives_list:
        return network, replace(passes, full_size=1)
    if passes.full_size == 1 or not _depends_on_others(network, passes.full_size):
        return network, passes
    if passes.min_size > 1:
        raise UsageError(
            f"a row's answer depends on the others, and the program takes at least {passes.min_size}; export it for one"
        )
    return network, replace(passes, full_size=1)


def _depends_on_others(network: Network, num_rows: int) -> bool:
    """Whether the first or the last row's answer has other bits with other rows between them."""
    rows = network.draw_rows(num_rows, network.examples[0])
    others = network.draw_rows(num_rows, network.examples[0], seed=1)
    mixed_rows = [torch.cat([row[:1], other[1:-1], row[-1:]]) for row, other in zip(rows, others, strict=True)]
    outputs, mixed_outputs = pack_bytes(network.compute_outputs(rows)), pack_bytes(network.compute_outputs(mixed_rows))
    return outputs.shape != mixed_outputs.shape or not torch.equal(outputs[[0, -1]], mixed_outputs[[0, -1]])


def _find_outputs(network: Network, passes: ForwardPasses) -> tuple[TensorSpec, ...]:
    """The outputs of random rows. A dimension that is 0, or that differs between two shapes, is any size."""
    shapes = []
    for seed, example in enumerate(network.examples):
        outputs = network.compute_outputs(network.draw_rows(passes.min_size, example, seed))
        shapes.append({name: tuple(each.shape[1:]) for name, each in outputs.items()})
    dtypes = {name: DATATYPES[each.dtype] for name, each in outputs.items()}
    if shapes[0].keys() != shapes[1].keys() or any(len(shapes[0][name]) != len(shapes[1][name]) for name in dtypes):
        raise UsageError("the network gives other outputs for other shapes of its inputs")
    return tuple(
        TensorSpec(
            name, dtypes[name], (BATCH, *_merge_sizes(shapes[0][name], shapes[1][name], bool(network.gives_list)))
        )
        for name in dtypes
    )


def _merge_sizes(first: Sequence[int], second: Sequence[int], gives_list: bool) -> Iterator[int]:
    for place, (size, other) in enumerate(zip(first, second, strict=True)):
        yield size if size == other > 0 and not (gives_list and place == 0) else BATCH


def _compare_specs(outputs: Sequence[TensorSpec], actual: Sequence[TensorSpec]) -> None:
    by_name = {spec.name: spec for spec in actual}
    for spec in outputs:
        output = by_name.get(spec.name, TensorSpec(spec.name, BYTES, (BATCH,)))
        fits = len(output.shape) == len(spec.shape) and all(
            BATCH in (size, wanted) or size == wanted for size, wanted in zip(output.shape, spec.shape, strict=True)
        )
        if output.datatype != spec.datatype or not fits:
            raise UsageError(
                f"outputs says that {spec.name} is {spec.datatype} {list(spec.shape)}; the network gives "
                f"{output.datatype} {list(output.shape)}"
            )
