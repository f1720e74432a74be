"""``ModelInfer`` messages to requests of the protocol's JSON, and predictions to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ...models.predictor import Prediction, Predictor
from ...models.results import BYTES
from ..protocol import MAX_DIMENSIONS, BadRequestError, InferRequest, Json, check_request, join_texts, make_column
from ..repository import ModelVersion

DESCRIPTORS = Path(__file__).with_name("open_inference.desc")


@dataclass(frozen=True, slots=True)
class RpcMethod:
    """The request and response classes of one method."""

    request: Any
    response: Any


(_FILE,) = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_FILE)
_CLASSES = message_factory.GetMessageClassesForFiles([_FILE.name], _POOL)

SERVICE = f"{_FILE.package}.{_FILE.service[0].name}"

MESSAGES: Mapping[str, Any] = {each.name: _CLASSES[f"{_FILE.package}.{each.name}"] for each in _FILE.message_type}

METHODS: Mapping[str, RpcMethod] = {
    each.name: RpcMethod(_CLASSES[each.input_type.lstrip(".")], _CLASSES[each.output_type.lstrip(".")])
    for each in _FILE.service[0].method
}


CONTENTS_FIELDS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""Field of ``InferTensorContents`` by datatype; FP16 and BF16 have none."""

MAX_FIELDS = 1000
"""Most fields of a message, not counting nested ones: an empty tensor is two bytes on the wire, but many in memory."""

FIXED_SIZES = {1: 8, 5: 4}  # size on the wire by wire type


def parse_message(kind: Any, data: bytes) -> Any:
    """The message of class ``kind`` in ``data``. Raises ``BadRequestError``."""
    try:
        if _count_fields(data) > MAX_FIELDS:
            raise BadRequestError(f"the message has more than {MAX_FIELDS} inputs, outputs and parameters")
        return kind.FromString(data)
    except (DecodeError, IndexError) as error:
        raise BadRequestError(f"the request is not a message of the kind {kind.DESCRIPTOR.name}") from error


def _count_fields(data: bytes) -> int:
    """Number of top-level fields, counted up to ``MAX_FIELDS``. IndexError for truncated data."""
    offset = count = 0
    while offset < len(data) and count <= MAX_FIELDS:
        tag, offset = _read_varint(data, offset)
        if tag & 7 == 0:
            _, offset = _read_varint(data, offset)
        elif tag & 7 == 2:
            size, offset = _read_varint(data, offset)
            offset += size
        else:
            offset += FIXED_SIZES.get(tag & 7, len(data))
        count += 1
    return count


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value, offset


def parse_infer_message(message: Any, predictor: Predictor, max_rows: int) -> InferRequest:
    """The request of a ``ModelInferRequest``. Raises ``BadRequestError`` if it does not fit the model."""
    is_raw = bool(message.raw_input_contents)
    if is_raw and len(message.raw_input_contents) != len(message.inputs):
        raise BadRequestError(
            f"the request has {len(message.inputs)} inputs and {len(message.raw_input_contents)} raw_input_contents"
        )
    inputs = [
        _read_raw_input(tensor, message.raw_input_contents[place]) if is_raw else _read_typed_input(tensor)
        for place, tensor in enumerate(message.inputs)
    ]
    request: Json = {
        "id": message.id,
        "parameters": {"binary_data_output": is_raw, **_read_parameters(message)},
        "inputs": [input_json for input_json, _ in inputs],
        "outputs": [{"name": output.name, "parameters": _read_parameters(output)} for output in message.outputs],
    }
    infer_request = check_request(request, b"".join(data for _, data in inputs), predictor, max_rows)
    if len({output.is_binary for output in infer_request.outputs}) > 1:
        raise BadRequestError("binary_data differs between the outputs; over gRPC all of them are raw, or none is")
    return infer_request


def _read_parameters(holder: Any) -> Json:
    """The parameters of a request, an input or an output."""
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for key, value in holder.parameters.items()
    }


def _make_input_json(tensor: Any, **parameters: int) -> Json:
    """The JSON of an input with ``parameters``, which the client's own may not contradict."""
    merged = {**parameters, **_read_parameters(tensor)}
    for key, value in parameters.items():
        if merged[key] != value:
            raise BadRequestError(
                f"{key} of the input {tensor.name[:60]!r} is {merged[key]!r}, and it has {value} bytes"
            )
    shape = list(tensor.shape[: MAX_DIMENSIONS + 1])
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "parameters": merged}


def _read_raw_input(tensor: Any, data: bytes) -> tuple[Json, bytes]:
    if tensor.HasField("contents"):
        raise BadRequestError(f"the input {tensor.name[:60]!r} has contents, and the request has raw_input_contents")
    return _make_input_json(tensor, binary_data_size=len(data)), data


def _read_typed_input(tensor: Any) -> tuple[Json, bytes]:
    """``BYTES`` is passed as binary data, because its elements need not be UTF-8."""
    filled_fields = {field.name for field, _ in tensor.contents.ListFields()}
    field = CONTENTS_FIELDS.get(tensor.datatype)
    if field and filled_fields - {field}:
        raise BadRequestError(
            f"the contents of the input {tensor.name[:60]!r} are in {min(filled_fields - {field})}; "
            f"those of {tensor.datatype} belong in {field}"
        )
    if tensor.datatype == BYTES:
        binary = join_texts(tensor.contents.bytes_contents)
        return _make_input_json(tensor, binary_data_size=len(binary)), binary
    return {**_make_input_json(tensor), "data": list(getattr(tensor.contents, field)) if field else []}, b""


def make_infer_response(request: InferRequest, predictions: Sequence[Prediction], version: ModelVersion) -> Any:
    """The ``ModelInferResponse``, with raw contents if the request had them."""
    response = MESSAGES["ModelInferResponse"](
        model_name=version.name, model_version=str(version.number), id=request.id or ""
    )
    for wanted in request.outputs:
        column = make_column(wanted, predictions)
        name, datatype = column.spec.name, column.spec.datatype
        output = response.outputs.add(name=name, datatype=datatype, shape=column.shape)
        if wanted.is_binary:
            response.raw_output_contents.append(column.encode_binary())
        elif datatype not in CONTENTS_FIELDS:
            raise BadRequestError(
                f"the output {name} is of {datatype}, which has no contents; send "
                "raw_input_contents, which are answered by raw_output_contents"
            )
        else:
            values = column.list_values()
            if datatype == BYTES:
                values = [str(value).encode() for value in values]
            getattr(output.contents, CONTENTS_FIELDS[datatype]).extend(values)
    return response
