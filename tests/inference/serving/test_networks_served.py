"""Networks of any task, served to Triton's own clients over HTTP and gRPC; judged by the networks themselves."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim
from tritonclient import grpc, http

from inference.models.predictor import load_predictor, loaded
from inference.serving.__main__ import Options, application
from inference.serving.settings import Listening, Settings, address_of, reserve
from tests.inference.conftest import running_service
from tests.inference.serving.test_serve import plain_uvicorn_of

OWN = '''
import numpy
import torch


class Boxes(torch.nn.Module):
    """As many boxes as there are positive values."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 6)

    def forward(self, values):
        return [{"boxes": row[row > 0], "scores": row} for row in self.linear(values)]


inputs = {"values": ("FP32", [-1, 3])}


def decode(data):
    return numpy.array([float(each) for each in data.split()], numpy.float32)


def encode(outputs):
    return {"boxes": len(outputs["boxes"]), "best": int(outputs["scores"].argmax())}
'''


@dataclass(frozen=True)
class Served:
    """The addresses of HTTP and of gRPC."""

    url: str
    grpc: str
    folder: Path
    linear: nn.Linear


class Scaled(nn.Module):
    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (values * 3).bfloat16(), values.masked_fill(mask, -torch.inf)


@pytest.fixture(scope="module", params=["here", pytest.param("in processes", marks=pytest.mark.extended)])
def served(request, tmp_path_factory):
    """By a service in this process, and by one with a process for its models."""
    folder = tmp_path_factory.mktemp("networks")
    torch.manual_seed(0)
    linear = nn.Linear(3, 6)
    save_file({f"linear.{name}": each for name, each in linear.state_dict().items()}, folder / "own.safetensors")
    (folder / "own_boxes.py").write_text(OWN)
    batch, length = Dim("batch", min=1), Dim("length", max=50)
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    given = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool)
    torch.export.save(torch.export.export(Scaled(), given, dynamic_shapes=shapes), folder / "scaled.pt2")
    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    file = folder / "models.toml"
    file.write_text(
        f'[boxes]\nurl = "{folder / "own.safetensors"}"\narchitecture = "own_boxes:Boxes"\n'
        f'[t5]\nurl = "{folder / "t5"}"\nexact = "full"\n'
    )
    scaled = f"scaled={folder / 'scaled.pt2'}?architecture=torch.export&max_batch=5"
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if request.param == "here":
            patch.syspath_prepend(str(folder))
            reserved = stack.enter_context(reserve("127.0.0.1", 0))
            options = Options([scaled], Settings(), models_file=file)
            app = application(
                options, lambda each: loaded(each.url, each.name, each.options), Listening(address_of(reserved))
            )
            yield Served(stack.enter_context(plain_uvicorn_of(app)), address_of(reserved), folder, linear)
        else:
            patch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{folder}")
            words = ["--model", scaled, "--models", str(file), "--grpc-port=0"]
            service = stack.enter_context(running_service(folder / "service", None, *words))
            yield Served(service.url, service.grpc, folder, linear)


@pytest.fixture(params=["http", "grpc"])
def infer(request, served):
    """Infer by a client of Triton's, with tensors by name."""
    kind: ModuleType = {"http": http, "grpc": grpc}[request.param]
    address = served.grpc if kind is grpc else served.url.removeprefix("http://")
    with kind.InferenceServerClient(address) as client:

        def ask(model: str, outputs: Sequence[str] | None = None, **tensors: np.ndarray) -> Any:
            given = [kind.InferInput(n, list(each.shape), datatype_of(each)) for n, each in tensors.items()]
            for tensor, each in zip(given, tensors.values(), strict=True):
                tensor.set_data_from_numpy(each)
            wanted = None if outputs is None else [kind.InferRequestedOutput(name) for name in outputs]
            return client.infer(model, given, outputs=wanted)

        yield ask


def datatype_of(values: np.ndarray) -> str:
    return {"float32": "FP32", "int64": "INT64", "bool": "BOOL"}[str(values.dtype)]


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_program_has_its_own_names(infer):
    values, mask = floats(7, 4), np.zeros((7, 4), bool)
    found = infer("scaled", values=values, mask=mask)
    assert found.as_numpy("output_1").tobytes() == values.tobytes()
    expected = (torch.from_numpy(values) * 3).bfloat16().float().numpy()
    assert found.as_numpy("output_0").astype(np.float32).tobytes() == expected.tobytes()
    mask[0, 0] = True
    assert infer("scaled", values=values, mask=mask).as_numpy("output_1")[0, 0] == -np.inf


def test_sizes_that_do_not_fit_together_are_a_bad_request(infer):
    with pytest.raises(Exception, match="dimension 1 of mask has the size 5, and another tensor 4"):
        infer("scaled", values=floats(1, 4), mask=np.zeros((1, 5), bool))
    with pytest.raises(Exception, match="has the size 51; the program takes 0 to 50"):
        infer("scaled", values=floats(1, 51), mask=np.zeros((1, 51), bool))


def test_the_users_network_answers_rows_of_any_shape(served, infer):
    rows, numbers = floats(6, 3), set()
    for row in rows:
        with torch.no_grad():
            (theirs,) = served.linear(torch.from_numpy(row)[None])
        found = infer("boxes", values=row[None])
        assert found.as_numpy("scores").tobytes() == theirs.numpy().tobytes()
        assert found.as_numpy("boxes").shape == (1, int((theirs > 0).sum()))
        assert found.as_numpy("boxes").tobytes() == theirs[theirs > 0].numpy().tobytes()
        numbers.add(found.as_numpy("boxes").shape)
    assert len(numbers) > 1
    assert infer("boxes", ["scores"], values=rows).as_numpy("scores").shape == (6, 6)
    with pytest.raises(Exception, match="the output boxes differs in shape between the rows of the request"):
        infer("boxes", values=rows)


def test_a_model_of_transformers_takes_its_own_arguments(served, infer):
    given = {"input_ids": np.arange(10).reshape(2, 5), "attention_mask": np.ones((2, 5), np.int64)}
    decoded = np.arange(6).reshape(2, 3)
    found = infer("t5", **given, decoder_input_ids=decoded)
    rows = list(zip(*given.values(), decoded, strict=True))
    for number, each in enumerate(load_predictor(served.folder / "t5").predict(rows)):
        for name in ("logits", "encoder_last_hidden_state"):
            assert found.as_numpy(name)[number].tobytes() == each[name].tobytes()
    with pytest.raises(Exception, match="input_ids has numbers that are not from 0 to 19"):
        infer("t5", **{**given, "input_ids": given["input_ids"] + 15}, decoder_input_ids=decoded)


def test_metadata_say_what_each_model_takes(served):
    with grpc.InferenceServerClient(served.grpc) as client:
        found = client.get_model_metadata("scaled", as_json=True)
    assert [(each["name"], each["datatype"], each["shape"]) for each in found["inputs"]] == [
        ("values", "FP32", ["-1", "-1"]), ("mask", "BOOL", ["-1", "-1"]),
    ]  # fmt: skip
    with http.InferenceServerClient(served.url.removeprefix("http://")) as client:
        metadata, config = client.get_model_metadata("boxes"), client.get_model_config("scaled")
    assert config["max_batch_size"] == 5
    assert metadata["outputs"] == [
        {"name": "boxes", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "scores", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "json", "datatype": "BYTES", "shape": [-1]},
    ]


def posted(url: str, body: bytes, kind: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def form(data: bytes) -> bytes:
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.dat"\r\n\r\n'
    return head + data + b"\r\n--x--\r\n"


def test_a_file_is_decoded_and_the_answer_encoded_by_the_user(served):
    url, kind = f"{served.url}/predict?model=", "multipart/form-data; boundary=x"
    with torch.no_grad():
        (theirs,) = served.linear(torch.tensor([[1.0, 2.0, 3.0]]))
    expected = {"boxes": int((theirs > 0).sum()), "best": int(theirs.argmax())}
    assert posted(f"{url}boxes", form(b"1 2 3"), kind) == (200, expected)
    status, found = posted(f"{url}boxes", form(b"1 2 x"), kind)
    assert (status, "could not convert string to float" in found["detail"]) == (400, True)
    status, found = posted(f"{url}scaled", form(b"1"), kind)
    assert (status, found["detail"]) == (
        400,
        "a.dat cannot be read: the model takes tensors, and has no function decode",
    )


def test_a_network_does_not_generate_texts(served):
    url = f"{served.url}/v2/models/scaled/generate"
    status, found = posted(url, b'{"text_input": "a"}', "application/json")
    assert status == 400, found


def test_what_json_cannot_hold_is_refused_there(served):
    def asked(mask: list[bool]) -> tuple[int, Any]:
        inputs = [
            {"name": "values", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]},
            {"name": "mask", "shape": [1, 2], "datatype": "BOOL", "data": mask},
        ]
        url = f"{served.url}/v2/models/scaled/infer"
        return posted(url, json.dumps({"inputs": inputs}).encode(), "application/json")

    status, found = asked([True, False])
    assert (status, found["error"]) == (
        400,
        "the answer has numbers that are NaN or infinite, which JSON does not have; ask for it as binary data",
    )
    status, found = asked([False, False])
    assert status == 200
    assert [each["data"] for each in found["outputs"]] == [[3.0, 6.0], [1.0, 2.0]]


def test_contents_have_no_small_floats(served):
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2
    request = grpc.service_pb2.ModelInferRequest(model_name="scaled")
    for name, datatype in (("values", "FP32"), ("mask", "BOOL")):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 2])
    request.inputs[0].contents.fp32_contents.extend([1, 2])
    request.inputs[1].contents.bool_contents.extend([False, False])
    with grpc.InferenceServerClient(served.grpc) as client:
        stub = client._client_stub
        with pytest.raises(Exception, match="the output output_0 is of BF16, which has no contents"):
            stub.ModelInfer(request)
        request.outputs.add(name="output_1")
        assert list(stub.ModelInfer(request).outputs[0].contents.fp32_contents) == [1.0, 2.0]
