"""The protocol over gRPC beside HTTP: the same bits, and for every mistake the right code and one sentence."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from torch import Tensor

from inference.models.predictor import load_predictor
from inference.serving.grpc import requests as grpc_requests
from inference.serving.grpc import server as grpc_server
from inference.serving.grpc.requests import MESSAGES, METHODS, SERVICE
from inference.serving.grpc.server import client_of, serving
from inference.serving.http.middleware import Traffic
from inference.serving.repository import Repository, Source
from inference.serving.service import Service as Answers
from inference.serving.settings import MAX_BODY_BYTES, Listening, Settings, address_of, reserve
from tests.inference.conftest import running_service
from tests.inference.serving.test_repository import Loader
from tests.inference.serving.test_serve import run_serve, wait_until
from training.data.datasets import Samples

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def channel(service):
    with grpc.insecure_channel(service.grpc) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, message: Any = None, **options: Any) -> Any:
    """The answer. ``message`` is one, the fields of one, or bytes that are none."""
    kind = METHODS[method]
    data = message if isinstance(message, bytes) else (message or kind.request()).SerializeToString()
    options.setdefault("timeout", 60)
    return kind.response.FromString(channel.unary_unary(f"/{SERVICE}/{method}")(data, **options))


def refusal(channel: grpc.Channel, method: str, message: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, method, message, **options)
    return caught.value.code(), caught.value.details()


def a_request(array: np.ndarray[Any, Any], *, is_raw: bool = True, model: str = "m", **changes: Any) -> Any:
    request = MESSAGES["ModelInferRequest"](model_name=model)
    given = {"name": "image", "datatype": "UINT8", "shape": array.shape, **changes}
    tensor = request.inputs.add(**given)
    if is_raw:
        request.raw_input_contents.append(array.tobytes())
    else:
        tensor.contents.uint_contents.extend(array.reshape(-1).tolist())
    return request


def pixels(digits: Samples, many: int = 3) -> np.ndarray[Any, Any]:
    return digits.pixels[:many].numpy()


# --- the same answers


def test_both_forms_give_the_bits_of_http(channel, service, forms, digits):
    array = pixels(digits)
    raw = call(channel, "ModelInfer", a_request(array))
    typed = call(channel, "ModelInfer", a_request(array, is_raw=False))
    given = {"name": "image", "shape": array.shape, "datatype": "UINT8", "data": array.reshape(-1).tolist()}
    overall = service.http.post("/v2/models/m/infer", json={"inputs": [given]}).json()["outputs"]
    labels, probabilities = (output["data"] for output in overall)
    assert np.frombuffer(raw.raw_output_contents[0], np.int64).tolist() == labels
    assert raw.raw_output_contents[1] == np.array(probabilities, np.float32).tobytes()
    assert (list(typed.outputs[0].contents.int64_contents), list(typed.outputs[1].shape)) == (labels, [3, 10])
    assert list(typed.outputs[1].contents.fp32_contents) == probabilities
    assert not typed.raw_output_contents
    assert not raw.outputs[1].HasField("contents")


@pytest.mark.parametrize("is_raw", [True, False])
def test_the_form_of_the_outputs_can_be_asked_for(channel, digits, is_raw):
    """As KServe's client asks, which sends the parameters of HTTP here too."""
    array = pixels(digits)
    request = a_request(array, is_raw=not is_raw)
    set_parameter(request, "binary_data_output", bool_param=is_raw)
    if not is_raw:
        set_parameter(request.inputs[0], "binary_data_size", int64_param=array.nbytes)
    found = call(channel, "ModelInfer", request)
    expected = call(channel, "ModelInfer", a_request(array, is_raw=is_raw))
    assert bool(found.raw_output_contents) == is_raw
    assert found == expected


@pytest.mark.parametrize("is_raw", [True, False])
def test_texts_are_taken(channel, service, is_raw):
    request = MESSAGES["ModelInferRequest"](model_name="labels")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[2])
    words = [b"a very good film", b"bad"]
    if is_raw:
        request.raw_input_contents.append(b"".join(len(word).to_bytes(4, "little") + word for word in words))
    else:
        tensor.contents.bytes_contents.extend(words)
    found = call(channel, "ModelInfer", request)
    given = {"name": "text", "shape": [2], "datatype": "BYTES", "data": [word.decode() for word in words]}
    outputs = service.http.post("/v2/models/labels/infer", json={"inputs": [given]}).json()["outputs"]
    expected = next(output["data"] for output in outputs if output["name"] == "probabilities")
    place = [output.name for output in found.outputs].index("probabilities")
    bits = found.raw_output_contents[place] if is_raw else found.outputs[place].contents.fp32_contents
    assert (bits if is_raw else np.array(bits, np.float32).tobytes()) == np.array(expected, np.float32).tobytes()


def test_kserves_place_of_a_models_name_is_understood(channel):
    """KServe has no ``repository_name``: its ``model_name`` is where Triton has that."""
    before = call(channel, "ModelMetadata", METHODS["ModelMetadata"].request(name="spare")).versions
    loaded = call(channel, "RepositoryModelLoad", METHODS["RepositoryModelLoad"].request(repository_name="spare"))
    assert (loaded.model_name, loaded.isLoaded) == ("spare", True)
    assert call(channel, "ModelMetadata", METHODS["ModelMetadata"].request(name="spare")).versions != before


def test_a_repository_has_no_name(channel):
    code, sentence = refusal(channel, "RepositoryIndex", METHODS["RepositoryIndex"].request(repository_name="other"))
    assert (code, "leave repository_name out" in sentence) == (Code.INVALID_ARGUMENT, True)
    assert call(channel, "RepositoryIndex", METHODS["RepositoryIndex"].request(ready=True)).models


def test_answers_are_counted(channel, service):
    refusal(channel, "ModelMetadata", METHODS["ModelMetadata"].request(name="none"))
    call(channel, "ServerLive")
    metrics = service.http.get("/metrics").text
    assert 'ckpt_tools_grpc_responses_total{code="NOT_FOUND"}' in metrics
    assert 'ckpt_tools_grpc_responses_total{code="OK"}' in metrics


# --- mistakes


ZEROS = np.zeros((1, 28, 28), np.uint8)


def parameter(**value: Any) -> Any:
    return MESSAGES["InferParameter"](**value)


def set_parameter(holder: Any, name: str, **value: Any) -> None:
    holder.parameters[name].MergeFrom(parameter(**value))


def with_field(request: Any, change: Callable[[Any], object]) -> Any:
    change(request)
    return request


MISTAKES: dict[str, tuple[Any, grpc.StatusCode, str]] = {
    "not a message": (b"\xff\xff", Code.INVALID_ARGUMENT, "not a message of the kind ModelInferRequest"),
    "a message cut off": (
        a_request(ZEROS).SerializeToString()[:-9],
        Code.INVALID_ARGUMENT,
        "not a message of the kind ModelInferRequest",
    ),
    "a model": (a_request(ZEROS, model="none"), Code.NOT_FOUND, "there is no model 'none'"),
    "a version": (
        with_field(a_request(ZEROS), lambda request: setattr(request, "model_version", "99")),
        Code.NOT_FOUND,
        "has no version '99'",
    ),
    "a shape": (a_request(ZEROS, shape=[1, 28, 27]), Code.INVALID_ARGUMENT, "must be [-1, 28, 28]"),
    "a negative shape": (a_request(ZEROS, shape=[-1, 28, 28]), Code.INVALID_ARGUMENT, "each at least 1"),
    "a long shape": (a_request(ZEROS, shape=[1] * 10**6), Code.INVALID_ARGUMENT, "each at least 1"),
    "a datatype": (a_request(ZEROS, datatype="FP32"), Code.INVALID_ARGUMENT, "it must be UINT8"),
    "an unknown datatype": (a_request(ZEROS, datatype="X", is_raw=False), Code.INVALID_ARGUMENT, "it must be UINT8"),
    "a name": (a_request(ZEROS, name="picture"), Code.INVALID_ARGUMENT, "the model takes image"),
    "too few bytes": (a_request(ZEROS, shape=[2, 28, 28]), Code.INVALID_ARGUMENT, "784 bytes; [2, 28, 28] of UINT8"),
    "too few elements": (
        a_request(ZEROS, shape=[2, 28, 28], is_raw=False),
        Code.INVALID_ARGUMENT,
        "784 elements; its shape [2, 28, 28] has 1568",
    ),
    "rows": (a_request(np.zeros((300, 28, 28), np.uint8)), Code.INVALID_ARGUMENT, "a request may have 256"),
    "a number too large": (
        a_request(np.full((1, 28, 28), 256), is_raw=False),
        Code.INVALID_ARGUMENT,
        "numbers that UINT8 cannot hold",
    ),
    "another field": (
        with_field(a_request(ZEROS, is_raw=False), lambda each: each.inputs[0].contents.fp32_contents.append(0)),
        Code.INVALID_ARGUMENT,
        "are in fp32_contents; those of UINT8 belong in uint_contents",
    ),
    "both forms": (
        with_field(a_request(ZEROS), lambda each: each.inputs[0].contents.uint_contents.append(0)),
        Code.INVALID_ARGUMENT,
        "has contents, and the request has raw_input_contents",
    ),
    "more raw than inputs": (
        with_field(a_request(ZEROS), lambda each: each.raw_input_contents.append(b"")),
        Code.INVALID_ARGUMENT,
        "1 inputs and 2 raw_input_contents",
    ),
    "no input": (MESSAGES["ModelInferRequest"](model_name="m"), Code.INVALID_ARGUMENT, "has 0 inputs"),
    "an output": (
        with_field(a_request(ZEROS), lambda each: each.outputs.add(name="logits")),
        Code.INVALID_ARGUMENT,
        "there is no output 'logits'; the model gives label, probabilities",
    ),
    "a timeout": (
        with_field(a_request(ZEROS), lambda each: set_parameter(each, "timeout", string_param="1")),
        Code.INVALID_ARGUMENT,
        "timeout has to be a number of microseconds",
    ),
    "a raw size": (
        with_field(a_request(ZEROS), lambda each: set_parameter(each.inputs[0], "binary_data_size", int64_param=3)),
        Code.INVALID_ARGUMENT,
        "binary_data_size of the input 'image' is 3, and it has 784 bytes",
    ),
    "a raw output beside another": (
        with_field(
            with_field(a_request(ZEROS), lambda each: each.outputs.add(name="label")),
            lambda each: set_parameter(each.outputs.add(name="probabilities"), "binary_data", bool_param=False),
        ),
        Code.INVALID_ARGUMENT,
        "over gRPC all of them are raw, or none is",
    ),
    "a flag": (
        with_field(a_request(ZEROS), lambda each: set_parameter(each, "binary_data_output", int64_param=1)),
        Code.INVALID_ARGUMENT,
        "binary_data_output of the request has to be true or false",
    ),
    **{
        f"the parameter {name} of the {place}": (
            with_field(
                a_request(ZEROS), lambda each, where=where, name=name: where(each).parameters[name].SetInParent()
            ),
            Code.INVALID_ARGUMENT,
            f"the parameter {name!r} of the {place} is not supported",
        )
        for name, place, where in (
            ("shared_memory_region", "input image", lambda each: each.inputs[0]),
            ("shared_memory_offset", "output label", lambda each: each.outputs.add(name="label")),
            ("headers", "request", lambda each: each),
        )
    },
    "a class count": (
        with_field(
            a_request(ZEROS),
            lambda each: set_parameter(each.outputs.add(name="label"), "classification", int64_param=3),
        ),
        Code.INVALID_ARGUMENT,
        "the parameter 'classification' of the output label is not supported",
    ),
    "a million tensors": (b"\x2a\x00" * 10**6, Code.INVALID_ARGUMENT, "more than 1000 inputs, outputs and parameters"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_a_code_and_a_sentence(channel, service, mistake):
    message, code, sentence = MISTAKES[mistake]
    found = refusal(channel, "ModelInfer", message)
    assert found[0] is code
    assert sentence in found[1]
    assert "\n" not in found[1] and len(found[1]) < 400
    assert call(channel, "ModelInfer", a_request(ZEROS)).model_name == "m"
    assert service.log.read_text() == ""


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        (b"\xff\xfe", "row 0 of the input text is not a text in UTF-8"),
        (None, "the input text has other elements than the 1 of its shape"),
    ],
)
def test_a_text_that_is_none_is_refused(channel, contents, sentence):
    request = MESSAGES["ModelInferRequest"](model_name="labels")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.extend([] if contents is None else [contents])
    assert refusal(channel, "ModelInfer", request) == (Code.INVALID_ARGUMENT, sentence + " (byte 0)" * bool(contents))


def test_nan_is_refused(forms):
    """No model here takes numbers with a fraction, so its input is told otherwise."""
    predictor = load_predictor(forms / "model.pt")
    request = a_request(np.full((1, 2), np.nan, np.float32), name="x", datatype="FP32")
    with pytest.raises(grpc_requests.BadRequestError, match="NaN or infinite"):
        grpc_requests.infer_request(request, Floating(predictor), 8)  # type: ignore[arg-type]


class Floating:
    """A predictor whose input is two floats."""

    def __init__(self, predictor: Any) -> None:
        from inference.models.results import TensorSpec

        self.name, self.inputs, self.outputs = "m", (TensorSpec("x", "FP32", (-1, 2)),), predictor.outputs


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
    code, sentence = refusal(channel, method, METHODS[method].request(**{field: "none"}))
    assert (code, "there is no model 'none'" in sentence) == (Code.NOT_FOUND, True)


# --- a model that is slow: in this process


@pytest.fixture(scope="module")
def loader(forms):
    return Loader(load_predictor(forms / "model.pt"))


@pytest.fixture
def repository(loader):
    """Its model answers when ``loader.may_answer``; ``loader.has_begun`` says that it was asked."""
    repository = Repository([Source("m", "nowhere")], loader, max_waiting=2)
    repository.load_all()
    loader.may_answer.clear()
    loader.has_begun.clear()
    yield repository
    loader.may_answer.set()
    repository.close()


@contextmanager
def listened(repository: Repository, settings: Settings) -> Iterator[str]:
    """gRPC alone, in a thread of this process; its address."""

    async def run(address: str, started: asyncio.Event, ending: asyncio.Event) -> None:
        async with serving(Answers(repository, settings, Traffic()), Listening(address)):
            started.set()
            await ending.wait()

    loop, started, ending = asyncio.new_event_loop(), asyncio.Event(), asyncio.Event()
    with reserve("127.0.0.1", 0) as reserved, ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop.run_until_complete, run(address_of(reserved), started, ending))
        wait_until(started.is_set)
        try:
            yield address_of(reserved)
        finally:
            loop.call_soon_threadsafe(ending.set)
            running.result()
            loop.close()


@contextmanager
def served(repository: Repository, settings: Settings) -> Iterator[grpc.Channel]:
    with listened(repository, settings) as address, grpc.insecure_channel(address) as channel:
        yield channel


def test_a_full_queue_sends_the_client_away(repository, loader):
    version = repository.version("m")
    with served(repository, Settings()) as channel:
        send = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        first = send.future(a_request(ZEROS).SerializeToString(), timeout=60)
        wait_until(loader.has_begun.is_set)
        others = [send.future(a_request(ZEROS).SerializeToString(), timeout=60) for _ in range(2)]
        wait_until(lambda: version.batcher.num_waiting == 2)
        with pytest.raises(grpc.RpcError) as caught:
            send(a_request(ZEROS).SerializeToString(), timeout=60)
        loader.may_answer.set()
        assert all(each.result() for each in (first, *others))
    assert caught.value.code() is Code.UNAVAILABLE
    assert caught.value.details() == "2 inputs wait for the model, which is the limit; try again"
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"


def test_a_deadline_is_kept_and_frees_the_queue(repository):
    version = repository.version("m")
    with served(repository, Settings()) as channel:
        assert refusal(channel, "ModelInfer", a_request(ZEROS), timeout=0.3)[0] is Code.DEADLINE_EXCEEDED
        wait_until(lambda: version.num_users == 0 and version.batcher.num_waiting == 0)
        request = a_request(ZEROS)
        request.parameters["timeout"].int64_param = 50_000
        found = refusal(channel, "ModelInfer", request)
    assert found == (Code.DEADLINE_EXCEEDED, "the model did not answer within 0.05 seconds")


def test_a_call_that_is_cancelled_leaves_the_queue(repository, loader):
    version = repository.version("m")
    with served(repository, Settings()) as channel:
        send = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        first = send.future(a_request(ZEROS).SerializeToString(), timeout=60)
        wait_until(loader.has_begun.is_set)
        leaving = send.future(a_request(ZEROS).SerializeToString(), timeout=60)
        wait_until(lambda: version.batcher.num_waiting == 1)
        leaving.cancel()
        wait_until(lambda: version.batcher.num_waiting == 0 and version.statistics.failures["CANCELED"] == 1)
        loader.may_answer.set()
        assert first.result()
    assert version.statistics.inferences == 1


def test_the_end_waits_for_a_call_in_flight(repository, loader):
    with ExitStack() as stack:
        with listened(repository, Settings()) as address:
            channel = stack.enter_context(grpc.insecure_channel(address))
            send = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            taken = send.future(a_request(ZEROS).SerializeToString(), timeout=60)
            wait_until(lambda: repository.version("m").num_users == 1)
            threading.Timer(0.5, loader.may_answer.set).start()
        assert loader.may_answer.is_set()
        assert taken.result(timeout=60)


def test_a_message_that_does_not_come_is_refused(repository):
    def nothing() -> Iterator[bytes]:
        time.sleep(20)
        yield b""

    with served(repository, Settings(body_seconds=0.3)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(f"/{SERVICE}/ModelInfer")(nothing(), timeout=15)
    assert (caught.value.code(), caught.value.details()) == (
        Code.DEADLINE_EXCEEDED,
        "the request took too long to arrive",
    )


def test_a_model_that_fails_is_the_services_error(repository, monkeypatch):
    def fail(items: list[Tensor]) -> object:
        raise RuntimeError("the path /secret/model is broken")

    monkeypatch.setattr(repository.version("m").batcher, "work", fail)
    with served(repository, Settings()) as channel:
        found = refusal(channel, "ModelInfer", a_request(ZEROS))
    assert found == (Code.INTERNAL, "the model failed on this request; the log of the service says why")


# --- operation


@pytest.mark.extended
def test_a_signal_ends_calls_in_order(forms, tmp_path):
    """Calls come all the time; each is answered, or was never taken. A second signal ends the drain, because after a
    short one the server may be gone before a loaded machine asks whether it is ready."""
    options = ["--grpc-port=0", "--drain=60"]
    with running_service(tmp_path / "run", forms / "model.pt", *options) as service:
        with grpc.insecure_channel(service.grpc) as channel, ThreadPoolExecutor(4) as pool:
            answers: list[list[grpc.StatusCode]] = [[] for _ in range(4)]

            def ask(codes: list[grpc.StatusCode]) -> None:
                while not codes or codes[-1] is Code.OK:
                    try:
                        call(channel, "ModelInfer", a_request(ZEROS, model="model"))
                        codes.append(Code.OK)
                    except grpc.RpcError as error:
                        codes.append(error.code())

            asking = [pool.submit(ask, codes) for codes in answers]
            wait_until(lambda: min(map(len, answers)) > 2)
            service.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not call(channel, "ServerReady").ready)
            service.process.send_signal(signal.SIGTERM)
            for each in asking:
                each.result()
        assert service.process.wait(60) == 143
        assert {code for codes in answers for code in codes} == {Code.OK, Code.UNAVAILABLE}
    assert service.log.read_text() == "stopped by SIGTERM\n"


def test_a_port_that_is_taken_stops_the_start(service, forms):
    port = service.grpc.rpartition(":")[2]
    done = run_serve(forms / "model.pt", "--port=0", f"--grpc-port={port}")
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        f"Error: cannot listen on host 127.0.0.1, port {port}: Address already in use; "
        "try another --grpc-port or --host\n"
    )
    assert run_serve(forms / "model.pt", "--grpc-port=-1").returncode == 2


@pytest.mark.parametrize(("peer", "client"), [("ipv4:127.0.0.1:50", "127.0.0.1"), ("ipv6:%5B::1%5D:50", "::1")])
def test_a_peer_has_an_address(peer, client):
    assert client_of(peer) == client


def test_somebody_who_says_nothing_is_cut_off(repository, monkeypatch):
    monkeypatch.setattr(grpc_server, "HEAD_SECONDS", 0.5)
    with listened(repository, Settings()) as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as silent:
            while silent.recv(4096):
                pass
