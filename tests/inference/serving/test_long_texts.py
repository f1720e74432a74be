"""A text that no model could hold costs a service as little as any other request that it refuses."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import psutil
import pytest
from click.testing import CliRunner

from inference.batch.__main__ import main as predict_command
from inference.models.predictor import load_predictor
from inference.models.task import TooLongError
from inference.serving.grpc.requests import MESSAGES
from tests.inference.conftest import Service
from tests.inference.serving.grpc.test_grpc import refusal
from tests.verification.scan.test_budgets import slowness

SIZE = 16_000_000
LONG = "good " * (SIZE // 5)
BINARY = {"name": "text", "datatype": "BYTES"}


def tensor(*texts: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}]}


def json_of(model: str, path: str, asked: Any) -> Callable[[Service], httpx.Response]:
    return lambda service: service.http.post(f"/v2/models/{model}/{path}", content=json.dumps(asked).encode())


def form_of(model: str, text: str) -> Callable[[Service], httpx.Response]:
    def post(service: Service) -> httpx.Response:
        files = {"text": (None, text)}
        return service.http.post("/predict", params={"model": model}, files=files)

    return post


def binary_of(model: str, text: bytes) -> Callable[[Service], httpx.Response]:
    size = {"binary_data_size": len(text) + 4}
    head = json.dumps({"inputs": [{**BINARY, "shape": [1], "parameters": size}]}).encode()
    head += len(text).to_bytes(4, "little")
    headers = {"Inference-Header-Content-Length": str(len(head) - 4)}
    url = f"/v2/models/{model}/infer"
    return lambda service: service.http.post(url, content=head + text, headers=headers)


def packed_of(model: str, asked: Any) -> Callable[[Service], httpx.Response]:
    url, headers = f"/v2/models/{model}/generate", {"Content-Encoding": "gzip"}
    text = json.dumps(asked)
    return lambda service: service.http.post(url, content=gzip.compress(text.encode(), 1), headers=headers)


def said(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


REQUESTS: dict[str, Callable[[Service], httpx.Response]] = {
    "generate": json_of("writer", "generate", {"text_input": LONG}),
    "generate one letter": json_of("writer", "generate", {"text_input": "a" * SIZE}),
    "generate spaces": json_of("writer", "generate", {"text_input": " " * SIZE}),
    "generate escapes": json_of("writer", "generate", {"text_input": "\u00e9" * (SIZE // 6)}),
    "generate stream": json_of("writer", "generate_stream", {"text_input": LONG}),
    "generate one token": json_of("writer", "generate", {"text_input": LONG, "max_tokens": 1}),
    "generate at once": json_of("writer", "generate", {"text_input": LONG, "timeout": 1}),
    "generate version": json_of("writer/versions/1", "generate", {"text_input": LONG}),
    "generate packed": packed_of("writer", {"text_input": LONG}),
    "generate bytes": json_of("ours", "generate", {"text_input": LONG}),
    "generate bytes stream": json_of("ours", "generate_stream", {"text_input": LONG}),
    "one message": json_of("writer", "generate", {"messages": [said(LONG)]}),
    "one message stream": json_of("writer", "generate_stream", {"messages": [said(LONG)]}),
    "a role": json_of("writer", "generate", {"messages": [{"role": LONG, "content": "a"}]}),
    "many messages": json_of("writer", "generate", {"messages": [said("good " * 20)] * (SIZE // 140)}),
    "empty messages": json_of("writer", "generate", {"messages": [said("")] * (SIZE // 40)}),
    "infer": json_of("writer", "infer", tensor(LONG)),
    "infer labels": json_of("labels", "infer", tensor(LONG)),
    "infer embeddings": json_of("embed", "infer", tensor(LONG)),
    "infer bytes": json_of("ours", "infer", tensor(LONG)),
    "infer the last row": json_of("labels", "infer", tensor("good", "bad", LONG)),
    "infer binary": binary_of("labels", LONG.encode()),
    "infer binary of no UTF-8": binary_of("labels", b"\xff" * SIZE),
    "form of writer": form_of("writer", LONG),
    "form of labels": form_of("labels", LONG),
    "form of embeddings": form_of("embed", LONG),
    "form of bytes": form_of("ours", LONG),
}


def memory_of(service: Service) -> int:
    process = psutil.Process(service.process.pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def seconds_of(ask: Callable[[Service], httpx.Response], service: Service) -> tuple[float, httpx.Response]:
    """Seconds of a processor that the service and its models needed for the answer; others may use it meanwhile."""
    process = psutil.Process(service.process.pid)
    processes = (process, *process.children(recursive=True))

    def used() -> float:
        return float(sum(sum(each.cpu_times()[:2]) for each in processes))

    begun = used()
    answer = ask(service)
    return used() - begun, answer


WRONG = {True: form_of("unknown", LONG), False: json_of("writer", "generate", "a" * SIZE)}
"""Requests of the same size that are wrong in their first letter, as forms and not."""

SEVERAL = {"many messages", "empty messages"}
"""Hundred thousands of objects, which are read."""


USUAL = ("generate", "generate packed", "many messages", "infer labels", "infer binary", "form of labels")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.extended) for name in REQUESTS]
)
def test_a_text_of_16_mb_is_refused_before_it_is_tokenized(name, service):
    """With a tenth of a second beyond what a request needs that is wrong in its first letter."""
    before, allowed = memory_of(service), 1.0 if name in SEVERAL else 0.1
    for _ in range(5):
        usual, refused = seconds_of(WRONG[name.startswith("form")], service)
        took, answer = seconds_of(REQUESTS[name], service)
        assert refused.status_code in (400, 404)
        assert (answer.status_code, " bytes; the model takes at most " in answer.text) == (413, True), answer.text
        if is_quick := took - usual <= allowed:
            break
    assert is_quick or took - usual <= allowed * slowness(), (took, usual)
    assert memory_of(service) - before < 200e6


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("model", ["writer", "labels", "ours"])
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
    ask = json_of("labels", "infer", tensor(short + " " * 60_000))
    assert ask(service).status_code == 200
    answer = json_of("labels", "infer", tensor(long))(service)
    assert (answer.status_code, "tokens; the model takes at most 40" in answer.text) == (400, True)
    assert json_of("ours", "generate", {"text_input": long * 10, "max_tokens": 1})(service).status_code == 200


def test_the_batch_command_names_a_row_that_is_too_long(text_models, tmp_path):
    (tmp_path / "x.txt").write_text("good film\n" + "good " * 20_000 + "\nbad film\n")
    out = tmp_path / "out.jsonl"
    words = ["--model", text_models / "labels", "--input", tmp_path / "x.txt", "--output", out]
    result = CliRunner().invoke(predict_command, list(map(str, words)))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert result.exit_code, result.output
    assert [row["error"] is not None for row in rows] == [False, True, False]
    assert "has 100,000 bytes; the model takes at most 65,536" in rows[1]["error"]


def test_the_limit_grows_with_the_context(text_models):
    labels, ours = load_predictor(text_models / "labels"), load_predictor(text_models / "ours" / "model.pt")
    assert (labels.task.max_bytes, ours.task.max_bytes) == (2**16, 2**20)
    with pytest.raises(TooLongError, match=r"^a text has 1,048,577 bytes; the model takes at most 1,048,576$"):
        ours.decode(b"a" * (2**20 + 1), "a text")
