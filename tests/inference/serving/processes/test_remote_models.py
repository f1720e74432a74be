"""Models in a process of their own answer as those in this one, and the process ends with whoever started it."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from ckpt_tools.errors import CkptError, FormatError, SourceNotFoundError
from inference.common.name_options import Reading
from inference.models.predictor import load_predictor
from inference.serving.processes.model_messages import Decode
from inference.serving.processes.remote_models import BrokenModelError, RemoteModels
from tests.inference.conftest import running_service
from training.data.datasets import LabelledImages

Ends = queue.Queue[CkptError]


@pytest.fixture(scope="module")
def models() -> Iterator[RemoteModels]:
    ends: Ends = queue.Queue()
    with RemoteModels.running(None, Reading(), "cpu", 1, ends.put) as models:
        yield models
    assert not psutil.pid_exists(models.pid)
    assert ends.empty()


def png(size: int) -> bytes:
    file = BytesIO()
    Image.linear_gradient("L").resize((size, size)).save(file, "png")
    return file.getvalue()


def test_answers_have_the_bits_of_a_model_in_this_process(
    models: RemoteModels, forms: Path, digits: LabelledImages
) -> None:
    here, there = load_predictor(forms / "model.pt"), models.load(str(forms / "model.safetensors"), "m")
    for inputs in (list(digits.pixels[:35]), list(digits.pixels[:1]), []):
        assert there.predict(inputs) == here.predict(inputs)
    assert (there.name, there.identity.digest) == ("m", here.identity.digest)
    assert (there.inputs, there.outputs, there.labels) == (here.inputs, here.outputs, here.labels)
    assert (there.max_batch, there.is_exact) == (here.max_batch, here.is_exact)
    data = png(100)
    assert torch.equal(there.decode(data, "image"), here.decode(data, "image"))


def test_errors_are_those_of_a_model_in_this_process(models: RemoteModels, forms: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="nothing"):
        models.load(str(tmp_path / "nothing"), "m")
    (tmp_path / "text.safetensors").write_text("no model")
    with pytest.raises(FormatError, match=r"text\.safetensors"):
        models.load(str(tmp_path / "text.safetensors"), "m")
    predictor = models.load(str(forms / "model.pt"), "m")
    with pytest.raises(FormatError, match="the image is not an image file"):
        predictor.decode(b"no image", "the image")
    with pytest.raises(FormatError, match="input 0 is uint8"):
        predictor.predict([torch.zeros(3, 3, dtype=torch.uint8)])


def is_gone(models: RemoteModels, number: int) -> bool:
    try:
        models.ask(Decode(number, png(28), "image"))
    except BrokenModelError as error:
        return "KeyError" in str(error)
    return False


def test_a_model_goes_when_nobody_refers_to_it(models: RemoteModels, forms: Path) -> None:
    first, second = (models.load(str(forms / "model.pt"), name) for name in ("first", "second"))
    task = first.task
    del first
    assert task.decode(png(28), "image").shape == (28, 28)
    number = task.number  # type: ignore[attr-defined]
    del task
    gc.collect()
    # Its thread sees within milliseconds that the connection is closed.
    assert any(is_gone(models, number) for _ in range(1000))
    assert second.decode(png(28), "image").shape == (28, 28)


def test_an_end_of_the_process_is_told(forms: Path, digits: LabelledImages) -> None:
    ends: Ends = queue.Queue()
    with RemoteModels.running(None, Reading(), "cpu", 1, ends.put) as models:
        predictor = models.load(str(forms / "model.pt"), "m")
        psutil.Process(models.pid).kill()
        assert str(ends.get(timeout=30)) == "the process of the models was ended by SIGKILL"
        with pytest.raises(CkptError, match="the process of the models was ended by SIGKILL"):
            predictor.predict(list(digits.pixels[:1]))
        with pytest.raises(CkptError, match="the process of the models was ended by SIGKILL"):
            models.load(str(forms / "model.pt"), "m")


STARTER = """
import sys, time
from inference.common.name_options import Reading
from inference.serving.processes.remote_models import RemoteModels
with RemoteModels.running(None, Reading(), "cpu", 1, print) as models:
    models.load(sys.argv[1], "m")
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


def test_a_service_ends_with_the_process_of_its_models(forms: Path, tmp_path: Path) -> None:
    with running_service(tmp_path, forms / "model.pt", "--drain=600") as service:
        (models,) = models_of(psutil.Process(service.process.pid))
        models.kill()
        assert service.process.wait(60) == 1
        assert service.log.read_text() == "error: the process of the models was ended by SIGKILL\n"
