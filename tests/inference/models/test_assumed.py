"""A checkpoint without config.json: known by its run, described by --config, or assumed aloud."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn

import ckpt_tools
from ckpt_tools.errors import FormatError, SourceNotFoundError, UsageError
from inference.batch.__main__ import main as predict
from inference.models.architectures import architecture_of
from inference.models.predictor import load_predictor
from inference.serving.__main__ import Options
from inference.serving.settings import Settings
from tests.inference.tiny_models import save_text_model
from training.models.image_models import build_model

SAID = "nothing says what the model is, so it is taken for ours, the built-in Vision Transformer"


def saved(path: Path, weights: dict[str, Any], *, model: str | None = None, model_arg: str | None = None) -> Path:
    """A DCP with the settings of a run, as training saves them, or without."""
    settings = {} if model is None else {"settings": {"model": model, "model_arg": model_arg}}
    torch.save({"model": weights, **settings}, path.with_suffix(".pt"))
    ckpt_tools.convert(path.with_suffix(".pt"), path, to="dcp", state="all")
    path.with_suffix(".pt").unlink()
    return path


@pytest.fixture
def images(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("L", (28, 28), 99).save(tmp_path / "images" / "one.png")
    return tmp_path / "images"


def run(model: Path, images: Path, *more: str) -> Any:
    words = ["--model", str(model), "--input", str(images), "--output", str(model.with_name("rows.jsonl")), *more]
    return CliRunner().invoke(predict, words)


def test_what_is_assumed_is_printed(images, tmp_path, capsys):
    torch.save(build_model().state_dict(), tmp_path / "vit.pt")
    done = run(tmp_path / "vit.pt", images)
    assert done.exit_code == 0 and SAID in done.stderr and "--architecture" in done.stderr, done.output
    assert SAID not in run(tmp_path / "vit.pt", images, "--overwrite", "--architecture", "ours").stderr
    Options([str(tmp_path / "vit.pt")], Settings()).check()
    assert SAID in capsys.readouterr().err


def test_a_mismatch_names_the_way_out(images, tmp_path):
    torch.save(nn.Conv2d(3, 8, 3).state_dict(), tmp_path / "conv.pt")
    done = run(tmp_path / "conv.pt", images)
    assert done.exit_code == 4
    assert "name its architecture with --architecture (write ours, ours:NAME, hf, torchvision:NAME" in done.stderr
    with pytest.raises(FormatError) as named:
        load_predictor(tmp_path / "conv.pt", architecture="ours")
    assert "nothing says" not in str(named.value)


def test_a_run_of_a_built_in_model_is_known_by_its_settings(tmp_path):
    lm = saved(tmp_path / "lm", {"w": torch.zeros(2)}, model="lm", model_arg="layers=2; width=64")
    found = architecture_of(None, None, lm, None)
    assert (found.library, found.name, found.arguments) == ("ours", "lm", {"layers": 2, "width": 64})
    assert not found.is_assumed
    vit = saved(tmp_path / "vit", build_model().state_dict(), model="vit")
    assert load_predictor(vit).inputs[0].name == "image"


@pytest.mark.parametrize(
    ("model", "model_arg", "advice"),
    [
        ("unet:net", None, "--architecture unet:net, or with its file in the place of the module: unet.py:net"),
        ("unet:net", "width=8; depth=2", "--architecture unet:net?width=8&depth=2, or"),
        ("hf:/models/llama", None, "give --config /models/llama"),
    ],
)
def test_a_run_of_code_of_the_users_says_what_to_pass(model, model_arg, advice, images, tmp_path):
    place = saved(tmp_path / "run", {"w": torch.zeros(2)}, model=model, model_arg=model_arg)
    done = run(place, images)
    assert done.exit_code == 2 and model in done.stderr and advice in done.stderr
    with pytest.raises(UsageError, match="of a run with"):
        load_predictor(place)


def test_config_describes_a_checkpoint_that_has_none(tmp_path):
    hub = save_text_model(tmp_path / "hub")
    ckpt_tools.convert(hub, tmp_path / "dcp", to="dcp", world_size=2)
    for path in tmp_path.joinpath("dcp").glob("*.json"):
        path.unlink()
    (tmp_path / "texts.txt").write_text("the film was very good\n")
    expected = [each.probabilities for each in _texts(load_predictor(hub))]
    found = [each.probabilities for each in _texts(load_predictor(tmp_path / "dcp", config=hub))]
    assert np.array_equal(np.array(found), np.array(expected))
    done = run(tmp_path / "dcp", tmp_path / "texts.txt", "--config", str(hub))
    assert done.exit_code == 0, done.stderr
    [row] = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert json.loads(row)["label"] in ("NEGATIVE", "NEUTRAL", "POSITIVE", 0, 1, 2)
    shutil.rmtree(hub)
    with pytest.raises(SourceNotFoundError, match=r"is not a folder with config\.json"):
        load_predictor(tmp_path / "dcp", config=hub)


def _texts(predictor: Any) -> Any:
    return predictor.predict([predictor.decode(b"the film was very good", "a text")])
