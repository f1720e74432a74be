"""Triton's own clients, unmodified, discover the service over HTTP and gRPC and use it. The messages are Triton's."""

from typing import Any

import numpy as np
import pytest
from tritonclient import grpc, http
from tritonclient.grpc import model_config_pb2, service_pb2

from inference.serving.grpc.requests import MESSAGES, METHODS, SERVICE

KINDS = {"http": http, "grpc": grpc}


@pytest.fixture(params=KINDS)
def library(request):
    return KINDS[request.param]


@pytest.fixture
def client(library, service):
    address = service.grpc if library is grpc else service.url.removeprefix("http://")
    with library.InferenceServerClient(address) as client:
        yield client


def as_json(client: Any, method: str, *args: str) -> dict[str, Any]:
    """What a method tells, as JSON also from gRPC."""
    return getattr(client, method)(
        *args, **({"as_json": True} if isinstance(client, grpc.InferenceServerClient) else {})
    )


def image(library: Any, array: np.ndarray[Any, Any], datatype: str = "UINT8") -> Any:
    given = library.InferInput("image", list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


@pytest.fixture
def one(library):
    return image(library, np.zeros((1, 28, 28), np.uint8))


def test_they_discover_the_service(client, predictor):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("m") and client.is_model_ready("m", "1")
    assert not client.is_model_ready("m", "7") and not client.is_model_ready("none")
    assert {"binary_tensor_data", "model_repository"} < {*as_json(client, "get_server_metadata")["extensions"]}
    (given,) = as_json(client, "get_model_metadata", "m")["inputs"]
    assert (given["name"], given["datatype"], [*map(int, given["shape"])]) == ("image", "UINT8", [-1, 28, 28])
    config = as_json(client, "get_model_config", "m")
    config = config.get("config", config)
    assert (config["max_batch_size"], config["input"][0]["data_type"]) == (30, "TYPE_UINT8")
    assert config["parameters"]["digest"]["string_value"] == predictor.identity.digest
    assert as_json(client, "get_inference_statistics", "m")["model_stats"][0]["name"] == "m"
    everyone = as_json(client, "get_inference_statistics")["model_stats"]
    assert {"m", "two", "labels"} < {each["name"] for each in everyone}


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_they_get_the_predictors_bits(client, library, predictor, digits, compression):
    """Of more images than a forward pass takes."""
    array = digits.pixels[: 35 if compression is None else 3].numpy()
    truth = predictor.predict(list(digits.pixels[: len(array)]))
    expected = np.array([each.probabilities for each in truth], np.float32)
    packed = "compression_algorithm" if library is grpc else "request_compression_algorithm"
    for options in [{}] if library is grpc else [{"binary_data": True}, {"binary_data": False}]:
        given = library.InferInput("image", list(array.shape), "UINT8")
        given.set_data_from_numpy(array, **options)
        wanted = [library.InferRequestedOutput(name, **options) for name in ("probabilities", "label")]
        found = client.infer("m", [given], outputs=wanted, request_id="7", **{packed: compression})
        assert found.as_numpy("label").tolist() == [each.label for each in truth]
        assert found.as_numpy("probabilities").tobytes() == expected.tobytes()
        told = found.get_response(**({"as_json": True} if library is grpc else {}))
        assert (told["id"], told["model_version"]) == ("7", "1")
        assert [output["name"] for output in told["outputs"]] == ["probabilities", "label"]


def test_they_are_told_what_is_wrong(client, library):
    with pytest.raises(Exception, match="it must be UINT8"):
        client.infer("m", [image(library, np.zeros((1, 28, 28), np.float32), "FP32")])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sequence_id": 7}, "sequence_id"),
        ({"parameters": {"top_k": 3}}, "top_k"),
    ],
)
def test_a_parameter_that_is_not_followed_is_refused(client, one, options, name):
    with pytest.raises(Exception, match=f"the parameter '{name}' of the request is not supported"):
        client.infer("m", [one], **options)


def test_classes_and_shared_memory_are_refused(client, library, one):
    shared, to_memory = library.InferInput("image", [1, 28, 28], "UINT8"), library.InferRequestedOutput("label")
    shared.set_shared_memory("region", 784)
    to_memory.set_shared_memory("region", 8)
    classes = library.InferRequestedOutput("probabilities", class_count=3)
    for given, outputs, told in (
        (shared, None, "'shared_memory_byte_size' of the input image"),
        (one, [to_memory], "'shared_memory_byte_size' of the output label"),
        (one, [classes], "'classification' of the output probabilities"),
    ):
        with pytest.raises(Exception, match=f"the parameter {told} is not supported"):
            client.infer("m", [given], outputs=outputs)
    with pytest.raises(Exception, match=r"404|Not Found|UNIMPLEMENTED|Method not found"):
        client.get_system_shared_memory_status()


def test_they_manage_the_repository(client):
    def spare() -> list[tuple[int, str]]:
        found = as_json(client, "get_model_repository_index")
        models = found if isinstance(found, list) else found["models"]
        return [(int(each["version"]), each["state"]) for each in models if each["name"] == "spare"]

    with pytest.raises(Exception, match="as the service was started with it"):
        client.load_model("spare", config="{}")
    client.load_model("spare")  # other tests may have unloaded it
    ((version, _),) = spare()
    client.unload_model("spare")
    assert not client.is_model_ready("spare")
    assert client.is_server_ready()
    client.load_model("spare")
    assert spare() == [(version + 1, "READY")]


# --- the messages of gRPC

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


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_tritons_numbers_and_types(name):
    theirs: Any = service_pb2
    for part in RENAMED.get(name, name).split("."):
        theirs = getattr(theirs, part, None) or getattr(model_config_pb2, part)
    fields = theirs.DESCRIPTOR.fields_by_name
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
