"""``--dataset image-folder``: a user's own images, from the folder to the names of the classes that are predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from ckpt_tools.errors import UsageError
from inference.batch import __main__ as batch
from tests.training.jobs import NUM_WORKERS
from tests.training.strategy_jobs import BATCH_SIZE, tiny_config, train_each
from training.__main__ import main
from training.config.model_names import NUM_CLASSES
from training.data.datasets import PARTS, load_dataset
from training.loop.result import RunResult

CLASSES = ("ant", "bee", "cat")


def folder_of(root: Path, part: str, name: str, count: int, level: int) -> None:
    """Colour images of 40x36 whose grey is about ``level``, with a pattern of their own."""
    folder = root / part / name
    folder.mkdir(parents=True)
    for number in range(count):
        noise = torch.randint(-9, 10, (36, 40, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray((noise + level).to(torch.uint8).numpy()).save(folder / f"{number:02d}.png")


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "images"
    for part, count in (("train", 12), ("held-out", 3)):
        for number, name in enumerate(CLASSES):
            folder_of(root, part, name, count, 40 + 80 * number)
    return root


def test_a_run_predicts_the_classes_of_the_folder(root, tmp_path):
    """As inference does on the same files, with the same names."""
    config = tiny_config(tmp_path / "run", strategy="ddp", model="cnn", dataset="image-folder", data_root=root, until=1)
    train_each(NUM_WORKERS, config)
    run = RunResult.read(config.out / "result.json")
    assert (run.total, len(run.history[0].losses)) == (3 * len(CLASSES), 32 // BATCH_SIZE)
    args = [f"--model={run.checkpoint}", f"--input={root / 'held-out'}", f"--output={tmp_path / 'rows.jsonl'}"]
    done = CliRunner().invoke(batch.main, args)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows = sorted(lines, key=lambda row: row["name"])
    labels = (*CLASSES, *map(str, range(len(CLASSES), NUM_CLASSES)))
    assert [row["top"][0]["name"] for row in rows] == [labels[n] for n in run.predicted]


def test_classes_are_numbered_by_the_names_in_train(root):
    """Also in a part without the second one."""
    for image in (root / "held-out/bee").iterdir():
        image.unlink()
    (root / "held-out/bee").rmdir()
    train, held_out = (load_dataset("image-folder", part, root) for part in PARTS)
    assert train.labels.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert held_out.labels.tolist() == [0] * 3 + [2] * 3
    assert [round(float(each.double().mean()), -1) for each in held_out.pixels] == [40] * 3 + [200] * 3


def spoilt(root: Path, how: str) -> None:
    if how == "classes":
        for number in range(8):
            folder_of(root, "train", f"dog{number}", 1, 9)
    elif how == "unknown":
        (root / "held-out/ant").rename(root / "held-out/ape")
    elif how == "empty":
        (root / "train/dog").mkdir()
    elif how == "cut":
        (root / "train/bee/03.png").write_bytes((root / "train/bee/03.png").read_bytes()[:200])
    else:
        (root / "held-out/bee/00.png").write_text("no image")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("classes", "has 11 classes, and models tell 10 apart"),
        ("unknown", "held-out/ape is a class that "),
        ("empty", "train: Found no valid file for the classes dog"),
        ("cut", "train/bee/03.png cannot be read as an image: "),
        ("text", "held-out/bee/00.png cannot be read as an image: "),
    ],
)
def test_what_is_not_a_folder_of_classes_is_refused(how, sentence, root, tmp_path):
    spoilt(root, how)
    with pytest.raises(UsageError, match=sentence):
        [load_dataset("image-folder", part, root) for part in PARTS]


@pytest.mark.parametrize(("how", "named"), [("cut", "train/bee/03.png"), ("text", "held-out/bee/00.png")])
def test_a_bad_image_is_one_sentence_before_the_run(how, named, root, tmp_path):
    spoilt(root, how)
    args = ["--strategy=ddp", "--dataset=image-folder", f"--data-root={root}", f"--out={tmp_path / 'run'}"]
    done = CliRunner().invoke(main, [*args, "--launcher=torchrun", "--batch-size=16"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert done.stderr.startswith(f"Error: {root / named} cannot be read as an image: ")
    assert not (tmp_path / "run").exists()
