"""An input gives the same bits in any memory layout, as the service gets it from another process: row by row."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import nn

from inference.models.predictor import Predictor, load_predictor
from inference.models.tensors import Tensors
from tests.inference.tiny_models import save_image_model, save_text_model
from training.models.image_models import build_model

NET = """
from torch import nn

inputs = {"image": ("FP32", [-1, 3, 40, 24])}


def net():
    return nn.Sequential(nn.Conv2d(3, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 8, 3), nn.AdaptiveAvgPool2d(1))
"""


def ours(folder: Path) -> Predictor:
    torch.save(build_model().state_dict(), folder / "m.pt")
    return load_predictor(folder / "m.pt")


def of_torchvision(folder: Path) -> Predictor:
    torch.save(torchvision.models.resnet18(num_classes=5).state_dict(), folder / "m.pt")
    return load_predictor(folder / "m.pt", architecture="torchvision:resnet18?num_classes=5", max_batch=2)


def of_timm(folder: Path) -> Predictor:
    torch.save(timm.create_model("test_resnet", num_classes=5).state_dict(), folder / "m.pt")
    return load_predictor(folder / "m.pt", architecture="timm:test_resnet?num_classes=5")


def own(folder: Path) -> Predictor:
    (folder / "strided_net.py").write_text(NET)
    made = nn.Sequential(nn.Conv2d(3, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 8, 3), nn.AdaptiveAvgPool2d(1))
    torch.save(made.state_dict(), folder / "m.pt")
    return load_predictor(folder / "m.pt", architecture=f"{folder}/strided_net.py:net")


KINDS: dict[str, Callable[[Path], Predictor]] = {
    "ours": ours,
    "torchvision": of_torchvision,
    "timm": of_timm,
    "transformers-images": lambda folder: load_predictor(save_image_model(folder)),
    "transformers-texts": lambda folder: load_predictor(save_text_model(folder)),
    "own": own,
}


def item_of(predictor: Predictor) -> np.ndarray:
    """An input as files of the batch command give it, or a row of a tensor."""
    spec = predictor.inputs[0]
    if spec.datatype == "BYTES":
        return np.asarray(predictor.decode(b"the film was very good", "a text"))
    pixels = np.random.default_rng(0).integers(256, size=(60, 50, 3), dtype=np.uint8)
    if isinstance(predictor.task, Tensors):
        return np.random.default_rng(0).standard_normal(spec.shape[1:]).astype(np.float32)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return np.asarray(predictor.decode(stream.getvalue(), "an image"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_an_input_changes_no_bit(kind, tmp_path):
    torch.manual_seed(0)
    predictor = KINDS[kind](tmp_path)
    item = item_of(predictor)
    row_major = np.array(item, order="C")
    layouts = [item, np.array(item, order="F")]
    if item.ndim == 3:
        layouts.append(np.ascontiguousarray(item.transpose(1, 2, 0)).transpose(2, 0, 1))
        assert not layouts[-1].flags.c_contiguous
    [expected] = predictor.predict([row_major])
    for layout in layouts:
        for found in (predictor.predict([layout])[0], predictor.predict([row_major, layout])[1]):
            for name, values in expected.columns.items():
                assert np.asarray(found[name]).tobytes() == np.asarray(values).tobytes(), (layout.strides, name)
