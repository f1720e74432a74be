"""Models in a process of their own answer as those in this one, and networks of any task are served from both to
Triton's own clients over HTTP and gRPC; judged by the networks themselves."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim
from tritonclient import grpc, http

from inference.models.predictor import load_predictor, load_with_options
from inference.serving.__main__ import ServeOptions, load_app
from inference.serving.processes.remote_models import BrokenModelError, RemoteModels
from inference.serving.repository import NamedSource
from inference.serving.settings import GrpcSettings, ServiceSettings, format_address, reserve_port
from tests.inference.conftest import NO_TLS
from tests.inference.serving.helpers import plain_uvicorn_of


@pytest.fixture(scope="module")
def models():
    ends = list[str]()
    with RemoteModels.start(1, ends.append) as remote:
        yield remote
    assert not psutil.pid_exists(remote.pid)
    assert ends == []


# --- networks, from this process and from their own

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
    """A client of HTTP and the address of gRPC."""

    client: httpx.Client
    grpc: str
    folder: Path
    linear: nn.Linear

    @property
    def address(self) -> str:
        return self.client.base_url.netloc.decode()

    def post(self, path: str, **given: Any) -> tuple[int, Any]:
        answer = self.client.post(path, **given)
        return answer.status_code, answer.json()


class Scaled(nn.Module):
    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (values * 3).bfloat16(), values.masked_fill(mask, -torch.inf)


@pytest.fixture(scope="module", params=["here", pytest.param("in a process", marks=pytest.mark.extended)])
def served(request, tmp_path_factory):
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
        f'[boxes]\nurl = "{folder / "own.safetensors"}"\narchitecture = "{folder}/own_boxes.py:Boxes"\n'
        f'[t5]\nurl = "{folder / "t5"}"\nexact = "full"\n'
        f'[scaled]\nurl = "{folder / "scaled.pt2"}"\narchitecture = "torch.export"\nmax_batch = 5\n'
    )
    options = ServeOptions([], ServiceSettings(), file)

    def load_here(source: NamedSource) -> Any:
        return load_with_options(source.url, source.name, source.options)

    load: Callable[[NamedSource], Any] = load_here
    if request.param != "here":
        load = request.getfixturevalue("models").load
    with ExitStack() as stack:
        reserved = stack.enter_context(reserve_port("127.0.0.1", 0))
        app = load_app(options, options.make_repository(load), GrpcSettings(format_address(reserved)))
        url = stack.enter_context(plain_uvicorn_of(app))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60, verify=NO_TLS))
        yield Served(client, format_address(reserved), folder, linear)


@pytest.fixture(params=["http", "grpc"])
def infer(request, served):
    """Infer by a client of Triton's, with tensors by name."""
    kind: ModuleType = {"http": http, "grpc": grpc}[request.param]
    address = served.grpc if kind is grpc else served.address
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


def test_a_file_is_decoded_and_the_answer_encoded_by_the_user(served):
    with torch.no_grad():
        (theirs,) = served.linear(torch.tensor([[1.0, 2.0, 3.0]]))
    expected = {"boxes": int((theirs > 0).sum()), "best": int(theirs.argmax())}
    boxes, files = "/predict?model=boxes", {"image": ("a.dat", b"1 2 3")}
    assert served.post(boxes, files=files) == (200, expected)
    status, found = served.post(boxes, files={"image": ("a.dat", b"1 2 x")})
    assert (status, "could not convert string to float" in found["detail"]) == (400, True)
    told = "a.dat cannot be read: the model takes tensors, and has no function decode"
    assert served.post("/predict?model=scaled", files=files) == (400, {"detail": told})


def test_what_json_cannot_hold_is_refused_there(served):
    def asked(mask: list[bool]) -> tuple[int, Any]:
        inputs = [
            {"name": "values", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]},
            {"name": "mask", "shape": [1, 2], "datatype": "BOOL", "data": mask},
        ]
        return served.post("/v2/models/scaled/infer", json={"inputs": inputs})

    told = "the answer has numbers that are NaN or infinite, which JSON does not have; ask for it as binary data"
    assert asked([True, False]) == (400, {"error": told})
    status, found = asked([False, False])
    assert (status, [each["data"] for each in found["outputs"]]) == (200, [[3.0, 6.0], [1.0, 2.0]])


# --- a process of its own


def png(size: int) -> bytes:
    file = BytesIO()
    Image.linear_gradient("L").resize((size, size)).save(file, "png")
    return file.getvalue()


def is_gone(models: RemoteModels, number: int) -> bool:
    try:
        models._process.call(number, "batch_sizes")
    except BrokenModelError as error:
        return "KeyError" in str(error)
    return False


@pytest.mark.extended
def test_a_model_goes_when_nobody_refers_to_it(models, forms):
    first, second = (models.load(NamedSource(name, str(forms / "model.pt"))) for name in ("first", "second"))
    task = first.task
    del first
    assert task.decode(png(28), "image").shape == (28, 28)
    number = task.number  # type: ignore[attr-defined]
    del task
    gc.collect()
    # Its thread sees within milliseconds that the connection is closed.
    assert any(is_gone(models, number) for _ in range(1000))
    assert second.decode(png(28), "image").shape == (28, 28)
