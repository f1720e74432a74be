"""The metadata of a model and its configuration in Triton's form agree, over HTTP and over gRPC."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import grpc
import pytest
from fastapi.testclient import TestClient
from google.protobuf.json_format import MessageToDict

from inference.models.predictor import load_predictor
from inference.serving.grpc.requests import METHODS
from inference.serving.http.app import create_app
from inference.serving.repository import Repository, Source
from inference.serving.settings import Settings
from tests.inference.serving.grpc.test_grpc import call, served
from tests.inference.tiny_models import save_image_model, save_text_model, save_writer

Json = dict[str, Any]

SHAPES = {
    "image": ({"image": ("UINT8", [-1, 28, 28])}, {"label": ("INT64", [-1]), "probabilities": ("FP32", [-1, 10])}),
    "vit": ({"image": ("FP32", [-1, 3, 32, 32])}, {"label": ("INT64", [-1]), "probabilities": ("FP32", [-1, 3])}),
    "text": ({"text": ("BYTES", [-1])}, {"label": ("INT64", [-1]), "probabilities": ("FP32", [-1, 3])}),
    "language": ({"text": ("BYTES", [-1])}, {"text": ("BYTES", [-1])}),
}
LABELS = {"vit": ["cat", "dog", "emu"], "text": ["NEGATIVE", "NEUTRAL", "POSITIVE"]}


@pytest.fixture(scope="module")
def repository(forms, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sources = {
        "vit": save_image_model(folder / "vit"),
        "text": save_text_model(folder / "text"),
        "language": save_writer(folder / "language"),
    }
    images = [Source("image", str(forms / name)) for name in ("model.pt", "model.safetensors")]
    others = [Source(name, str(path)) for name, path in sources.items()]
    load = partial(load_predictor, exact="buckets")
    repository = Repository([*images, *others], lambda source: load(source.url, name=source.name))
    repository.load_all()
    return repository


@pytest.fixture(scope="module")
def client(repository):
    with TestClient(create_app(repository), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="module")
def channel(repository, client):
    with served(repository, Settings()) as channel:
        yield channel


def of_metadata(tensors: list[Json]) -> Json:
    return {each["name"]: (each["datatype"], [int(size) for size in each["shape"]]) for each in tensors}


def of_configuration(tensors: list[Json]) -> Json:
    """In the metadata's form: the batch before the other dimensions."""
    datatypes = {"TYPE_STRING": "BYTES"}
    return {
        each["name"]: (
            datatypes.get(each["data_type"], each["data_type"].removeprefix("TYPE_")),
            [-1, *map(int, each.get("dims", []))],
        )
        for each in tensors
    }


def over_grpc(channel: grpc.Channel, method: str, name: str) -> Json:
    message = call(channel, method, METHODS[method].request(name=name))
    return MessageToDict(message, preserving_proto_field_name=True)


@pytest.mark.parametrize("name", SHAPES)
def test_metadata_and_configuration_agree(client, channel, name):
    metadata, config = client.get(f"/v2/models/{name}").json(), client.get(f"/v2/models/{name}/config").json()
    told = over_grpc(channel, "ModelMetadata", name)
    configured = over_grpc(channel, "ModelConfig", name)["config"]
    assert {each["name"] for each in (metadata, config, told, configured)} == {name}
    for side, place in (("input", 0), ("output", 1)):
        for given in (metadata, told):
            assert of_metadata(given[f"{side}s"]) == SHAPES[name][place]
        for given in (config, configured):
            assert of_configuration(given[side]) == SHAPES[name][place]
    for given in (config, configured):
        versions = given["version_policy"]["specific"]["versions"]
        assert list(map(str, versions)) == metadata["versions"] == told["versions"]
        assert given["platform"] == metadata["platform"] == told["platform"]
        assert given["max_batch_size"] == metadata["parameters"]["max_batch_size"] > 0
    assert metadata["versions"] == (["1", "2"] if name == "image" else ["1"])


@pytest.mark.parametrize("name", SHAPES)
def test_the_weights_and_labels_are_the_same(client, channel, name):
    known = client.get(f"/v2/models/{name}").json()["parameters"]
    assert known["labels"] == LABELS.get(name)
    assert known["digest"].startswith("blake3:")
    assert all(sizes[-1] == known["max_batch_size"] for sizes in known["batch_sizes"].values())
    assert (name == "image") <= ("28x28" in known["batch_sizes"])
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in known.items()}
    texts = {key: value for key, value in texts.items() if known[key] is not None}
    assert over_grpc(channel, "ModelMetadata", name)["properties"] == texts
    del texts["max_batch_size"]
    for config in (
        client.get(f"/v2/models/{name}/config").json(),
        over_grpc(channel, "ModelConfig", name)["config"],
    ):
        assert {key: value["string_value"] for key, value in config["parameters"].items()} == texts
