"""A text that no model could hold costs a service as little as any other request that it refuses."""

import json
from typing import Any

import grpc
import httpx
import psutil
import pytest

from inference.serving.grpc.requests import MESSAGES
from tests.inference.conftest import Service
from tests.inference.serving.helpers import refusal
from tests.verification.scan.test_budgets import slowness

SIZE = 16_000_000
LONG = "good " * (SIZE // 5)


def tensor(*texts: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}]}


Asked = tuple[str, dict[str, Any]]
"""A path, and what is posted to it."""


def json_of(model: str, path: str, asked: Any) -> Asked:
    return f"/v2/models/{model}/{path}", {"content": json.dumps(asked).encode()}


def form_of(model: str, text: str) -> Asked:
    return f"/predict?model={model}", {"files": {"text": (None, text)}}


def binary_of(model: str, text: bytes) -> Asked:
    size = {"binary_data_size": len(text) + 4}
    given = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": size}
    head = json.dumps({"inputs": [given]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    content = head + len(text).to_bytes(4, "little") + text
    return f"/v2/models/{model}/infer", {"content": content, "headers": headers}


REQUESTS: dict[str, Asked] = {
    "generate": json_of("writer", "generate", {"text_input": LONG}),
    "many messages": json_of(
        "writer", "generate", {"messages": [{"role": "user", "content": "good " * 20}] * (SIZE // 140)}
    ),
    "infer labels": json_of("labels", "infer", tensor(LONG)),
    "infer binary": binary_of("labels", LONG.encode()),
    "form of labels": form_of("labels", LONG),
}


def processes_of(service: Service) -> list[psutil.Process]:
    process = psutil.Process(service.process.pid)
    return [process, *process.children(recursive=True)]


def memory_of(service: Service) -> int:
    return sum(each.memory_info().rss for each in processes_of(service))


def posted(service: Service, asked: Asked) -> httpx.Response:
    return service.http.post(asked[0], **asked[1])


def seconds_of(service: Service, asked: Asked) -> tuple[float, httpx.Response]:
    """Seconds of a processor that the service and its models needed for the answer; others may use it meanwhile."""
    processes = processes_of(service)

    def used() -> float:
        return float(sum(sum(each.cpu_times()[:2]) for each in processes))

    begun = used()
    answer = posted(service, asked)
    return used() - begun, answer


WRONG = {True: form_of("unknown", LONG), False: json_of("writer", "generate", "a" * SIZE)}
"""Requests of the same size that are wrong in their first letter, as forms and not."""


@pytest.mark.parametrize("name", REQUESTS)
def test_a_text_of_16_mb_is_refused_before_it_is_tokenized(name, service):
    """With a tenth of a second beyond what a request needs that is wrong in its first letter."""
    # Hundred thousands of messages are read.
    before, allowed = memory_of(service), 1.0 if name == "many messages" else 0.1
    for _ in range(5):
        usual, refused = seconds_of(service, WRONG[name.startswith("form")])
        took, answer = seconds_of(service, REQUESTS[name])
        assert refused.status_code in (400, 404)
        assert (answer.status_code, " bytes; the model takes at most " in answer.text) == (413, True), answer.text
        if is_quick := took - usual <= allowed:
            break
    assert is_quick or took - usual <= allowed * slowness(), (took, usual)
    assert memory_of(service) - before < 200e6


@pytest.mark.parametrize(("model", "is_raw"), [("writer", False), ("labels", True), ("ours", False)])
def test_a_long_text_over_grpc(model, is_raw, service):
    request, text = MESSAGES["ModelInferRequest"](model_name=model), LONG.encode()
    given = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    if is_raw:
        request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    else:
        given.contents.bytes_contents.append(text)
    with grpc.insecure_channel(service.grpc) as channel:
        code, sentence = refusal(channel, "ModelInfer", request)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert " bytes; the model takes at most " in sentence


def test_what_a_model_can_hold_is_taken(service):
    """A text of more tokens is refused by their number, which is told."""
    short, long = "good ", "good " * 13_000
    assert posted(service, json_of("labels", "infer", tensor(short + " " * 60_000))).status_code == 200
    answer = posted(service, json_of("labels", "infer", tensor(long)))
    assert (answer.status_code, "tokens; the model takes at most 40" in answer.text) == (400, True)
    asked = json_of("ours", "generate", {"text_input": long * 10, "max_tokens": 1})
    assert posted(service, asked).status_code == 200
