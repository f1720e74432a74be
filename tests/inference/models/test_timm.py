"""Folders of timm's hub, judged by timm: the same input, the same logits, the same labels, bit for bit."""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import inference
from ckpt_tools.errors import FormatError, UsageError
from inference.models.predictor import load_predictor

LABELS = ["cat", "dog", "emu", "fox"]
OWN = {
    "input_size": (3, 96, 64),
    "mean": (0.1, 0.2, 0.3),
    "std": (0.5, 0.6, 0.7),
    "interpolation": "bilinear",
    "crop_pct": 0.8,
    "crop_mode": "border",
}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "its own preparation": ("test_resnet", {}, OWN),
    "one channel": ("test_resnet", {"in_chans": 1}, {"mean": (0.5,), "std": (0.25,), "crop_mode": "squash"}),
    "its own arguments": ("test_vit", {"img_size": 64, "depth": 2}, {"crop_pct": 1.0}),
    "a test size that is not asked for": ("test_convnext", {}, {"test_input_size": (3, 96, 96), "test_crop_pct": 1.0}),
}


def saved(folder: Path, kind: str = "its own preparation", **changed: Any) -> Path:
    name, arguments, prepared = KINDS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, **arguments)
    save_for_hf(model, folder, model_config={"label_names": LABELS}, safe_serialization=True)
    change(folder, lambda config: config["pretrained_cfg"].update(prepared) or config.update(changed))
    return folder


def change(folder: Path, changed: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed(config)
    (folder / "config.json").write_text(json.dumps(config))


def flatten(folder: Path) -> None:
    """The layout of timm 0.6 and before: one dictionary, with ``labels``."""
    found = json.loads((folder / "config.json").read_text())
    flat = {"architecture": found["architecture"], "labels": found["label_names"], **found["pretrained_cfg"]}
    (folder / "config.json").write_text(json.dumps(flat))


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    generator = torch.Generator().manual_seed(width)
    pixels = torch.randint(0, 256, (9, 9, 3), dtype=torch.uint8, generator=generator).numpy()
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


PICTURES = (picture(100, 140), picture(300, 64), picture(33, 32, "L"), picture(64, 90, "RGBA"))


def assert_as_timm(folder: Path, architecture: str | None = None) -> None:
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    settings = timm.data.resolve_model_data_config(theirs)
    transform = timm.data.create_transform(**settings, is_training=False)
    mode = "L" if settings["input_size"][0] == 1 else "RGB"
    ours = load_predictor(folder, architecture=architecture)
    assert ours.inputs[0].shape == (-1, *settings["input_size"])
    assert ours.labels == tuple(theirs.pretrained_cfg["label_names"])
    loaded = inference.load_model(folder, model=architecture)
    for each in PICTURES:
        file = BytesIO()
        each.save(file, "PNG")
        decoded, expected = ours.decode(file.getvalue(), "picture"), transform(each.convert(mode))
        assert torch.from_numpy(decoded).equal(expected)
        # A pass has as many rows as the predictor's, so that no bit may differ.
        batch = expected.unsqueeze(0).expand(ours.max_batch, -1, -1, -1)
        with torch.inference_mode():
            logits = theirs(batch)
            assert loaded(batch).equal(logits)
        assert ours.predict([decoded])[0].probabilities == tuple(logits.softmax(1)[0].tolist())


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("its own preparation", None),
        ("its own arguments", "timm:{}.some_tag"),
        pytest.param("one channel", None, marks=pytest.mark.extended),
        pytest.param("a test size that is not asked for", None, marks=pytest.mark.extended),
    ],
)
def test_a_folder_of_the_hub_is_read_as_timm_reads_it(kind, architecture, tmp_path):
    assert_as_timm(saved(tmp_path / "folder", kind), architecture and architecture.format(KINDS[kind][0]))


def test_the_old_layout_is_read_as_timm_reads_it(tmp_path):
    folder = saved(tmp_path / "folder")
    flatten(folder)
    assert_as_timm(folder)
    assert_as_timm(folder, "timm:test_resnet")


def test_another_model_than_config_json_names_is_refused(tmp_path):
    folder = saved(tmp_path / "folder")
    told = r"/config\.json says that the weights are of timm:test_resnet, not of timm:test_vit$"
    with pytest.raises(UsageError, match=told):
        load_predictor(folder, architecture="timm:test_vit")
    with pytest.raises(UsageError, match=told):
        inference.load_model(folder, model="timm:test_vit?num_classes=4")


def test_a_model_without_classes_gives_embeddings(tmp_path):
    model = timm.create_model("test_resnet", num_classes=0).eval()
    save_for_hf(model, tmp_path / "folder", safe_serialization=True)
    assert [spec.name for spec in load_predictor(tmp_path / "folder").outputs] == ["output"]
    predictor = load_predictor(tmp_path / "folder", embeddings=True)
    image = torch.rand(3, 160, 160)
    with torch.inference_mode():
        expected = model(image.expand(predictor.max_batch, -1, -1, -1))[0]
    assert predictor.predict([image])[0].embedding == tuple(expected.tolist())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"architecture": "no_such_model"}, r"^timm cannot build no_such_model as .*/config\.json says: Unknown model"),
        ({"architecture": 7}, r"config\.json names 7, which is not an architecture"),
        ({"model_args": {"no_such_argument": 1}}, "timm cannot build test_resnet as .*no_such_argument"),
        ({"pretrained_cfg": 7}, "timm cannot build test_resnet as "),
        ({"pretrained_cfg": {"interpolation": "guess"}}, "timm's preparation of images is not usable: .*guess"),
        ({"label_names": [1, 2, 3, 4]}, "is not usable: .*must be strings"),
    ],
)
def test_a_config_json_that_timm_cannot_use_is_named(changed, told, tmp_path):
    folder = saved(tmp_path / "folder")
    change(folder, lambda config: config.update(changed))
    with pytest.raises(FormatError, match=told):
        load_predictor(folder)


@pytest.mark.soak
@pytest.mark.parametrize("name", timm.list_models("test_*"))
def test_every_small_family_is_read_as_timm_reads_it(name, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4)
    save_for_hf(model, tmp_path / "folder", model_config={"label_names": LABELS}, safe_serialization=True)
    assert_as_timm(tmp_path / "folder")
