"""``config.json`` beside each checkpoint of a run, and what inference makes of it."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import FashionMNIST

import inference
from ckpt_tools.errors import FormatError
from inference.models.predictor import load_predictor
from inference.models.uninitialized import Unfilled
from training.config.model_names import MODELS
from training.config.options import DatasetName
from training.config.train_config import TrainConfig
from training.data.datasets import load_dataset, to_input
from training.models.config_json import write_model_config
from training.models.zoo import our_model

PREPARED = {"mode": "L", "height": 28, "width": 28, "resample": "bilinear", "mean": 0.5, "std": 0.5}
IMAGE_MODELS = [name for name, facts in MODELS.items() if facts.task == "images"]


def written(folder: Path, model: str, dataset: DatasetName = "digits", root: Path | None = None) -> dict[str, Any]:
    config = TrainConfig(out=folder / "run", engine="fsdp2", model=model, dataset=dataset, data_root=root)
    write_model_config(folder, config)
    return dict(json.loads((folder / "config.json").read_text()))


def with_weights(folder: Path, model: str) -> Path:
    """Beside ``config.json``, the weights of such a model, whatever their numbers are."""
    with Unfilled():
        torch.save(our_model(model).state_dict(), folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize(("name", "architecture"), [("fsdp2", "ours:cnn"), ("zero3-vit", "ours")])
def test_a_run_lays_it_beside_each_checkpoint(name, architecture, small_run):
    run = small_run(name)
    folders = sorted(Path(run.checkpoint).parent.glob("epoch_*"))
    assert [folder.name for folder in folders] == ["epoch_0001", "epoch_0002"][: run.epochs]
    digits = [str(number) for number in range(10)]
    expected = {"architecture": architecture, "labels": digits, "image": PREPARED, "dataset": "digits"}
    assert [json.loads((folder / "config.json").read_text()) for folder in folders] == [expected] * run.epochs
    predictor = load_predictor(run.checkpoint)
    assert predictor.labels == tuple(digits)
    held_out = load_dataset("digits", "held-out", None).pixels[:30]
    assert tuple(answer.label for answer in predictor.predict(list(held_out))) == run.predicted[:30]


@pytest.mark.parametrize("model", IMAGE_MODELS)
def test_a_model_is_loaded_by_its_name(model, tmp_path):
    assert written(tmp_path, model)["architecture"] == ("ours" if model == "vit" else f"ours:{model}")
    path = with_weights(tmp_path, model)
    with torch.device("meta"):
        expected = our_model(model)
    assert str(inference.load_model(path)) == str(expected)
    (tmp_path / "config.json").unlink()
    if model != "vit":
        with pytest.raises(FormatError, match="does not fit the model"):
            inference.load_model(path)


@pytest.mark.parametrize("dataset", ["fashion-mnist", "image-folder"])
def test_the_labels_are_those_of_the_dataset(dataset, tmp_path):
    for name in ("zebra", "ant", "cat"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
    found = written(tmp_path, "cnn", dataset, tmp_path / "data")
    of_folder = ("ant", "cat", "zebra", "3", "4", "5", "6", "7", "8", "9")
    expected = tuple(FashionMNIST.classes) if dataset == "fashion-mnist" else of_folder
    assert found["labels"] == list(expected)
    assert load_predictor(with_weights(tmp_path, "cnn")).labels == expected
    assert load_predictor(tmp_path / "model.pt", labels=list("abcdefghij")).labels == tuple("abcdefghij")


@pytest.mark.parametrize(("size", "mode"), [((28, 28), "L"), ((90, 41), "RGB")])
def test_an_image_is_prepared_as_it_says(size, mode, tmp_path):
    """By the words of the file, with Pillow and NumPy alone."""
    stated = written(tmp_path, "cnn")["image"]
    assert stated == PREPARED
    shape = (size[1], size[0], 3) if mode == "RGB" else size
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    file = BytesIO()
    image.save(file, "PNG")
    resample = Image.Resampling[stated["resample"].upper()]
    plain = image.convert(stated["mode"]).resize((stated["width"], stated["height"]), resample)
    expected = (np.asarray(plain) / 255 - stated["mean"]) / stated["std"]
    decoded = load_predictor(with_weights(tmp_path, "cnn")).decode(file.getvalue(), "image")
    assert isinstance(decoded, np.ndarray)
    assert np.allclose(to_input(torch.from_numpy(decoded)[None])[0, 0].numpy(), expected, atol=1e-6)


def test_another_preparation_than_ours_is_refused(tmp_path):
    config = written(tmp_path, "cnn")
    path = with_weights(tmp_path, "cnn")
    for image in (PREPARED | {"mean": 0.1}, {"mode": "RGB"}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"image": image}))
        with pytest.raises(FormatError, match=r"config\.json says that images are prepared by"):
            load_predictor(path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "ours:cnn"}))
    assert load_predictor(path).labels is None


@pytest.mark.parametrize("model", ["lm", "lm-moe"])
def test_a_language_model_is_loaded_by_its_name(model, tmp_path):
    assert written(tmp_path, model, "text") == {"architecture": f"ours:{model}", "dataset": "text"}
    assert load_predictor(with_weights(tmp_path, model)).inputs[0].datatype == "BYTES"


def test_a_model_of_transformers_has_its_own(tmp_path):
    described, checkpoint = tmp_path / "described", tmp_path / "checkpoint"
    for folder in (described, checkpoint):
        folder.mkdir()
    (described / "config.json").write_text('{"model_type": "llama"}')
    config = TrainConfig(out=tmp_path / "run", engine="fsdp2", model=f"hf:{described}", dataset="text")
    write_model_config(checkpoint, config)
    assert (checkpoint / "config.json").read_text() == '{"model_type": "llama"}'
