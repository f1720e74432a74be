"""Models in a process of their own answer as those in this one, and the process ends with whoever started it."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from ckpt_tools.errors import FormatError, SourceNotFoundError
from inference.models.predictor import load_predictor
from inference.serving.processes.model_messages import BatchSizes
from inference.serving.processes.remote_models import BrokenModelError, RemoteModels
from inference.serving.repository import ModelsEndedError, Source
from tests.inference.conftest import running_service
from training.data.datasets import Samples

Ends = queue.Queue[str]


@pytest.fixture(scope="module")
def models() -> Iterator[RemoteModels]:
    ends: Ends = queue.Queue()
    with RemoteModels.running(1, ends.put, lambda: None) as models:
        yield models
    assert not psutil.pid_exists(models.pid)
    assert ends.empty()


def png(size: int) -> bytes:
    file = BytesIO()
    Image.linear_gradient("L").resize((size, size)).save(file, "png")
    return file.getvalue()


def test_answers_have_the_bits_of_a_model_in_this_process(models: RemoteModels, forms: Path, digits: Samples) -> None:
    here, there = load_predictor(forms / "model.pt"), models.load(Source("m", str(forms / "model.safetensors")))
    for inputs in (list(digits.pixels[:35]), list(digits.pixels[:1]), []):
        assert there.predict(inputs) == here.predict(inputs)
    assert (there.name, there.identity.digest) == ("m", here.identity.digest)
    assert (there.inputs, there.outputs, there.labels) == (here.inputs, here.outputs, here.labels)
    assert (there.max_batch, there.is_exact) == (here.max_batch, here.is_exact)
    data = png(100)
    assert np.array_equal(there.decode(data, "image"), here.decode(data, "image"))


def test_errors_are_those_of_a_model_in_this_process(models: RemoteModels, forms: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="nothing"):
        models.load(Source("m", str(tmp_path / "nothing")))
    (tmp_path / "text.safetensors").write_text("no model")
    with pytest.raises(FormatError, match=r"text\.safetensors"):
        models.load(Source("m", str(tmp_path / "text.safetensors")))
    predictor = models.load(Source("m", str(forms / "model.pt")))
    with pytest.raises(FormatError, match="the image is not an image file"):
        predictor.decode(b"no image", "the image")
    with pytest.raises(FormatError, match="input 0 is uint8"):
        predictor.predict([torch.zeros(3, 3, dtype=torch.uint8)])


def is_gone(models: RemoteModels, number: int) -> bool:
    try:
        models._process.ask(BatchSizes(number))
    except BrokenModelError as error:
        return "KeyError" in str(error)
    return False


def test_a_model_goes_when_nobody_refers_to_it(models: RemoteModels, forms: Path) -> None:
    first, second = (models.load(Source(name, str(forms / "model.pt"))) for name in ("first", "second"))
    task = first.task
    del first
    assert task.decode(png(28), "image").shape == (28, 28)
    number = task.number  # type: ignore[attr-defined]
    del task
    gc.collect()
    # Its thread sees within milliseconds that the connection is closed.
    assert any(is_gone(models, number) for _ in range(1000))
    assert second.decode(png(28), "image").shape == (28, 28)


def test_the_process_is_started_again(forms: Path, digits: Samples) -> None:
    ends: Ends = queue.Queue()
    starts: queue.Queue[int] = queue.Queue()
    with RemoteModels.running(1, ends.put, lambda: starts.put(models.pid)) as models:
        source, before = Source("m", str(forms / "model.pt")), models.pid
        predictor = models.load(source)
        for _ in range(2):
            psutil.Process(models.pid).kill()
            assert ends.get(timeout=30) == "the process of the models was ended by SIGKILL"
            with pytest.raises(ModelsEndedError, match="the process of the models was ended by SIGKILL"):
                predictor.predict(list(digits.pixels[:1]))
            now = starts.get(timeout=30)
            assert now != before
            assert models.load(source).predict(list(digits.pixels[:3])) == load_predictor(forms / "model.pt").predict(
                list(digits.pixels[:3])
            )
    assert ends.empty()


STARTER = """
import sys, time
from inference.serving.processes.remote_models import RemoteModels
from inference.serving.repository import Source
with RemoteModels.running(1, print, print) as models:
    models.load(Source("m", sys.argv[1]))
    print(models.pid, flush=True)
    time.sleep(600)
"""


def test_it_does_not_outlive_who_started_it(forms: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(forms / "model.pt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        process.kill()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(number).wait(30)


def models_of(process: psutil.Process) -> list[psutil.Process]:
    return [
        each
        for each in process.children(recursive=True)
        if "inference.serving.processes.model_process" in each.cmdline()
    ]


def test_a_service_answers_503_until_its_models_are_loaded_again(forms: Path, tmp_path: Path) -> None:
    with running_service(tmp_path, forms / "model.pt") as service:
        files = {"image": ("a.png", png(28))}
        before = httpx.post(f"{service.url}/predict", files=files).json()
        for _ in range(2):
            (models,) = models_of(psutil.Process(service.process.pid))
            models.kill()
            models.wait(30)
            statuses: list[int] = []
            ready: list[int] = []
            end = time.monotonic() + 60
            while 200 not in statuses:
                assert time.monotonic() < end
                answer = httpx.post(f"{service.url}/predict", files=files)
                statuses.append(answer.status_code)
                if answer.status_code == 503:
                    assert answer.headers["Retry-After"] == "1"
                    ready.append(httpx.get(f"{service.url}/v2/health/ready").status_code)
            assert (set(statuses), 503 in ready) == ({503, 200}, True)
            assert answer.json() == before
        (entry,) = httpx.post(f"{service.url}/v2/repository/index").json()
        assert (entry["version"], entry["state"], entry["reason"]) == ("3", "READY", "")
        assert service.log.read_text() == "the process of the models was ended by SIGKILL; it is started again\n" * 2


def test_the_service_itself_does_not_load_torch(forms: Path, tmp_path: Path) -> None:
    with running_service(tmp_path, forms / "model.pt", "--grpc-port=0") as service:
        assert httpx.post(f"{service.url}/predict", files={"image": ("a.png", png(28))}).status_code == 200
        assert "libtorch" not in Path(f"/proc/{service.process.pid}/maps").read_text()
        (models,) = models_of(psutil.Process(service.process.pid))
        assert "libtorch" in Path(f"/proc/{models.pid}/maps").read_text()
