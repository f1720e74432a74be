"""The protocol's own OpenAPI document is the judge: of each path of it, of each answer, and of each refusal. Metadata
and configuration agree, over HTTP and gRPC.

``PROTOCOL`` is all that the document demands of a server, in its names. What this service says of itself in
``/openapi.json`` has to hold too.
"""

import json
from typing import Any

import grpc
import jsonschema
import pytest
from google.protobuf.json_format import MessageToDict

from tests.inference.serving.helpers import call

Json = dict[str, Any]

TEXT = {"type": "string"}


def list_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def object_of(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


TENSOR = {"name": TEXT, "datatype": TEXT, "shape": list_of({"type": "integer"})}
TENSORS = list_of(object_of(TENSOR, *TENSOR))
MODEL = {"name": TEXT, "versions": list_of(TEXT), "platform": TEXT, "inputs": TENSORS, "outputs": TENSORS}
SERVER = {"name": TEXT, "version": TEXT, "extensions": list_of(TEXT)}

PROTOCOL: dict[str, Json] = {
    "/v2/": object_of(SERVER, *SERVER),
    "/v2/models/m/versions/1": object_of(MODEL, "name", "platform"),
    "/v2/health/live": {},
    "/v2/health/ready": {},
    "/v2/models/m/versions/1/ready": {},
}
"""What a GET of each path answers with 200."""

DATA = list_of({"anyOf": [{"$ref": "#/$defs/data"}, {"type": ["number", "string", "boolean"]}]})
OUTPUT = object_of({**TENSOR, "parameters": {"type": "object"}, "data": {"$ref": "#/$defs/data"}}, *TENSOR, "data")
ANSWER = {"model_name": TEXT, "model_version": TEXT, "id": TEXT, "parameters": {"type": "object"}}
INFERENCE_RESPONSE: Json = {
    "$defs": {"data": DATA},
    **object_of({**ANSWER, "outputs": list_of(OUTPUT)}, "model_name", "outputs"),
}


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


@pytest.mark.parametrize("path", PROTOCOL)
def test_a_path_answers_as_the_protocol_has_it(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    jsonschema.validate(answer.json(), PROTOCOL[path])


def schema_of(document: Json, path: str, method: str, status: int) -> Json:
    """What ``/openapi.json`` promises. A status that it does not tell is a KeyError."""
    answer = document["paths"][path][method]["responses"][str(status)]
    return {**answer["content"]["application/json"]["schema"], "components": document["components"]}


def filled(path: str, name: str = "m", version: str = "1") -> str:
    return path.replace("{name}", name).replace("{version}", version)


def test_every_path_that_is_told_answers_as_it_is_told(client, document):
    told = [(path, method) for path, methods in document["paths"].items() for method in methods]
    others = ("unload", "generate")  # this model generates no text
    protocols = [each for each in told if each[0].startswith("/v2") and not any(word in each[0] for word in others)]
    assert len(protocols) == 16
    assert {filled(path) for path, _ in told} > {path.rstrip("/") for path in PROTOCOL}
    pixels = {"name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": [0] * 784}
    for path, method in protocols:
        if path.endswith("/load"):
            continue  # The version would change; the tests of the repository load.
        body = {"inputs": [pixels]} if path.endswith("/infer") else None
        answer = client.request(method, filled(path), json=body)
        assert answer.status_code == 200, (path, answer.text)
        jsonschema.validate(answer.json(), schema_of(document, path, method, 200))
        if path.endswith("/infer"):
            jsonschema.validate(answer.json(), INFERENCE_RESPONSE)
        if "{name}" in path:
            refused = client.request(method, filled(path, name="none"), json=body)
            assert refused.status_code == 404
            jsonschema.validate(refused.json(), schema_of(document, path, method, 404))


# --- metadata and configuration

IMAGE = {"image": ("UINT8", [-1, 28, 28])}, {"label": ("INT64", [-1]), "probabilities": ("FP32", [-1, 10])}
CLASSES = {"label": ("INT64", [-1]), "probabilities": ("FP32", [-1, 3])}
SHAPES = {
    "m": IMAGE,
    "two": IMAGE,
    "vit": ({"image": ("FP32", [-1, 3, 32, 32])}, CLASSES),
    "labels": ({"text": ("BYTES", [-1])}, CLASSES),
    "writer": ({"text": ("BYTES", [-1])}, {"text": ("BYTES", [-1])}),
}
LABELS = {"vit": ["cat", "dog", "emu"], "labels": ["NEGATIVE", "NEUTRAL", "POSITIVE"]}


def of_metadata(tensors: list[Json]) -> Json:
    return {each["name"]: (each["datatype"], [int(size) for size in each["shape"]]) for each in tensors}


def of_configuration(tensors: list[Json]) -> Json:
    """In the metadata's form: the batch before the other dimensions."""
    kinds = {each["name"]: each["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES") for each in tensors}
    return {each["name"]: (kinds[each["name"]], [-1, *map(int, each.get("dims", []))]) for each in tensors}


@pytest.mark.parametrize("name", SHAPES)
def test_metadata_and_configuration_agree_over_http_and_grpc(client, service, name):
    metadata, config = client.get(f"/v2/models/{name}").json(), client.get(f"/v2/models/{name}/config").json()
    with grpc.insecure_channel(service.grpc) as channel:
        told, configured = (
            MessageToDict(call(channel, method, {"name": name}), preserving_proto_field_name=True)
            for method in ("ModelMetadata", "ModelConfig")
        )
    configured = configured["config"]
    assert {each["name"] for each in (metadata, config, told, configured)} == {name}
    for side, expected in zip(("input", "output"), SHAPES[name], strict=True):
        assert of_metadata(metadata[f"{side}s"]) == of_metadata(told[f"{side}s"]) == expected
        assert of_configuration(config[side]) == of_configuration(configured[side]) == expected
    known = metadata["parameters"]
    assert known["labels"] == LABELS.get(name)
    assert known["digest"].startswith("blake3:")
    assert all(sizes[-1] == known["max_batch_size"] for sizes in known["batch_sizes"].values())
    assert (name == "m") <= ("28x28" in known["batch_sizes"])
    texts = {
        key: each if isinstance(each, str) else json.dumps(each) for key, each in known.items() if each is not None
    }
    assert told["properties"] == texts
    del texts["max_batch_size"]
    for found in (config, configured):
        versions = found["version_policy"]["specific"]["versions"]
        assert list(map(str, versions)) == metadata["versions"] == told["versions"]
        assert found["platform"] == metadata["platform"] == told["platform"]
        assert found["max_batch_size"] == known["max_batch_size"] > 0
        assert {key: value["string_value"] for key, value in found["parameters"].items()} == texts
    assert len(metadata["versions"]) == (2 if name == "two" else 1)
