"""Triton's own client, unmodified, discovers the service and uses it."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient import http

from inference.models.predictor import load_predictor
from tests.inference.serving.tritons_refusals import UNSUPPORTED, check_classes_and_shared_memory, check_option


@pytest.fixture
def client(service):
    with http.InferenceServerClient(service.url.removeprefix("http://")) as client:
        yield client


def test_it_discovers_the_service(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.is_model_ready("m", "1")
    assert not client.is_model_ready("none")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("m")["inputs"][0]["datatype"] == "UINT8"
    assert client.get_model_config("m")["max_batch_size"] == 30
    assert client.get_inference_statistics("m")["model_stats"][0]["name"] == "m"


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_it_gets_the_predictors_bits(client, forms, digits, is_binary, compression):
    array = digits.pixels[:35].numpy()
    given = http.InferInput("image", list(array.shape), "UINT8")
    given.set_data_from_numpy(array, binary_data=is_binary)
    wanted = [http.InferRequestedOutput(name, binary_data=is_binary) for name in ("probabilities", "label")]
    found = client.infer("m", [given], outputs=wanted, request_id="7", request_compression_algorithm=compression)
    truth = load_predictor(forms / "model.pt").predict(list(digits.pixels[:35]))
    assert found.as_numpy("label").tolist() == [each.label for each in truth]
    expected = np.array([each.probabilities for each in truth], np.float32)
    assert found.as_numpy("probabilities").tobytes() == expected.tobytes()
    assert found.get_response()["id"] == "7"


def test_it_names_no_output_and_gets_all(client, digits):
    given = http.InferInput("image", [1, 28, 28], "UINT8")
    given.set_data_from_numpy(digits.pixels[:1].numpy())
    assert client.infer("m", [given], model_version="1").as_numpy("probabilities").shape == (1, 10)


def test_it_is_told_what_is_wrong(client):
    given = http.InferInput("image", [1, 28, 28], "FP32")
    given.set_data_from_numpy(np.zeros((1, 28, 28), np.float32))
    with pytest.raises(Exception, match="it must be UINT8"):
        client.infer("m", [given])


@pytest.mark.parametrize(("options", "name"), UNSUPPORTED)
def test_a_parameter_that_is_not_followed_is_refused(client, options, name):
    check_option(http, client, options, name)


def test_classes_and_shared_memory_are_refused(client):
    check_classes_and_shared_memory(http, client, r"404|Not Found")


def test_it_manages_the_repository(client):
    client.unload_model("spare")
    assert not client.is_model_ready("spare")
    client.load_model("spare")
    assert {entry["state"] for entry in client.get_model_repository_index()} == {"READY"}
