"""``config.json`` beside each checkpoint of a run, what inference makes of it, and the demo's steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import FashionMNIST

import inference
from ckpt_tools.errors import FormatError, StoreError
from inference.demo import FORMAT_FILES, convert_and_check, make_folder
from inference.models.predictor import load_predictor
from inference.models.uninitialized import SkipInitialisation
from training.config.model_names import MODELS
from training.config.options import DatasetName
from training.config.train_config import TrainConfig
from training.data.datasets import load_dataset
from training.models.config_json import write_model_config
from training.models.zoo import build_own_model

PREPARED = {"mode": "L", "height": 28, "width": 28, "resample": "bilinear", "mean": 0.5, "std": 0.5}


def written(folder: Path, model: str, dataset: DatasetName = "digits", root: Path | None = None) -> dict[str, Any]:
    config = TrainConfig(out=folder / "run", engine="fsdp2", model=model, dataset=dataset, data_root=root)
    write_model_config(folder, config)
    return dict(json.loads((folder / "config.json").read_text()))


def with_weights(folder: Path, model: str) -> Path:
    """Beside ``config.json``, the weights of such a model, whatever their numbers are."""
    with SkipInitialisation():
        torch.save(build_own_model(model).state_dict(), folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize(
    ("name", "architecture"), [("fsdp2", "ours:cnn"), pytest.param("zero3-vit", "ours", marks=pytest.mark.extended)]
)
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


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_loaded_by_its_name(model, tmp_path):
    name = "ours" if model == "vit" else f"ours:{model}"
    if MODELS[model].task == "text":
        assert written(tmp_path, model, "text") == {"architecture": name, "dataset": "text"}
        assert load_predictor(with_weights(tmp_path, model)).inputs[0].datatype == "BYTES"
        return
    assert written(tmp_path, model)["architecture"] == name
    path = with_weights(tmp_path, model)
    with torch.device("meta"):
        expected = build_own_model(model)
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


@pytest.mark.parametrize("format_name", FORMAT_FILES)
@pytest.mark.parametrize(
    ("name", "tensors"), [("fsdp2", 8), pytest.param("zero3-vit", 128, marks=pytest.mark.extended)]
)
def test_a_file_predicts_as_its_run_did(name, tensors, format_name, small_run, tmp_path):
    run = small_run(name)
    row = convert_and_check(run, format_name, tmp_path)
    assert (row.tensors, row.tensors_equal) == (tensors, tensors)
    assert (row.total, row.predictions_equal) == (360, 360)
    assert row.file_correct == row.run_correct == run.correct
    assert row.file == str(tmp_path / FORMAT_FILES[format_name])
    assert row.bytes == (tmp_path / FORMAT_FILES[format_name]).stat().st_size


def test_each_demo_has_a_folder_of_its_own(tmp_path):
    (tmp_path / "out/1").mkdir(parents=True)
    assert [make_folder(tmp_path / "out").name for _ in range(2)] == ["2", "3"]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be written to"):
        make_folder(tmp_path / "file")
