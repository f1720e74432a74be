"""What tests of the service share: models that answer when they may, servers in this process, calls over gRPC."""

import asyncio
import datetime
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import uvicorn
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import FastAPI

from ckpt_tools.errors import FormatError
from inference.models.predictor import Predictor, load_predictor
from inference.models.results import Columns, ModelInput
from inference.models.training_models import GreyImageClassifier
from inference.serving.__main__ import main as serve_command
from inference.serving.grpc.requests import MESSAGES, METHODS, SERVICE
from inference.serving.grpc.server import serve_grpc
from inference.serving.repository import ModelRepository, NamedSource
from inference.serving.service import Service as Answers
from inference.serving.settings import GrpcSettings, ServiceSettings, format_address, reserve_port

# --- models


@dataclass(frozen=True, eq=False)
class Stamped(GreyImageClassifier):
    """Takes what our own model takes, and answers when it may, with the number of the load that it came from."""

    stamp: int = 0
    may_answer: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        self.has_begun.set()
        self.may_answer.wait(60)
        stamps = np.full(len(inputs), self.stamp)
        return {"label": stamps, "probabilities": stamps[:, None].astype(np.float32)}


@dataclass
class Loader:
    """Counts the loads, and gives a model that says which load it came from."""

    template: Predictor
    loads: int = 0
    fails: bool = False
    may_answer: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)

    def __call__(self, source: NamedSource) -> Predictor:
        if self.fails:
            raise FormatError(f"{source.url} is damaged")
        self.loads += 1
        assert isinstance(self.template.task, GreyImageClassifier)
        task = Stamped(self.template.task.model, stamp=self.loads, may_answer=self.may_answer, has_begun=self.has_begun)
        return replace(self.template, name=source.name, task=task)


def load(source: NamedSource) -> Predictor:
    return load_predictor(source.url, name=source.name)


def repository_of(place: object) -> ModelRepository:
    """One model ``m``, loaded in this process."""
    repository = ModelRepository([NamedSource("m", str(place))], load)
    repository.load_all()
    return repository


# --- servers


def run_serve(*args: object) -> Result:
    """A start that is refused, in this process."""
    return CliRunner().invoke(serve_command, list(map(str, args)))


@contextmanager
def plain_uvicorn_of(app: FastAPI, **options: Any) -> Iterator[str]:
    """The application as uvicorn serves it by itself, in a thread of this process; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def listened(repository: ModelRepository, settings: ServiceSettings) -> Iterator[str]:
    """gRPC alone, in a thread of this process; its address."""

    async def run(address: str, started: asyncio.Event, ending: asyncio.Event) -> None:
        async with serve_grpc(Answers(repository, settings), GrpcSettings(address)):
            started.set()
            await ending.wait()

    loop, started, ending = asyncio.new_event_loop(), asyncio.Event(), asyncio.Event()
    with reserve_port("127.0.0.1", 0) as reserved, ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop.run_until_complete, run(format_address(reserved), started, ending))
        wait_until(started.is_set)
        try:
            yield format_address(reserved)
        finally:
            loop.call_soon_threadsafe(ending.set)
            running.result()
            loop.close()


@contextmanager
def served(repository: ModelRepository, settings: ServiceSettings) -> Iterator[grpc.Channel]:
    with listened(repository, settings) as address, grpc.insecure_channel(address) as channel:
        yield channel


def wait_until(holds: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the other side closes: head and body of an answer are packets of their own."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def write_certificate(folder: Path) -> Path:
    """``key.pem``, and ``cert.pem``: a certificate of localhost that it signs itself."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=localhost")
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(private)
    return folder


# --- requests


def call(channel: grpc.Channel, method: str, message: Any = None, **options: Any) -> Any:
    """The answer. ``message`` is one, the fields of one, or bytes that are none."""
    kind = METHODS[method]
    if isinstance(message, dict):
        message = kind.request(**message)
    data = message if isinstance(message, bytes) else (message or kind.request()).SerializeToString()
    options.setdefault("timeout", 60)
    return kind.response.FromString(channel.unary_unary(f"/{SERVICE}/{method}")(data, **options))


def refusal(channel: grpc.Channel, method: str, message: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, method, message, **options)
    return caught.value.code(), caught.value.details()


def infer_message(array: np.ndarray[Any, Any], *, is_raw: bool = True, model: str = "m", **changes: Any) -> Any:
    """An image as a message of gRPC."""
    request = MESSAGES["ModelInferRequest"](model_name=model)
    tensor = request.inputs.add(**{"name": "image", "datatype": "UINT8", "shape": array.shape, **changes})
    if is_raw:
        request.raw_input_contents.append(array.tobytes())
    else:
        tensor.contents.uint_contents.extend(array.reshape(-1).tolist())
    return request


def image_input(array: np.ndarray[Any, Any], **changes: object) -> dict[str, Any]:
    """An image as an input in JSON; changes that are None leave a field out."""
    made = {"name": "image", "shape": list(array.shape), "datatype": "UINT8", "data": array.reshape(-1).tolist()}
    return {key: value for key, value in {**made, **changes}.items() if value is not None}


def image_request(array: np.ndarray[Any, Any], **changes: object) -> dict[str, Any]:
    return {"inputs": [image_input(array, **changes)]}
