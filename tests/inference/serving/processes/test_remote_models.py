"""Models in a process of their own answer as those in this one, and the process ends with whoever started it."""

from __future__ import annotations

import gc
import json
import queue
import time
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

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
from tests.inference.conftest import models_of, running_service


@dataclass(frozen=True)
class Running:
    """Models, and what was told of the ends and the starts of their process."""

    models: RemoteModels
    ends: queue.Queue[str]
    starts: queue.Queue[int]


@pytest.fixture(scope="module")
def running():
    ends, starts = queue.Queue[str](), queue.Queue[int]()
    with RemoteModels.running(1, ends.put, lambda: starts.put(remote.pid)) as remote:
        yield Running(remote, ends, starts)
    assert not psutil.pid_exists(remote.pid)
    assert ends.empty()


@pytest.fixture
def models(running):
    return running.models


def png(size: int) -> bytes:
    file = BytesIO()
    Image.linear_gradient("L").resize((size, size)).save(file, "png")
    return file.getvalue()


@pytest.mark.extended
def test_answers_have_the_bits_of_a_model_in_this_process(models, forms, digits):
    here, there = load_predictor(forms / "model.pt"), models.load(Source("m", str(forms / "model.safetensors")))
    for inputs in (list(digits.pixels[:35]), list(digits.pixels[:1]), []):
        assert there.predict(inputs) == here.predict(inputs)
    assert (there.name, there.identity.digest) == ("m", here.identity.digest)
    assert (there.inputs, there.outputs, there.labels) == (here.inputs, here.outputs, here.labels)
    assert (there.max_batch, there.is_exact) == (here.max_batch, here.is_exact)
    data = png(100)
    assert np.array_equal(there.decode(data, "image"), here.decode(data, "image"))


@pytest.mark.extended
def test_errors_are_those_of_a_model_in_this_process(models, forms, tmp_path):
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


@pytest.mark.extended
def test_a_model_goes_when_nobody_refers_to_it(models, forms):
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


@pytest.mark.extended
def test_the_process_is_started_again(running, forms, digits):
    source, models = Source("m", str(forms / "model.pt")), running.models
    before, predictor = models.pid, models.load(source)
    psutil.Process(before).kill()
    assert running.ends.get(timeout=30) == "the process of the models was ended by SIGKILL"
    with pytest.raises(ModelsEndedError, match="the process of the models was ended by SIGKILL"):
        predictor.predict(list(digits.pixels[:1]))
    assert running.starts.get(timeout=30) != before
    images = list(digits.pixels[:3])
    assert models.load(source).predict(images) == load_predictor(forms / "model.pt").predict(images)


@pytest.mark.parametrize("num_kills", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_service_answers_503_until_its_models_are_loaded_again(num_kills, forms, text_models, tmp_path):
    """After an end of their process in the middle of a stream, and one while nothing is asked. With the service ends
    the process."""
    places = f"--model=m={forms / 'model.pt'}", f"--model=ours={text_models / 'ours' / 'model.pt'}?exact=full"
    with running_service(tmp_path, None, *places) as service:
        files, predict = {"image": ("a.png", png(28))}, f"{service.url}/predict?model=m"
        before = service.http.post(predict, files=files).json()
        url, asked = f"{service.url}/v2/models/ours/generate_stream", {"text_input": "a", "max_tokens": 1_000_000}
        for is_asked in (True, False)[:num_kills]:
            (models,) = models_of(psutil.Process(service.process.pid))
            if is_asked:
                with service.http.stream("POST", url, json=asked, timeout=120) as answer:
                    lines = answer.iter_lines()
                    assert "text_output" in next(lines)
                    models.kill()
                    *_, last = filter(None, lines)
                told = {"error": "the process of the models was ended by SIGKILL; it is started again"}
                assert json.loads(last.removeprefix("data: ")) == told
            else:
                models.kill()
            models.wait(30)
            statuses: list[int] = []
            ready: list[int] = []
            end = time.monotonic() + 60
            while 200 not in statuses:
                assert time.monotonic() < end
                answer = service.http.post(predict, files=files)
                statuses.append(answer.status_code)
                time.sleep(0.05)
                if answer.status_code == 503:
                    assert answer.headers["Retry-After"] == "1"
                    ready.append(service.http.get(f"{service.url}/v2/health/ready").status_code)
            assert (set(statuses), 503 in ready) == ({503, 200}, True)
            assert answer.json() == before
        entries = service.http.post(f"{service.url}/v2/repository/index").json()
        assert (entries[0]["version"], entries[0]["state"], entries[0]["reason"]) == (str(num_kills + 1), "READY", "")
        in_log = "the process of the models was ended by SIGKILL; it is started again\n"
        assert service.log.read_text() == in_log * num_kills
        (models,) = models_of(psutil.Process(service.process.pid))
        service.process.kill()
        with suppress(psutil.NoSuchProcess):
            models.wait(30)


def test_the_service_itself_does_not_load_torch(service):
    files = {"image": ("a.png", png(28))}
    assert service.http.post(f"{service.url}/predict?model=m", files=files).status_code == 200
    assert "libtorch" not in Path(f"/proc/{service.process.pid}/maps").read_text()
    (models,) = models_of(psutil.Process(service.process.pid))
    assert "libtorch" in Path(f"/proc/{models.pid}/maps").read_text()
