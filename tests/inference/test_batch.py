from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from pyarrow import parquet

from inference.batch import main
from inference.loading import load_model
from tests.inference.conftest import FORMS, Form
from training.data import LabelledImages, to_input


def predict(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def rows_of(out: Path) -> list[dict[str, Any]]:
    if out.suffix == ".parquet":
        return parquet.read_table(out).to_pylist()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_predictions_are_those_of_the_model(forms: Path, digits: LabelledImages, tmp_path: Path) -> None:
    out = tmp_path / "predictions.jsonl"
    result = predict(forms / "model.safetensors", "--dataset=digits", f"--out={out}")
    with torch.no_grad():
        expected = load_model(forms / "model.pt")(to_input(digits.pixels)).softmax(1)
    rows = rows_of(out)
    assert [row["name"] for row in rows] == [str(number) for number in range(360)]
    assert [row["truth"] for row in rows] == digits.labels.tolist()
    assert torch.tensor([row["probabilities"] for row in rows]).allclose(expected, atol=1e-5)
    right = sum(row["label"] == row["truth"] for row in rows)
    assert result.stdout.splitlines() == [f"360 predictions in {out}", f"accuracy: {right / 360:.4f} ({right} of 360)"]


def test_every_form_and_both_outputs_agree(forms: Path, tmp_path: Path) -> None:
    written = []
    for form, suffix in (*((form, ".jsonl") for form in FORMS), (FORMS[0], ".parquet")):
        out = tmp_path / f"{form}{suffix}"
        assert predict(forms / form, "--dataset=digits", f"--out={out}").exit_code == 0
        written.append(rows_of(out))
    assert all(rows == written[0] for rows in written)


def test_a_folder_of_images_gives_the_answers_of_the_dataset(forms: Path, image_folder: Path, tmp_path: Path) -> None:
    of_dataset, of_folder = tmp_path / "dataset.jsonl", tmp_path / "folder.jsonl"
    predict(forms / "model.pt", "--dataset=digits", f"--out={of_dataset}")
    result = predict(forms / "model.pt", f"--images={image_folder}", f"--out={of_folder}")
    assert "accuracy" not in result.stdout
    rows = rows_of(of_folder)
    assert [row["name"] for row in rows] == [f"{number:03d}.png" for number in range(40)]
    assert {row["truth"] for row in rows} == {None}
    expected = [(row["label"], row["probabilities"]) for row in rows_of(of_dataset)[:40]]
    assert [(row["label"], row["probabilities"]) for row in rows] == expected


def test_labels_vary(forms: Path, image_folder: Path, tmp_path: Path) -> None:
    """The model of these tests answers more than one class, so that equal answers mean something."""
    out = tmp_path / "out.jsonl"
    predict(forms / "sharded", f"--images={image_folder}", f"--out={out}")
    assert len({row["label"] for row in rows_of(out)}) > 1


@pytest.mark.parametrize(
    ("form", "args", "code", "sentence"),
    [
        ("model.pt", ["--out=x.jsonl"], 2, "give either --dataset or --images"),
        ("model.pt", ["--dataset=digits", "--images=.", "--out=x.jsonl"], 2, "give either --dataset or --images"),
        ("model.pt", ["--dataset=digits", "--out=x.csv"], 2, "--out ends in .jsonl or .parquet"),
        ("model.pt", ["--dataset=fashion-mnist", "--out=x.jsonl"], 2, "needs --data-root"),
        ("model.pt", ["--images=/none", "--out=x.jsonl"], 3, "no image files in /none"),
        ("none.pt", ["--dataset=digits", "--out=x.jsonl"], 3, "there is no model file"),
    ],
)
def test_errors_are_one_sentence(form: Form, args: list[str], code: int, sentence: str, forms: Path) -> None:
    result = predict(forms / form, *args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_damaged_image_is_named(forms: Path, image_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes((image_folder / "000.png").read_bytes()[:100])
    result = predict(forms / "model.pt", f"--images={tmp_path}", f"--out={tmp_path / 'x.jsonl'}")
    assert result.exit_code == 4
    assert "cut.png is a damaged image file" in result.stderr
