"""The Open Inference Protocol as its clients meet it: a real server process, and every mistake that they can make."""

import gzip
import json
import re
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.inference.serving.helpers import image_input, image_request
from tests.support.imports import ROOT

LENGTH = "Inference-Header-Content-Length"
INFER = "/v2/models/m/infer"


def binary(request: dict[str, Any], *tails: bytes) -> tuple[bytes, dict[str, str]]:
    text = json.dumps(request).encode()
    return b"".join([text, *tails]), {LENGTH: str(len(text))}


# --- discovery


def test_a_model_says_what_it_takes_and_which_weights_answer(client, forms, predictor):
    answer = client.get("/v2/models/two").json()
    assert answer["versions"] == ["1", "2"]
    assert answer["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 28, 28]}]
    assert [output["name"] for output in answer["outputs"]] == ["label", "probabilities"]
    assert answer["parameters"]["digest"] == predictor.identity.digest
    assert answer["parameters"]["source"].endswith("/sharded")
    assert str(forms) not in json.dumps(answer)
    first = client.get("/v2/models/two/versions/1").json()
    assert first["parameters"] == {**answer["parameters"], "source": f"{forms.name}/model.pt", "format": "torch"}


# --- inference


def test_predict_asks_the_model_that_is_named(client, image_folder):
    files = {"image": ("a.png", (image_folder / "000.png").read_bytes())}
    answer = client.post("/predict?model=two", files=files)
    assert answer.headers["X-Model-Version"] == "2"
    told = "say which model: ?model=NAME with one of m, two, spare, vit, labels, embed, writer, ours"
    assert client.post("/predict", files=files).json()["detail"] == told
    assert client.post("/predict?model=none", files=files).status_code == 404


# --- mistakes

ONE = np.zeros((1, 28, 28), np.uint8)
NAN = '{"inputs":[{"name":"image","shape":[1,28,28],"datatype":"UINT8","data":[NaN]}]}'


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (b"hello", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (NAN, "is not JSON"),
        (b"[]", "has to be a JSON object"),
        ({}, "the request needs inputs"),
        ({"inputs": []}, "has 0 inputs; the model takes image"),
        ({**image_request(ONE), "outputs": [{}] * 10**6}, "there is no output None"),
        ({"inputs": [3]}, "an input has to be a JSON object"),
        (image_request(ONE, name="pixels"), "is called 'pixels'; the model takes image"),
        (image_request(ONE, datatype="FP32"), "has the datatype 'FP32'; it must be UINT8"),
        (image_request(ONE, shape=[2, 28, 28]), "has 784 elements"),
        (image_request(ONE, shape=[10**9, 28, 28]), "has 1000000000 rows"),
        (image_request(ONE, data=[0.5] * 784), "elements that are not of UINT8"),
        (image_request(ONE, data=[256] * 784), "numbers that UINT8 cannot hold"),
        (image_request(ONE, data=None), "neither data nor"),
        (image_request(ONE, parameters={"binary_data_size": 0}), "both data and"),
        ({**image_request(ONE), "outputs": [{"name": "logits"}]}, "there is no output 'logits'"),
        ({**image_request(ONE), "outputs": [{"name": "label"}] * 2}, "names an output twice"),
        ({**image_request(ONE), "model_name": "two"}, "to the model m, and its model_name is 'two'"),
        *(
            ({**image_request(ONE), "parameters": {name: value}}, f"{name} {words}")
            for name, value, words in (
                ("timeout", -1, "has to be"),
                ("binary_data_output", "true", "of the request has to be true or false"),
            )
        ),
    ],
)
def test_a_bad_request_is_one_sentence(client, request_, words):
    content = json.dumps(request_) if isinstance(request_, dict) else request_
    answer = client.post(INFER, content=content)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]
    assert len(answer.json()["error"]) < 400
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("size", "length", "tail", "words"),
    [
        (784, None, bytes(783), "783 bytes follow the JSON"),
        (783, None, bytes(783), "has 783 bytes; [1, 28, 28] of UINT8 is 784"),
        (784, None, bytes(785), "1 bytes follow the binary data"),
        (-1, None, b"", "bytes follow the JSON"),
        (784, "x", bytes(784), "has to be a number"),
        (784, "²", bytes(784), "has to be a number"),
    ],
)
def test_binary_data_that_does_not_fit_is_refused(client, size, length, tail, words):
    given = image_input(ONE, data=None, parameters={"binary_data_size": size})
    content, headers = binary({"inputs": [given]}, tail)
    answer = client.post(INFER, content=content, headers={LENGTH: (length or headers[LENGTH]).encode()})
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_numbers_that_are_not_finite_are_refused(client):
    """By a model that takes fractions: in JSON, whose 1e39 is infinite in FP32, and in binary data."""
    array = np.zeros((1, 3, 32, 32), np.float32)
    given = {"name": "image", "shape": list(array.shape), "datatype": "FP32"}
    in_json = json.dumps({"inputs": [{**given, "data": [0] * (array.size - 1) + [7]}]}).replace("7]", "1e39]")
    request = {"inputs": [{**given, "parameters": {"binary_data_size": array.nbytes}}]}
    content, headers = binary(request, array.tobytes())
    assert client.post("/v2/models/vit/infer", content=content, headers=headers).status_code == 200
    array[0, 1, 2, 3] = np.nan
    answers = [client.post("/v2/models/vit/infer", content=in_json)]
    answers.append(client.post("/v2/models/vit/infer", content=binary(request, array.tobytes())[0], headers=headers))
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert answer.json() == {"error": "the input image has elements that are NaN or infinite in FP32"}


@pytest.mark.parametrize(
    ("content", "encoding", "status"),
    [
        (lambda: gzip.compress(bytes(40 * 2**20), 1), "gzip", 413),
        (lambda: b"hello", "gzip", 400),
        (lambda: gzip.compress(b"{}")[:-3], "gzip", 400),
        (lambda: b"{}", "br", 415),
        (lambda: bytes(17 * 2**20), "identity", 413),
    ],
    ids=["bomb", "no gzip", "cut", "unknown encoding", "too large"],
)
def test_a_body_that_unpacks_to_too_much_or_to_nothing(client, content, encoding, status):
    answer = client.post(INFER, content=content(), headers={"Content-Encoding": encoding})
    assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_after_all_that_it_goes_on(client, service):
    assert client.post(INFER, json=image_request(ONE)).status_code == 200
    lines = service.log.read_text().splitlines()
    assert not [line for line in lines if line and not line.startswith("Loading weights")]  # by transformers


# --- figures


def test_the_metrics_are_prometheus_and_count(client):
    def value(name: str, **labels: str) -> float:
        text = client.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        wanted = {"model": "two", **labels}.items()
        found = [
            sample.value
            for sample in samples
            if sample.name.removesuffix("_total") == name and wanted <= sample.labels.items()
        ]
        return max(found)

    path = "/v2/models/two/infer"
    names = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
    before = [value(name) for name in names]
    failures = value("nv_inference_request_failure", reason="OTHER")
    client.post(path, json=image_request(np.zeros((31, 28, 28), np.uint8)))
    client.post(path, content=b"x")
    assert [value(name) - was for name, was in zip(names, before, strict=True)] == [1, 31, 2]
    assert value("nv_inference_request_failure", reason="OTHER") - failures == 1
    assert value("nv_inference_pending_request_count") == 0
    for part in ("request", "queue", "compute_infer"):
        assert value(f"nv_inference_{part}_duration_us") > 0


def test_the_metrics_have_the_documented_names_and_types(client):
    """Triton's counters without the suffix of Prometheus' client, which other counters have."""
    client.post(INFER, json=image_request(ONE))
    lines = client.get("/metrics").text.splitlines()
    types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE "))
    assert types.keys() == {line.split()[2] for line in lines if line.startswith("# HELP ")}
    sampled = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    parts = ("bucket", "sum", "count")
    histogram = {f"ckpt_tools_request_duration_seconds_{part}" for part in parts}
    # Without a call over gRPC there is no sample of its responses.
    others = types.keys() - {"ckpt_tools_request_duration_seconds"}
    assert (sampled - histogram) | {"ckpt_tools_grpc_responses_total"} == others
    assert histogram < sampled
    gauges = ("request_count", "inference_seconds", "model_info", "requests_in_flight", "resident_memory_bytes")
    kinds = {name: "gauge" if name.endswith(gauges) else "counter" for name in types}
    assert types == {**kinds, "ckpt_tools_request_duration_seconds": "histogram"}
    documented = re.findall(r"`((?:nv|ckpt_tools|process)_\w+)`", (ROOT / "docs/inference_operation.md").read_text())
    assert len(set(documented) & types.keys()) > 11
    assert set(documented) <= types.keys() | {"ckpt_tools_inference"}
