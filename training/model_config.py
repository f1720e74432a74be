"""``config.json`` in the folder of each checkpoint: what the weights belong in, so that nobody has to say it later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import DatasetName

NAME = "config.json"

LABELS: dict[DatasetName, tuple[str, ...]] = {
    "digits": tuple(map(str, range(10))),
    "fashion-mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
}


def model_config(dataset: DatasetName) -> dict[str, Any]:
    """The module by the name that inference gives it, its classes in order, and how an image is prepared for it."""
    from .models import IMAGE_SIZE

    prepared = {"mode": "L", "height": IMAGE_SIZE, "width": IMAGE_SIZE, "resample": "bilinear", "mean": 0.5, "std": 0.5}
    return {"architecture": "ours", "labels": list(LABELS[dataset]), "image": prepared, "dataset": dataset}


def write_model_config(folder: Path, dataset: DatasetName) -> None:
    (folder / NAME).write_text(json.dumps(model_config(dataset), indent=1) + "\n")
