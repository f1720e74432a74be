"""The protocol over gRPC beside HTTP: the same bits, and for every mistake the right code and one sentence."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from inference.serving.grpc.requests import DESCRIPTORS, MESSAGES, SERVICE
from inference.serving.settings import MAX_BODY_BYTES
from tests.inference.serving.helpers import call, image_request, infer_message, refusal

Code = grpc.StatusCode
Infer = MESSAGES["ModelInferRequest"]


@pytest.fixture(scope="module")
def channel(service):
    with grpc.insecure_channel(service.grpc) as channel:
        yield channel


def set_parameter(holder: Any, name: str, **value: Any) -> None:
    holder.parameters[name].MergeFrom(MESSAGES["InferParameter"](**value))


# --- the same answers


@pytest.fixture
def three(digits):
    return digits.pixels[:3].numpy()


def test_both_forms_give_the_bits_of_http(channel, service, three):
    raw = call(channel, "ModelInfer", infer_message(three))
    typed = call(channel, "ModelInfer", infer_message(three, is_raw=False))
    outputs = service.http.post("/v2/models/m/infer", json=image_request(three)).json()["outputs"]
    labels, probabilities = (output["data"] for output in outputs)
    assert np.frombuffer(raw.raw_output_contents[0], np.int64).tolist() == labels
    assert raw.raw_output_contents[1] == np.array(probabilities, np.float32).tobytes()
    assert (list(typed.outputs[0].contents.int64_contents), list(typed.outputs[1].shape)) == (labels, [3, 10])
    assert list(typed.outputs[1].contents.fp32_contents) == probabilities
    assert not typed.raw_output_contents
    assert not raw.outputs[1].HasField("contents")


@pytest.mark.parametrize("is_raw", [True, False])
def test_the_form_of_the_outputs_can_be_asked_for(channel, three, is_raw):
    """As KServe's client asks, which sends the parameters of HTTP here too."""
    request = infer_message(three, is_raw=not is_raw)
    set_parameter(request, "binary_data_output", bool_param=is_raw)
    if not is_raw:
        set_parameter(request.inputs[0], "binary_data_size", int64_param=three.nbytes)
    found = call(channel, "ModelInfer", request)
    expected = call(channel, "ModelInfer", infer_message(three, is_raw=is_raw))
    assert bool(found.raw_output_contents) == is_raw
    assert found == expected


def text_message(*words: bytes, is_raw: bool = False, rows: int | None = None) -> Any:
    request = Infer(model_name="labels")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(words) if rows is None else rows])
    if is_raw:
        request.raw_input_contents.append(b"".join(len(word).to_bytes(4, "little") + word for word in words))
    else:
        tensor.contents.bytes_contents.extend(words)
    return request


@pytest.mark.parametrize("is_raw", [True, False])
def test_texts_are_taken(channel, service, is_raw):
    words = ["a very good film", "bad"]
    found = call(channel, "ModelInfer", text_message(*map(str.encode, words), is_raw=is_raw))
    given = {"name": "text", "shape": [2], "datatype": "BYTES", "data": words}
    outputs = service.http.post("/v2/models/labels/infer", json={"inputs": [given]}).json()["outputs"]
    expected = next(output["data"] for output in outputs if output["name"] == "probabilities")
    place = [output.name for output in found.outputs].index("probabilities")
    bits = found.raw_output_contents[place] if is_raw else found.outputs[place].contents.fp32_contents
    assert (bits if is_raw else np.array(bits, np.float32).tobytes()) == np.array(expected, np.float32).tobytes()


def test_kserves_place_of_a_models_name_is_understood(channel):
    """KServe has no ``repository_name``: its ``model_name`` is where Triton has that."""
    before = call(channel, "ModelMetadata", {"name": "spare"}).versions
    loaded = call(channel, "RepositoryModelLoad", {"repository_name": "spare"})
    assert (loaded.model_name, loaded.isLoaded) == ("spare", True)
    assert call(channel, "ModelMetadata", {"name": "spare"}).versions != before


# --- mistakes

ZEROS = np.zeros((1, 28, 28), np.uint8)
NAN = np.full((1, 3, 32, 32), np.nan, np.float32)
NO_MESSAGE = "not a message of the kind ModelInferRequest"


def changed(*changes: Callable[[Any], object], is_raw: bool = True) -> Any:
    """A request that is right but for these changes."""
    request = infer_message(ZEROS, is_raw=is_raw)
    for change in changes:
        change(request)
    return request


def with_parameter(name: str, where: Callable[[Any], Any] = lambda request: request, **value: Any) -> Any:
    return changed(lambda request: set_parameter(where(request), name, **value))


def the_input(request: Any) -> Any:
    return request.inputs[0]


UNKNOWN: dict[str, tuple[Any, str]] = {
    "a model": (infer_message(ZEROS, model="none"), "there is no model 'none'"),
    "a version": (changed(lambda request: setattr(request, "model_version", "99")), "has no version '99'"),
}
MISTAKES: dict[str, tuple[Any, str]] = {
    "not a message": (b"\xff\xff", NO_MESSAGE),
    "a shape": (infer_message(ZEROS, shape=[1, 28, 27]), "must be [-1, 28, 28]"),
    "a name": (infer_message(ZEROS, name="picture"), "the model takes image"),
    "too few bytes": (infer_message(ZEROS, shape=[2, 28, 28]), "784 bytes; [2, 28, 28] of UINT8"),
    "rows": (infer_message(np.zeros((300, 28, 28), np.uint8)), "a request may have 256"),
    "NaN": (infer_message(NAN, model="vit", datatype="FP32"), "NaN or infinite"),
    "another field": (
        changed(lambda each: each.inputs[0].contents.fp32_contents.append(0), is_raw=False),
        "are in fp32_contents; those of UINT8 belong in uint_contents",
    ),
    "more raw than inputs": (
        changed(lambda each: each.raw_input_contents.append(b"")),
        "1 inputs and 2 raw_input_contents",
    ),
    "an output": (
        changed(lambda each: each.outputs.add(name="logits")),
        "there is no output 'logits'; the model gives label, probabilities",
    ),
    "a raw size": (
        with_parameter("binary_data_size", the_input, int64_param=3),
        "binary_data_size of the input 'image' is 3, and it has 784 bytes",
    ),
    **{
        f"the parameter {name}": (
            with_parameter(name, where),
            f"the parameter {name!r} of the {place} is not supported",
        )
        for name, place, where in (
            ("shared_memory_region", "input image", the_input),
            ("headers", "request", lambda each: each),
        )
    },
    "a million tensors": (b"\x2a\x00" * 10**6, "more than 1000 inputs, outputs and parameters"),
    "no UTF-8": (text_message(b"\xff\xfe"), "row 0 of the input text is not a text in UTF-8 (byte 0)"),
}


@pytest.mark.parametrize("mistake", [*UNKNOWN, *MISTAKES])
def test_a_mistake_has_a_code_and_a_sentence(channel, service, mistake):
    message, sentence = {**UNKNOWN, **MISTAKES}[mistake]
    found = refusal(channel, "ModelInfer", message)
    assert found[0] is (Code.NOT_FOUND if mistake in UNKNOWN else Code.INVALID_ARGUMENT)
    assert sentence in found[1]
    assert "\n" not in found[1] and len(found[1]) < 400
    assert call(channel, "ModelInfer", infer_message(ZEROS)).model_name == "m"
    assert "Traceback" not in service.log.read_text()


def test_a_message_has_a_limit(channel, service):
    before = psutil.Process(service.process.pid).memory_info().rss
    code, sentence = refusal(channel, "ModelInfer", bytes(MAX_BODY_BYTES + 1))
    assert code is Code.RESOURCE_EXHAUSTED
    assert "larger than max" in sentence
    code, _ = refusal(channel, "ModelInfer", bytes(200 * 2**20), compression=grpc.Compression.Gzip)
    assert code is Code.RESOURCE_EXHAUSTED
    assert psutil.Process(service.process.pid).memory_info().rss - before < 128 * 2**20
    assert call(channel, "ServerLive").live


def test_an_unknown_method_is_unimplemented(channel):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelStreamInfer")(b"", timeout=60)
    assert caught.value.code() is Code.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["RepositoryModelLoad", "RepositoryModelUnload", "ModelStatistics", "ModelConfig"])
def test_an_unknown_model_is_not_found(channel, method):
    field = "model_name" if method.startswith("Repository") else "name"
    code, sentence = refusal(channel, method, {field: "none"})
    assert (code, "there is no model 'none'" in sentence) == (Code.NOT_FOUND, True)


# --- the descriptor set that the service ships describes the .proto file that its users have

KINDS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


def test_the_descriptor_set_is_of_the_proto_file():
    (file,) = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    text = re.sub(r"\s*//[^\n]*", "", DESCRIPTORS.with_suffix(".proto").read_text())
    written = [line.strip() for line in text.splitlines() if line.strip()]
    head = [f'syntax = "{file.syntax}";', f"package {file.package};"]
    methods = [f"rpc {m.name}({last(m.input_type)}) returns ({last(m.output_type)});" for m in file.service[0].method]
    blocks = [f"service {file.service[0].name} {{", *methods, "}"]
    enums = {each.name: [f"{v.name} = {v.number};" for v in each.value] for each in file.enum_type}
    parts = {f"enum {name}": lines for name, lines in enums.items()}
    parts |= {f"message {each.name}": list(lines_of(each)) for each in file.message_type}
    order = [line.removesuffix(" {") for line in written if line.startswith(("enum ", "message "))]
    assert sorted(order) == sorted(parts)
    assert written == [*head, *blocks, *(line for name in order for line in (f"{name} {{", *parts[name], "}"))]


def lines_of(message: DescriptorProto) -> Iterator[str]:
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    opened = -1
    for field in message.field:
        place = field.oneof_index if field.HasField("oneof_index") else -1
        if place != opened:
            yield from ["}"] * (opened >= 0)
            yield from [f"oneof {message.oneof_decl[place].name} {{"] * (place >= 0)
            opened = place
        if entry := maps.get(last(field.type_name)):
            yield f"map<{kind(entry.field[0])}, {kind(entry.field[1])}> {field.name} = {field.number};"
        else:
            many = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
            yield f"{many}{kind(field)} {field.name} = {field.number};"
    yield from ["}"] * (opened >= 0)


def kind(field: FieldDescriptorProto) -> str:
    return last(field.type_name) or KINDS[field.type]


def last(name: str) -> str:
    return name.rpartition(".")[2]
