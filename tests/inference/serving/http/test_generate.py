"""Triton's generate extension: whole texts and streams of events, judged by the model in this process."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import Message

from inference.models.predictor import load_predictor
from inference.serving.generating import MAX_CONCURRENT_TEXTS
from inference.serving.http.events import EventStream
from tests.inference.conftest import Service, models_of
from tests.inference.models.test_generation import CONVERSATION, text
from tests.inference.serving.helpers import wait_until

ENDLESS = {"text_input": "Speak", "max_tokens": 1_000_000}
"""To our model, which takes texts of any length: minutes of work."""


@pytest.fixture(scope="module")
def writer(small_models):
    return load_predictor(small_models / "writer", exact="buckets", max_new_tokens=16)


def post(service: Service, asked: Any, path: str = "writer/generate") -> httpx.Response:
    content = asked if isinstance(asked, bytes) else json.dumps(asked)
    return service.http.post(f"/v2/models/{path}", content=content)


def events_of(answer: httpx.Response) -> Iterator[dict[str, str]]:
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    for line in answer.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def streaming(service: Service, asked: Mapping[str, Any], model: str = "ours") -> Iterator[Iterator[dict[str, str]]]:
    with service.http.stream("POST", f"/v2/models/{model}/generate_stream", json=asked) as answer:
        assert answer.status_code == 200, answer.read()
        yield events_of(answer)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 1.5, "seed": 7},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 2**63 - 1, "repetition_penalty": 2, "max_tokens": 9},
        {"stop": ["z", "\ufffd\ufffd"]},
    ],
)
def test_a_text_is_that_of_the_model_whole_and_in_pieces(asked, service, writer):
    own = {**asked, "stop": tuple(asked.get("stop", ()))}
    for prompt in ("Hello", "Größe") if not asked else ("Größe",):
        expected = text(writer, prompt, **own)
        answer = post(service, {"text_input": prompt, "parameters": {**asked, "stream": False}})
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"model_name": "writer", "model_version": "1", "text_output": expected}
        with streaming(service, {"id": "7", "text_input": prompt, **asked, "stream": True}, "writer") as events:
            found = list(events)
        assert "".join(each.pop("text_output") for each in found) == expected
        assert all(each == {"id": "7", "model_name": "writer", "model_version": "1"} for each in found)
        assert asked.get("stop") or len(found) >= 5
    versioned = post(service, {"text_input": "Größe", **asked}, "writer/versions/1/generate")
    assert versioned.json()["text_output"] == expected


def test_an_empty_text_is_one_event_and_messages_go_through_the_chat_template(service, writer):
    first = post(service, {"text_input": "Hello"}).json()["text_output"][0]
    with streaming(service, {"text_input": "Hello", "stop": first}, "writer") as events:
        assert [each["text_output"] for each in events] == [""]
    answer = post(service, {"messages": CONVERSATION, "temperature": 1, "seed": 0})
    assert answer.json()["text_output"] == text(writer, CONVERSATION, temperature=1, seed=0)


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (b"{", "the request is not JSON: "),
        (b'{"text_input": "\\ud800"}', "the request is not JSON: "),
        ({}, "the request has to have either text_input or messages"),
        ({"text_input": 1}, "text_input has to be a text"),
        ({"text_input": "x" * 60}, "text_input has 60 tokens; the model takes at most 48"),
        ({"text_input": "x", "best_of": 2}, "the parameter 'best_of' is unknown; there are max_tokens, temperature, "),
        ({"text_input": "x", "seed": 1, "parameters": {"seed": 2}}, "the parameter seed is given twice"),
        ({"text_input": "x", "stream": True}, "stream has to be false; only generate_stream streams"),
        ({"text_input": "x", "stop": 1}, "stop has to be a text or a list of texts"),
        ({"text_input": "x", "timeout": -1}, "timeout has to be a number of microseconds"),
        ({"messages": [{**USER, "name": "x"}]}, "message 0 has to be an object with role and content, and nothing"),
        ({"messages": [{**USER, "role": "system"}]}, "the chat template does not take these messages: no system, pl"),
    ],
)
def test_what_is_not_taken_is_refused_with_a_sentence(asked, sentence, service):
    answer = post(service, asked)
    assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert answer.json()["error"].startswith(sentence)
    if sentence != "stream has to be false; only generate_stream streams":
        assert post(service, asked, "writer/generate_stream").json() == answer.json()


def test_models_that_are_not_there_or_take_no_chat(service):
    assert post(service, {"text_input": "x"}, "nothing/generate_stream").status_code == 404
    assert post(service, {"text_input": "x"}, "writer/versions/9/generate").status_code == 404
    answer = post(service, {"messages": [USER]}, "ours/generate")
    assert (answer.status_code, "has no chat template" in answer.json()["error"]) == (400, True)


def infer(service: Service, model: str = "ours") -> httpx.Response:
    inputs = [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Hello"]}]
    return post(service, {"inputs": inputs}, f"{model}/infer")


def processor_seconds(service: Service) -> float:
    (models,) = models_of(psutil.Process(service.process.pid))
    return float(sum(models.cpu_times()[:2]))


def is_idle(service: Service) -> bool:
    before = processor_seconds(service)
    time.sleep(0.3)
    return processor_seconds(service) - before < 0.03


def counted(service: Service) -> tuple[int, int]:
    """Requests to our model that were answered, and that their clients left."""
    lines = service.http.get("/metrics").text.splitlines()
    ours = [line for line in lines if line.startswith("nv_inference_request") and 'model="ours"' in line]
    (answered,) = (line for line in ours if line.startswith("nv_inference_request_success"))
    (left,) = (line for line in ours if 'reason="CANCELED"' in line)
    return int(float(answered.split()[-1])), int(float(left.split()[-1]))


def test_others_are_answered_during_a_stream_and_a_client_that_leaves_ends_it(service):
    alone, (answered, left) = infer(service), counted(service)
    with streaming(service, ENDLESS) as events:
        assert [len(next(events)["text_output"]) for _ in range(3)] == [1, 1, 1]
        assert infer(service).json() == alone.json()
        other = post(service, {"text_input": "Speak"}, "ours/generate").json()["text_output"]
        assert other
        assert next(events)["model_name"] == "ours"
        wait_until(lambda: not is_idle(service))
    wait_until(lambda: is_idle(service))
    assert counted(service) == (answered + 2, left + 1)


def test_a_text_has_to_be_made_in_time(service):
    sentence = {"error": "the model did not answer within 0.3 seconds"}
    answer = post(service, {**ENDLESS, "timeout": 300_000}, "ours/generate")
    assert (answer.status_code, answer.json()) == (504, sentence)
    with streaming(service, {**ENDLESS, "timeout": 300_000}) as events:
        *pieces, last = events
    assert pieces
    assert last == sentence
    wait_until(lambda: is_idle(service))


def test_texts_beyond_the_places_of_a_model_wait_their_time(service):
    with ExitStack() as stack:
        streams = [stack.enter_context(streaming(service, ENDLESS)) for _ in range(MAX_CONCURRENT_TEXTS)]
        for events in streams:
            next(events)
        answer = post(service, {"text_input": "x", "max_tokens": 1, "timeout": 300_000}, "ours/generate")
        assert answer.status_code == 504
        assert infer(service).status_code == 200
        assert post(service, {"text_input": "x"}).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(post, service, {"text_input": "x", "max_tokens": 1}, "ours/generate")
            time.sleep(0.2)
            assert not waiting.done()
            stack.close()
            assert waiting.result().status_code == 200


# --- streams of events


class Numbers:
    """Numbers without an end; ``is_closed`` once nothing wants them any more."""

    is_closed = False

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        try:
            for number in range(1, 10**9):
                await asyncio.sleep(0)
                yield {"number": number}
        finally:
            self.is_closed = True


async def receive() -> Message:
    raise AssertionError("the middleware watches the client")


def test_a_client_that_does_not_read_is_cut_off():
    numbers, sent = Numbers(), list[Message]()

    async def send(message: Message) -> None:
        if len(sent) == 4:
            await asyncio.sleep(600)
        sent.append(message)

    asyncio.run(EventStream({"number": 0}, numbers.events(), 0.1)({}, receive, send))
    assert [message["type"].rpartition(".")[2] for message in sent] == ["start", "body", "body", "body"]
    assert all(message["more_body"] for message in sent[1:])
    assert numbers.is_closed


def test_a_stream_of_a_service_that_stops_ends_with_an_error():
    numbers, sent = Numbers(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        task = asyncio.create_task(EventStream({"number": 0}, numbers.events(), 60)({}, receive, send))
        while len(sent) < 4:
            await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(run())
    first = [message.get("body") for message in sent[:3]]
    assert first == [None, b'data: {"number":0}\n\n', b'data: {"number":1}\n\n']
    assert sent[-2]["body"] == b'data: {"error":"the service is stopping"}\n\n'
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert numbers.is_closed
