"""One model with seeded weights, in every form a consolidated file has; and held-out digits as image files."""

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from inference.models.predictor import load_predictor
from training.data.datasets import load_dataset
from training.models.image_models import build_model
from training.models.zoo import build_own_model

# As docs/inference.md says: without it such a processor rounds the last rows of a batch otherwise than the others.
if torch.backends.cpu.get_cpu_capability() != "AVX512":
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

FORMS = ("model.safetensors", "single", "sharded", "model.pt")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small products gain nothing from more threads, and lose much where the cores are shared with other tests."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def weights():
    """Weights that tell digits apart: torchvision starts the head at zero, which would make all classes equal."""
    torch.manual_seed(1)
    model = build_model()
    torch.nn.init.normal_(model.heads[0].weight)
    return model.state_dict()


@pytest.fixture(scope="session")
def forms(weights, tmp_path_factory):
    """A folder with the same model as each of ``FORMS``."""
    folder = tmp_path_factory.mktemp("forms")
    save_file(weights, folder / "model.safetensors")
    torch.save(weights, folder / "model.pt")
    (folder / "config.json").write_text('{"architecture": "ours"}')
    (folder / "single").mkdir()
    save_file(weights, folder / "single" / "model.safetensors")
    write_sharded(folder / "sharded", weights)
    return folder


def write_sharded(folder: Path, weights: dict[str, Tensor]) -> None:
    """Two shards and their index, in the Hugging Face layout."""
    folder.mkdir()
    names = sorted(weights)
    shards = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="session")
def digits():
    return load_dataset("digits", "held-out", None)


@pytest.fixture(scope="session")
def image_folder(digits, tmp_path_factory):
    """The first 40 held-out digits as ``000.png`` on, and a file that is no image by its name."""
    folder = tmp_path_factory.mktemp("images")
    for number, pixels in enumerate(digits.pixels[:40]):
        Image.fromarray(pixels.numpy()).save(folder / f"{number:03d}.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture(scope="session")
def many_images(image_folder, tmp_path_factory):
    """5,000 names of the 40 images: a run over them takes some seconds."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(5000):
        os.link(image_folder / f"{number % 40:03d}.png", folder / f"{number:04d}.png")
    return folder


@dataclass(frozen=True, slots=True)
class Service:
    """A service that was started as a process of its own; ``log`` is its stderr. ``grpc`` is the address of that.
    ``http`` keeps its connections, and is for services without TLS."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    temporary: Path
    http: httpx.Client
    grpc: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""httpx would read the certificates of all authorities for each client, which takes longer than a request."""

SERVE = ("inference.serving",)
CKPT_TOOLS_SERVE = ("ckpt_tools", "serve")


@contextmanager
def running_service(
    folder: Path, model: Path | None, *args: str, module: Sequence[str] = SERVE, scheme: str = "http"
) -> Iterator[Service]:
    """``python -m inference.serving`` on a port that the system chose, with a folder of its own for temporary files."""
    temporary, log = folder / "temporary", folder / "log"
    temporary.mkdir(parents=True)
    command = [sys.executable, "-m", *module, *([] if model is None else [str(model)]), "--port", "0", *args]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stderr=stderr, stdout=subprocess.PIPE, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line.startswith(f"serving on {scheme}://"), log.read_text()
            url = line.removeprefix("serving on ").strip()
            second = process.stdout.readline().decode() if any("--grpc-port" in arg for arg in args) else ""
            with httpx.Client(base_url=url, timeout=300, verify=NO_TLS) as http:
                yield Service(process, url, log, temporary, http, second.removeprefix("serving gRPC on ").strip())
        finally:
            children = models_of(psutil.Process(process.pid)) if process.poll() is None else []
            process.kill()
            assert not psutil.wait_procs(children, 30)[1], "the process of the models lives longer than the service"
    assert "Traceback" not in log.read_text()


def models_of(process: psutil.Process) -> list[psutil.Process]:
    """The process of the models of a service."""
    module = ".serving.processes.model_process"
    children = process.children(recursive=True)
    return [each for each in children if any(word.endswith(module) for word in each.cmdline())]


@pytest.fixture(scope="session")
def small_models(tmp_path_factory):
    """A folder with ``labels`` of texts, ``vit`` of images, and two models that generate: ``writer``,
    which chats, and ``ours``."""
    from tests.inference import tiny_models  # this imports transformers

    folder = tmp_path_factory.mktemp("models")
    tiny_models.save_text_model(folder / "labels")
    tiny_models.save_image_model(folder / "vit")
    tiny_models.save_writer(folder / "writer", chat_template=tiny_models.CHAT)
    (folder / "ours").mkdir()
    save_our_texts(folder / "ours" / "model.pt")
    (folder / "ours" / "config.json").write_text('{"architecture": "ours:lm"}')
    return folder


def save_our_texts(file: Path, name: str = "lm") -> None:
    """Our language model, with embeddings large enough that texts go on in different ways."""
    torch.manual_seed(0)
    model = build_own_model(name)
    torch.nn.init.normal_(model.embed.weight, std=1.0)  # type: ignore[arg-type, union-attr]
    torch.save(model.state_dict(), file)


@pytest.fixture(scope="session")
def service(forms, small_models, tmp_path_factory):
    """One for all files that only ask. Tests load and unload ``spare`` and ``two``; the versions of the others stay."""
    places: dict[str, list[object]] = {
        "m": [forms / "model.safetensors"],
        "two": [forms / "model.pt", forms / "sharded"],
        "spare": [forms / "model.pt"],
        **{name: [small_models / name] for name in ("vit", "labels")},
    }
    folder = tmp_path_factory.mktemp("service")
    (folder / "models.toml").write_text(
        f"""
        embed = {{ url = "{small_models / "labels"}", embeddings = true }}
        writer = {{ url = "{small_models / "writer"}", max_new_tokens = 16 }}
        ours = {{ url = "{small_models / "ours" / "model.pt"}", max_new_tokens = 16, exact = "full" }}
        """
    )
    options = [f"--model={name}={place}" for name, found in places.items() for place in found]
    options += [f"--models={folder / 'models.toml'}"]
    options += ["--grpc-port=0", "--model-control=explicit", "--threads=1", "--timeout=300"]
    with running_service(folder, None, *options) as service:
        assert service.url == f"http://127.0.0.1:{service.port}"
        yield service


@pytest.fixture(scope="session")
def client(service):
    return service.http


@pytest.fixture(scope="session")
def predictor(forms):
    """The model in this process."""
    return load_predictor(forms / "model.pt")
