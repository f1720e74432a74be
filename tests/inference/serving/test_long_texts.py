"""A text that no model could hold costs a service as little as any other request that it refuses."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import torch
from click.testing import CliRunner

from inference.batch.__main__ import main as predict_command
from inference.models.predictor import load_predictor
from inference.models.task import TooLongError
from inference.serving.grpc.requests import MESSAGES
from tests.inference.conftest import Service, running_service
from tests.inference.serving.grpc.test_grpc import refusal
from tests.inference.tiny_models import CHAT, save_text_model, save_writer
from tests.verification.scan.test_budgets import slowness
from training.models.zoo import our_model

SIZE = 16_000_000
LONG = "good " * (SIZE // 5)
BINARY = {"name": "text", "datatype": "BYTES"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    save_writer(folder / "writer", chat_template=CHAT)
    save_text_model(folder / "labels")
    (folder / "ours").mkdir()
    torch.save(our_model("lm").state_dict(), folder / "ours" / "model.pt")
    (folder / "ours" / "config.json").write_text('{"architecture": "ours:lm"}')
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    places = {"writer": "writer", "labels": "labels", "embed": "labels", "ours": "ours/model.pt"}
    models = [f"--model={name}={folder / path}" for name, path in places.items()]
    models[2] += "?embeddings=true"
    with running_service(folder / "service", None, *models, "--threads=1", "--timeout=60", "--grpc-port=0") as service:
        yield service


def tensor(*texts: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}]}


def json_of(model: str, path: str, asked: Any) -> Callable[[Service], httpx.Response]:
    body = json.dumps(asked).encode()
    return lambda service: httpx.post(f"{service.url}/v2/models/{model}/{path}", content=body, timeout=120)


def form_of(model: str, text: str) -> Callable[[Service], httpx.Response]:
    def post(service: Service) -> httpx.Response:
        files = {"text": (None, text)}
        return httpx.post(f"{service.url}/predict", params={"model": model}, files=files, timeout=120)

    return post


def binary_of(model: str, text: bytes) -> Callable[[Service], httpx.Response]:
    size = {"binary_data_size": len(text) + 4}
    head = json.dumps({"inputs": [{**BINARY, "shape": [1], "parameters": size}]}).encode()
    body, headers = head + len(text).to_bytes(4, "little") + text, {"Inference-Header-Content-Length": str(len(head))}
    url = f"/v2/models/{model}/infer"
    return lambda service: httpx.post(service.url + url, content=body, headers=headers, timeout=120)


def packed_of(model: str, asked: Any) -> Callable[[Service], httpx.Response]:
    body, headers = gzip.compress(json.dumps(asked).encode(), 1), {"Content-Encoding": "gzip"}
    url = f"/v2/models/{model}/generate"
    return lambda service: httpx.post(service.url + url, content=body, headers=headers, timeout=120)


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
    begun = time.perf_counter()
    answer = ask(service)
    return time.perf_counter() - begun, answer


WRONG = {True: form_of("unknown", LONG), False: json_of("writer", "generate", "a" * SIZE)}
"""Requests of the same size that are wrong in their first letter, as forms and not."""

SEVERAL = {"many messages", "empty messages"}
"""Hundred thousands of objects, which are read."""


@pytest.mark.parametrize("name", REQUESTS)
def test_a_text_of_16_mb_is_refused_before_it_is_tokenized(name: str, service: Service) -> None:
    """In a tenth of a second beyond the time of a request that is wrong in its first letter."""
    before = memory_of(service)
    for _ in range(5):
        usual, refused = seconds_of(WRONG[name.startswith("form")], service)
        took, answer = seconds_of(REQUESTS[name], service)
        assert refused.status_code in (400, 404)
        assert (answer.status_code, " bytes; the model takes at most " in answer.text) == (413, True), answer.text
        if is_quick := took - usual <= 0.1 * (10 if name in SEVERAL else 1):
            break
    assert is_quick or took - usual <= 0.1 * slowness(), (took, usual)
    assert memory_of(service) - before < 200e6


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("model", ["writer", "labels", "ours"])
def test_a_long_text_over_grpc(model: str, is_raw: bool, service: Service) -> None:
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


def test_what_a_model_can_hold_is_taken(service: Service) -> None:
    """A text of more tokens is refused by their number, which is told."""
    short, long = "good ", "good " * 13_000
    ask = json_of("labels", "infer", tensor(short + " " * 60_000))
    assert ask(service).status_code == 200
    answer = json_of("labels", "infer", tensor(long))(service)
    assert (answer.status_code, "tokens; the model takes at most 40" in answer.text) == (400, True)
    assert json_of("ours", "generate", {"text_input": long * 10, "max_tokens": 1})(service).status_code == 200


def test_the_batch_command_names_a_row_that_is_too_long(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("good film\n" + "good " * 20_000 + "\nbad film\n")
    out = tmp_path / "out.jsonl"
    words = ["--model", folder / "labels", "--input", tmp_path / "x.txt", "--output", out]
    result = CliRunner().invoke(predict_command, list(map(str, words)))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert result.exit_code, result.output
    assert [row["error"] is not None for row in rows] == [False, True, False]
    assert "has 100,000 bytes; the model takes at most 65,536" in rows[1]["error"]


def test_the_limit_grows_with_the_context(folder: Path) -> None:
    labels, ours = load_predictor(folder / "labels"), load_predictor(folder / "ours" / "model.pt")
    assert (labels.task.max_bytes, ours.task.max_bytes) == (2**16, 2**20)
    with pytest.raises(TooLongError, match=r"^a text has 1,048,577 bytes; the model takes at most 1,048,576$"):
        ours.decode(b"a" * (2**20 + 1), "a text")
