"""``config.json`` in each checkpoint's folder, which describes the model to inference."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch

from ..config.model_names import COMPANIONS, IMAGE_SIZE, MODELS, NUM_CLASSES, files_in, folder_of
from ..config.references import is_function, text_of
from ..config.train_config import TrainConfig
from .zoo import make_spec

NAME = "config.json"

LABELS: dict[str, tuple[str, ...]] = {
    "digits": tuple(map(str, range(10))),
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}

PREPARATION = {"mode": "L", "height": IMAGE_SIZE, "width": IMAGE_SIZE, "resample": "bilinear", "mean": 0.5, "std": 0.5}
"""Preprocessing of an image of any size and colours."""


def model_config(config: TrainConfig) -> dict[str, Any] | None:
    """Description of the model for inference; None for a transformers model, which has its own file."""
    name, data = text_of(config.model), text_of(config.dataset)
    if name not in MODELS or is_function(config.dataset):
        return None
    sizes = urlencode(config.model_arguments)
    architecture = "ours" if name == "vit" and not sizes else f"ours:{name}" + (f"?{sizes}" if sizes else "")
    if MODELS[name].task == "text":
        return {"architecture": architecture, "dataset": data}
    labels = list(list_labels(config))
    return {"architecture": architecture, "labels": labels, "image": PREPARATION, "dataset": data}


def list_labels(config: TrainConfig) -> tuple[str, ...]:
    """Labels of the model's outputs in order; an output without a class in the user's folder has its number."""
    if (name := text_of(config.dataset)) in LABELS:
        return LABELS[name]
    assert config.data_root is not None, "a dataset without labels of its own is a folder of classes"
    classes = sorted(path.name for path in (config.data_root / "train").iterdir() if path.is_dir())
    return (*classes, *map(str, range(len(classes), NUM_CLASSES)))


def write_model_config(folder: Path, config: TrainConfig) -> None:
    """Write the file. For a transformers model, copy that of its folder and its tokenizer, which ``from_pretrained``
    reads; with ``--lora`` also write ``adapter_config.json``."""
    if (hub := folder_of(config.model)) is not None:
        for path in (hub / NAME, *files_in(hub, COMPANIONS)):
            shutil.copyfile(path, folder / path.name)
    elif (described := model_config(config)) is not None:
        (folder / NAME).write_text(json.dumps(described, indent=1) + "\n")
    if config.lora:
        _adapter_config(config).save_pretrained(str(folder))


@lru_cache(maxsize=1)
def _adapter_config(config: TrainConfig) -> Any:
    """``LoraConfig`` with the modules that PEFT has found in the model."""
    with torch.device("meta"):
        model: Any = make_spec(config).make().module
    return model.peft_config["default"]
