"""Triton's own gRPC client, unmodified, discovers the service and uses it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.grpc import model_config_pb2, service_pb2

from inference.models.predictor import load_predictor
from inference.serving.grpc.requests import MESSAGES, METHODS, SERVICE
from tests.inference.serving.tritons_refusals import UNSUPPORTED, check_classes_and_shared_memory, check_option

RENAMED = {
    "TensorMetadata": "ModelMetadataResponse.TensorMetadata",
    "InferInputTensor": "ModelInferRequest.InferInputTensor",
    "InferRequestedOutputTensor": "ModelInferRequest.InferRequestedOutputTensor",
    "InferOutputTensor": "ModelInferResponse.InferOutputTensor",
    "ModelIndex": "RepositoryIndexResponse.ModelIndex",
    "ModelVersions": "ModelVersionPolicy.Specific",
}
"""Messages that Triton nests in others."""

OURS_ALONE = {
    ("ModelMetadataResponse", "properties"),
    *((f"RepositoryModel{what}Response", "model_name") for what in ("Load", "Unload")),
    ("RepositoryModelLoadResponse", "isLoaded"),
    ("RepositoryModelUnloadResponse", "isUnloaded"),
}
"""Of the protocol and of KServe."""


@pytest.fixture
def client(service):
    with grpc.InferenceServerClient(service.grpc) as client:
        yield client


def theirs(name: str) -> object:
    holder: object = service_pb2
    for part in RENAMED.get(name, name).split("."):
        holder = getattr(holder, part, None) or getattr(model_config_pb2, part)
    return holder


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_tritons_numbers_and_types(name):
    fields = theirs(name).DESCRIPTOR.fields_by_name
    for field in MESSAGES[name].DESCRIPTOR.fields:
        if (name, field.name) in OURS_ALONE:
            assert field.name not in fields
            continue
        other = fields[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
        in_oneof = [each and each.name for each in (field.containing_oneof, other.containing_oneof)]
        assert in_oneof[0] == in_oneof[1]


def test_the_service_has_tritons_methods():
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == SERVICE
    for name, method in METHODS.items():
        other = service.methods_by_name[name]
        assert method.request.DESCRIPTOR.name == other.input_type.name
        assert method.response.DESCRIPTOR.name == other.output_type.name


def test_it_discovers_the_service(client, forms):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.is_model_ready("m", "1")
    assert not client.is_model_ready("m", "7")
    assert not client.is_model_ready("none")
    assert "model_repository" in client.get_server_metadata().extensions
    metadata = client.get_model_metadata("m")
    assert [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs] == [
        ("image", "UINT8", [-1, 28, 28])
    ]
    config = client.get_model_config("m", as_json=True)["config"]
    assert (config["max_batch_size"], config["input"][0]["data_type"]) == (30, "TYPE_UINT8")
    assert config["parameters"]["digest"]["string_value"] == load_predictor(forms / "model.pt").identity.digest
    assert client.get_inference_statistics("m").model_stats[0].name == "m"
    assert {"m", "two", "labels"} < {each.name for each in client.get_inference_statistics().model_stats}


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_it_gets_the_predictors_bits(client, forms, digits, compression):
    array = digits.pixels[:35].numpy()
    given = grpc.InferInput("image", list(array.shape), "UINT8").set_data_from_numpy(array)
    wanted = [grpc.InferRequestedOutput(name) for name in ("probabilities", "label")]
    found = client.infer("m", [given], outputs=wanted, request_id="7", compression_algorithm=compression)
    truth = load_predictor(forms / "model.pt").predict(list(digits.pixels[:35]))
    assert found.as_numpy("label").tolist() == [each.label for each in truth]
    expected = np.array([each.probabilities for each in truth], np.float32)
    assert found.as_numpy("probabilities").tobytes() == expected.tobytes()
    response = found.get_response()
    assert (response.id, response.model_version) == ("7", "1")
    assert [output.name for output in response.outputs] == ["probabilities", "label"]


def test_many_requests_at_a_time_get_their_own_answers(client, forms, digits):
    truth = load_predictor(forms / "model.pt").predict(list(digits.pixels[:64]))

    def ask(row: np.ndarray[Any, Any]) -> bytes:
        given = grpc.InferInput("image", [1, 28, 28], "UINT8").set_data_from_numpy(row[None])
        return bytes(client.infer("m", [given]).as_numpy("probabilities").tobytes())

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, digits.pixels[:64].numpy()))
    assert found == [np.array([expected.probabilities], np.float32).tobytes() for expected in truth]


def test_it_is_told_what_is_wrong(client):
    given = grpc.InferInput("image", [1, 28, 28], "FP32").set_data_from_numpy(np.zeros((1, 28, 28), np.float32))
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*it must be UINT8"):
        client.infer("m", [given])


@pytest.mark.parametrize(("options", "name"), UNSUPPORTED)
def test_a_parameter_that_is_not_followed_is_refused(client, options, name):
    check_option(grpc, client, options, name)


def test_classes_and_shared_memory_are_refused(client):
    check_classes_and_shared_memory(grpc, client, r"UNIMPLEMENTED|Method not found")


def test_it_manages_the_repository(client):
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*as the service was started with it"):
        client.load_model("spare", config="{}")
    (before,) = versions_of_spare(client)
    client.unload_model("spare")
    assert not client.is_model_ready("spare")
    assert client.is_server_ready()
    client.load_model("spare")
    assert versions_of_spare(client) == [(before[0] + 1, "READY")]


def versions_of_spare(client: grpc.InferenceServerClient) -> list[tuple[int, str]]:
    models = client.get_model_repository_index().models
    return [(int(entry.version), entry.state) for entry in models if entry.name == "spare"]
