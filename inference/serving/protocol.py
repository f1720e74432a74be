"""Open Inference Protocol v2 requests and responses as bytes: JSON, optionally followed by binary tensors.

Independent of HTTP and of loaded models. A request is checked against the model's inputs before its tensors are made,
so its cost is bounded by its size.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import orjson

from ckpt_tools.errors import FormatError

from ..models.predictor import Prediction, Predictor, TensorSpec
from ..models.results import BYTES, DTYPES, Array, ModelInput, does_shape_fit, make_text_column

MAX_DIMENSIONS = 16
MAX_SIZE = 2**40  # limit of one dimension; products of larger sizes would overflow
REQUEST_FIELDS = {"id", "parameters", "inputs", "outputs", "model_name"}
"""``model_name`` is not in the protocol, but KServe's client sends it."""

TENSOR_FIELDS = {"name", "shape", "datatype", "parameters", "data"}
OUTPUT_FIELDS = {"name", "parameters"}

REQUEST_PARAMETERS = {"timeout", "binary_data_output"}
INPUT_PARAMETERS = {"binary_data_size"}
OUTPUT_PARAMETERS = {"binary_data"}

UNSET_PARAMETERS = {"priority", "sequence_id", "sequence_start", "sequence_end", "classification"}
"""Triton's parameters that change nothing if they are 0, empty or false. Every other value of them is refused."""

encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
NOT_FINITE = "the answer has numbers that are NaN or infinite, which JSON does not have; ask for it as binary data"

Json = dict[str, Any]


class BadRequestError(FormatError):
    """The request is invalid; the message is for the client."""


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """A requested output, and whether as binary data."""

    spec: TensorSpec
    is_binary: bool


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A valid request: one item per row of its input; ``timeout`` in seconds."""

    id: str | None
    items: tuple[ModelInput, ...]
    outputs: tuple[WantedOutput, ...]
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """Response body. ``json_bytes`` is the length of the JSON if binary tensors follow."""

    content: bytes
    json_bytes: int | None = None


def parse_infer_request(body: bytes, json_bytes: str | None, predictor: Predictor, max_rows: int) -> InferRequest:
    """Parse ``body``; ``json_bytes`` is the header ``Inference-Header-Content-Length``. Raises BadRequestError if it is
    not a request, or does not fit the model; FormatError if the model does not take a text of it."""
    text, binary = _split_body(body, json_bytes)
    try:
        request = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the request is not JSON: {str(error)[:200]}") from error
    return check_request(_require_object(request, "the request"), binary, predictor, max_rows)


def check_request(request: Json, binary: bytes, predictor: Predictor, max_rows: int) -> InferRequest:
    """Check a request in JSON of either protocol; ``binary`` is the data of its inputs. Raises as
    :func:`parse_infer_request`."""
    _check_fields(request, REQUEST_FIELDS, "the request")
    name = request.get("model_name", predictor.name)
    if name != predictor.name:
        raise BadRequestError(f"the request is to the model {predictor.name}, and its model_name is {_shorten(name)}")
    parameters = _read_parameters(request, "the request", REQUEST_PARAMETERS)
    items = _read_items(_require_list(request, "inputs"), memoryview(binary), predictor, max_rows)
    outputs = _read_outputs(request, _read_flag(parameters, "binary_data_output", "the request"), predictor)
    if not isinstance(request.get("id", ""), str):
        raise BadRequestError("the id of the request has to be a text")
    return InferRequest(request.get("id"), items, outputs, _read_timeout(parameters))


def _split_body(body: bytes, json_bytes: str | None) -> tuple[bytes, bytes]:
    if json_bytes is None:
        return body, b""
    if not (json_bytes.isascii() and json_bytes.isdigit() and len(json_bytes) < 20) or int(json_bytes) > len(body):
        raise BadRequestError(
            f"Inference-Header-Content-Length is {json_bytes[:20]!r}; it has to be a number up to the length of the "
            f"body, {len(body)}"
        )
    return body[: int(json_bytes)], body[int(json_bytes) :]


def _read_items(
    inputs: Sequence[object], binary: memoryview, predictor: Predictor, max_rows: int
) -> tuple[ModelInput, ...]:
    """One item for each row. Inputs may be in any order, and binary data are in theirs."""
    objects = [_require_object(each, "an input") for each in inputs]
    specs = {spec.name: spec for spec in predictor.inputs}
    if len(objects) != len(specs):
        raise BadRequestError(f"the request has {len(objects)} inputs; the model takes {_join_names(predictor.inputs)}")
    columns: dict[str, tuple[ModelInput, ...]] = {}
    for input_json in objects:
        name = input_json.get("name")
        if not isinstance(name, str) or name not in specs or name in columns:
            raise BadRequestError(
                f"the input is called {_shorten(name)}; the model takes {_join_names(predictor.inputs)}"
            )
        columns[name], binary = _read_input(input_json, specs[name], binary, predictor, max_rows)
    if binary:
        raise BadRequestError(f"{len(binary)} bytes follow the binary data of the inputs")
    if len({len(column) for column in columns.values()}) > 1:
        raise BadRequestError("the inputs have different numbers of rows")
    ordered = [columns[name] for name in specs]
    return ordered[0] if len(ordered) == 1 else tuple(zip(*ordered, strict=True))


def _read_input(
    input_json: Json, spec: TensorSpec, binary: memoryview, predictor: Predictor, max_rows: int
) -> tuple[tuple[ModelInput, ...], memoryview]:
    """The rows of one input, and the binary data that follow its own."""
    _check_fields(input_json, TENSOR_FIELDS, "an input")
    shape = _read_shape(input_json, spec, max_rows)
    if input_json.get("datatype") != spec.datatype:
        raise BadRequestError(
            f"the input {spec.name} has the datatype {_shorten(input_json.get('datatype'))}; it must be {spec.datatype}"
        )
    size = _read_parameters(input_json, f"the input {spec.name}", INPUT_PARAMETERS).get("binary_data_size")
    end = 0 if size is None else _read_binary_size(size, spec, binary)
    return _read_rows(input_json, shape, spec, None if size is None else binary[:end], predictor), binary[end:]


def _read_binary_size(size: object, spec: TensorSpec, binary: memoryview) -> int:
    if type(size) is not int or not 0 <= size <= len(binary):
        raise BadRequestError(
            f"binary_data_size of the input {spec.name} is {_shorten(size)}; {len(binary)} bytes follow the JSON"
        )
    return size


def _read_rows(
    input_json: Json, shape: tuple[int, ...], spec: TensorSpec, binary: memoryview | None, predictor: Predictor
) -> tuple[ModelInput, ...]:
    if binary is None and "data" not in input_json:
        raise BadRequestError(f"the input {spec.name} has neither data nor the parameter binary_data_size")
    if binary is not None and "data" in input_json:
        raise BadRequestError(f"the input {spec.name} has both data and the parameter binary_data_size")
    if spec.datatype == BYTES:
        texts = _read_json_texts(input_json, shape, spec) if binary is None else _read_binary_texts(binary, shape, spec)
        return tuple(predictor.decode(text, f"row {row} of the input {spec.name}") for row, text in enumerate(texts))
    rows = _read_json_array(input_json, shape, spec) if binary is None else _read_binary_array(binary, shape, spec)
    if rows.dtype.kind not in "biu" and not np.isfinite(rows.astype(np.float64)).all():
        raise BadRequestError(f"the input {spec.name} has elements that are NaN or infinite in {spec.datatype}")
    # An aligned copy, which the model may keep.
    return tuple(rows.copy())


def _read_shape(input_json: Json, spec: TensorSpec, max_rows: int) -> tuple[int, ...]:
    shape = input_json.get("shape")
    is_shape = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    if not is_shape or not all(type(size) is int and 0 < size <= MAX_SIZE for size in shape or ()):
        raise BadRequestError(f"the shape of the input {spec.name} has to be a list of sizes, each at least 1")
    assert isinstance(shape, list)
    if not does_shape_fit(shape, spec.shape):
        raise BadRequestError(
            f"the input {spec.name} has the shape {shape}; it must be {list(spec.shape)}, -1 being any size"
        )
    if shape[0] > max_rows:
        raise BadRequestError(f"the input {spec.name} has {shape[0]} rows; a request may have {max_rows}")
    return tuple(shape)


def _read_binary_array(binary: memoryview, shape: tuple[int, ...], spec: TensorSpec) -> Array:
    dtype = DTYPES[spec.datatype]
    if len(binary) != prod(shape) * dtype.itemsize:
        raise BadRequestError(
            f"the input {spec.name} has {len(binary)} bytes; {list(shape)} of {spec.datatype} is "
            f"{prod(shape) * dtype.itemsize}"
        )
    if dtype.kind == "b" and any(byte > 1 for byte in binary):
        raise BadRequestError(f"the input {spec.name} has bytes that are not 0 or 1; it is of BOOL")
    return np.frombuffer(binary, dtype).reshape(shape)


def _read_json_array(input_json: Json, shape: tuple[int, ...], spec: TensorSpec) -> Array:
    values = _flatten_data(input_json, shape, spec)
    dtype = DTYPES[spec.datatype]
    python_types: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}}
    if not set(map(type, values)) <= python_types.get(dtype.kind, {int, float}):
        raise BadRequestError(f"the data of the input {spec.name} has elements that are not of {spec.datatype}")
    try:
        # An array of Python checks the range of its numbers in a fifth of numpy's time.
        packed = array({"b": "B", "i": dtype.char, "u": dtype.char}.get(dtype.kind, "d"), values)
        numbers = np.frombuffer(packed, dtype if dtype.kind in "biu" else np.float64)
    except OverflowError as error:
        raise BadRequestError(
            f"the data of the input {spec.name} has numbers that {spec.datatype} cannot hold"
        ) from error
    with np.errstate(over="ignore"):
        return numbers.astype(dtype, copy=False).reshape(shape)


def _flatten_data(input_json: Json, shape: tuple[int, ...], spec: TensorSpec) -> list[Any]:
    """``data`` flattened in row-major order and checked against the shape; it may be flat or nested."""
    values = input_json["data"]
    if not isinstance(values, list):
        raise BadRequestError(f"the data of the input {spec.name} has to be a list")
    if values and isinstance(values[0], list):
        for depth, size in enumerate(shape[1:]):
            num_lists = prod(shape[: depth + 1])
            if len(values) != num_lists or not all(isinstance(value, list) and len(value) == size for value in values):
                raise BadRequestError(f"the data of the input {spec.name} is not nested as its shape is")
            values = [each for value in values for each in value]
    if len(values) != prod(shape):
        raise BadRequestError(
            f"the data of the input {spec.name} has {len(values)} elements; its shape {list(shape)} has {prod(shape)}"
        )
    return values


def _read_binary_texts(binary: memoryview, shape: tuple[int, ...], spec: TensorSpec) -> list[bytes]:
    """Elements with a 4-byte length prefix each."""
    texts: list[bytes] = []
    offset = 0
    while offset < len(binary):
        end = offset + 4 + int.from_bytes(binary[offset : offset + 4], "little")
        if offset + 4 > len(binary) or end > len(binary):
            raise BadRequestError(f"the binary data of the input {spec.name} is cut off in element {len(texts)}")
        texts.append(bytes(binary[offset + 4 : end]))
        offset = end
        if len(texts) > prod(shape):
            break
    if len(texts) != prod(shape):
        raise BadRequestError(f"the input {spec.name} has other elements than the {prod(shape)} of its shape")
    return texts


def _read_json_texts(input_json: Json, shape: tuple[int, ...], spec: TensorSpec) -> list[bytes]:
    values = _flatten_data(input_json, shape, spec)
    if not all(isinstance(value, str) for value in values):
        raise BadRequestError(f"the data of the input {spec.name} has elements that are not texts")
    return [value.encode("utf-8", "surrogatepass") for value in values]


def _read_outputs(request: Json, is_binary: bool, predictor: Predictor) -> tuple[WantedOutput, ...]:
    """The requested outputs in the client's order; all if none are named."""
    if "outputs" not in request:
        return tuple(WantedOutput(spec, is_binary) for spec in predictor.outputs)
    outputs = [
        _read_output(_require_object(each, "an output"), is_binary, predictor)
        for each in _require_list(request, "outputs")
    ]
    if len({each.spec.name for each in outputs}) < len(outputs):
        raise BadRequestError("the request names an output twice")
    return tuple(outputs) or tuple(WantedOutput(spec, is_binary) for spec in predictor.outputs)


def _read_output(output_json: Json, is_binary: bool, predictor: Predictor) -> WantedOutput:
    _check_fields(output_json, OUTPUT_FIELDS, "an output")
    for spec in predictor.outputs:
        if spec.name == output_json.get("name"):
            where = f"the output {spec.name}"
            parameters = _read_parameters(output_json, where, OUTPUT_PARAMETERS)
            return WantedOutput(spec, _read_flag(parameters, "binary_data", where, is_binary))
    raise BadRequestError(
        f"there is no output {_shorten(output_json.get('name'))}; the model gives {_join_names(predictor.outputs)}"
    )


def _read_timeout(parameters: Json) -> float | None:
    """Timeout in seconds; the protocol has microseconds, and 0 for none."""
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or not 0 <= timeout < 2**63:
        raise BadRequestError("timeout has to be a number of microseconds")
    return timeout / 1e6 or None


def _read_parameters(holder: Json, where: str, known: set[str]) -> Json:
    """The ``parameters`` of a request, an input or an output. One that is not ``known`` is refused: its sender expects
    what it asks for."""
    parameters = _require_object(holder.get("parameters", {}), f"the parameters of {where}")
    for name, value in sorted(parameters.items()):
        is_unset = name in UNSET_PARAMETERS and isinstance(value, bool | int | str) and not value
        if name not in known and not is_unset:
            raise BadRequestError(f"the parameter {_shorten(name)} of {where} is not supported")
    return parameters


def _read_flag(parameters: Json, name: str, where: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} of {where} has to be true or false")
    return value


def _require_object(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise BadRequestError(f"{where} has to be a JSON object")
    return value


def _require_list(request: Json, key: str) -> list[Any]:
    value = request.get(key)
    if not isinstance(value, list):
        raise BadRequestError(f"the request needs {key}, a list")
    return value


def _check_fields(json_object: Json, fields: set[str], where: str) -> None:
    if unknown := sorted(set(json_object) - fields):
        raise BadRequestError(f"{where} has the unknown field {_shorten(unknown[0])}")


def _join_names(specs: Any) -> str:
    return ", ".join(spec.name for spec in specs)


def _shorten(value: object) -> str:
    return repr(value)[:60]


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """One output for all rows of a request, [rows, ...]; texts are objects."""

    spec: TensorSpec
    values: Array

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    def list_values(self) -> list[Any]:
        return self.values.reshape(-1).tolist()

    def encode_binary(self) -> bytes:
        """The elements in the binary extension's format."""
        if self.spec.datatype == BYTES:
            return join_texts([str(value).encode() for value in self.list_values()])
        return self.values.astype(DTYPES[self.spec.datatype], copy=False).tobytes()


def join_texts(texts: Iterable[bytes]) -> bytes:
    """``BYTES`` elements with a length prefix each."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def make_column(wanted: WantedOutput, predictions: Sequence[Prediction]) -> OutputColumn:
    """A requested output, from one prediction per row. Raises BadRequestError if the rows differ in shape."""
    rows = [prediction[wanted.spec.name] for prediction in predictions]
    if wanted.spec.datatype == BYTES:
        return OutputColumn(wanted.spec, make_text_column(rows))
    if len({row.shape for row in rows}) > 1:
        raise BadRequestError(
            f"the output {wanted.spec.name} differs in shape between the rows of the request; ask for each by itself"
        )
    return OutputColumn(wanted.spec, np.stack(rows))


def make_infer_body(request: InferRequest, predictions: Sequence[Prediction], name: str, version: str) -> ResponseBody:
    outputs: list[Json] = []
    tails: list[bytes] = []
    for wanted in request.outputs:
        column = make_column(wanted, predictions)
        output: Json = {"name": column.spec.name, "datatype": column.spec.datatype, "shape": column.shape}
        if wanted.is_binary:
            tails.append(column.encode_binary())
            output["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            output["data"] = column.list_values()
        outputs.append(output)
    answer: Json = {"model_name": name, "model_version": version, "outputs": outputs}
    if request.id:
        answer["id"] = request.id
    try:
        text = encode_json(answer).encode()
    except ValueError as error:
        raise BadRequestError(NOT_FINITE) from error
    return ResponseBody(b"".join([text, *tails]), len(text)) if tails else ResponseBody(text)


def describe_tensor(spec: TensorSpec) -> Json:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
