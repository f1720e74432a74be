"""The batch command over tables, texts and stores, stopped and gone on with, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from pyarrow import parquet

from ckpt_tools.errors import StoreError
from inference.batch import pipeline
from inference.batch.__main__ import main
from inference.batch.inputs import Wanted, after, find_inputs
from inference.batch.items import Item
from inference.models.predictor import load_predictor
from tests.inference.tiny_models import save_text_model, save_writer
from training.data.datasets import Samples


def predict(*args: object) -> Result:
    return CliRunner().invoke(main, [*map(str, args), "--quiet"])


def rows_of(out: Path) -> list[dict[str, Any]]:
    if out.suffix == ".parquet":
        return parquet.read_table(out).to_pylist()
    return [json.loads(line) for line in out.read_text().splitlines()]


def answers(out: Path) -> list[Any]:
    return [row["probabilities"] for row in rows_of(out)]


@pytest.fixture(scope="module")
def expected(forms, image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "x.jsonl"
    assert predict("--model", forms / "model.pt", "--input", image_folder, "--output", out).exit_code == 0
    return answers(out)


def images_as(form: str, images: Path, folder: Path, digits: Samples) -> Path:
    """The 40 images as a table, with their labels."""
    paths = sorted(images.glob("*.png"))
    labels = digits.labels[: len(paths)].tolist()
    path = folder / f"table.{form}"
    if form == "parquet":
        data = [{"bytes": each.read_bytes(), "path": each.name} for each in paths]
        parquet.write_table(pa.table({"image": data, "digit": labels}), path, row_group_size=7)
    elif form == "jsonl":
        lines = [json.dumps({"path": str(each), "digit": n}) for each, n in zip(paths, labels, strict=True)]
        path.write_text("\n".join(lines) + "\n")
    elif form == "csv":
        path.write_text("path,digit\n" + "".join(f'"{each}",{n}\n' for each, n in zip(paths, labels, strict=True)))
    else:
        path.write_text("".join(f"{each}\n" for each in paths))
    return path


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv", "txt"])
def test_a_table_gives_the_answers_of_the_folder(form, forms, image_folder, digits, expected, tmp_path):
    table, out = images_as(form, image_folder, tmp_path, digits), tmp_path / "x.jsonl"
    truth = [] if form == "txt" else ["--truth", "digit"]
    result = predict("--model", forms / "model.pt", "--input", table, "--output", out, *truth)
    assert result.exit_code == 0, result.stderr
    assert answers(out) == expected
    assert [row["name"] for row in rows_of(out)] == [str(number) for number in range(40)]
    assert [row["truth"] for row in rows_of(out)] == (digits.labels[:40].tolist() if truth else [None] * 40)


def test_broken_rows_are_rows(forms, image_folder, tmp_path):
    table, out = tmp_path / "x.jsonl", tmp_path / "out.jsonl"
    good = json.dumps({"path": str(image_folder / "000.png"), "y": 1})
    bad = ['{"path": ', "[]", "{}", '{"path": "none.png"}', '{"path": "s3://b/x.png"}', good.replace("1}", '"cat"}')]
    table.write_text("\n".join([good, *bad, good]) + "\n")
    result = predict("--model", forms / "model.pt", "--input", table, "--output", out, "--truth", "y")
    assert result.exit_code == 6
    assert "6 of 8 inputs could not be predicted: 1, 2, 3 and 3 more" in result.stderr
    errors = [row["error"] for row in rows_of(out)]
    assert errors[0] is errors[-1] is None
    for error, words in zip(
        errors[1:-1], ["not JSON", "not a JSON object", "no path", "none.png", "another kind", "'cat'"], strict=True
    ):
        assert words in error


def test_columns_are_asked_for_by_name(forms, tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    for options, words in (([], "say by --column"), (["--column=c"], "has no column c; it has a, b")):
        out = tmp_path / "out.jsonl"
        result = predict("--model", forms / "model.pt", "--input", tmp_path / "x.csv", "--output", out, *options)
        assert (result.exit_code, out.exists()) == (2, False)
        assert words in result.stderr


def test_texts_are_labelled_and_continued(tmp_path):
    lines = ["good film", "", "the film was not a very bad play", "good film"]
    (tmp_path / "x.txt").write_text("\n".join(lines) + "\n")
    for save, field in ((save_text_model, "probabilities"), (save_writer, "text")):
        model, out = save(tmp_path / field), tmp_path / f"{field}.parquet"
        result = predict("--model", model, "--input", tmp_path / "x.txt", "--output", out)
        predictor, rows = load_predictor(model), rows_of(out)
        for row, line in zip(rows, lines, strict=True):
            if row["error"] is None:
                [alone] = predictor.predict([predictor.decode(line.encode(), "x")])
                assert row[field] == (alone.text if field == "text" else list(alone.probabilities or ()))
        assert rows[0][field] == rows[3][field] is not None
        assert result.exit_code == (6 if field == "text" else 0)


def test_a_model_of_texts_takes_no_images(image_folder, tmp_path):
    model, out = save_text_model(tmp_path / "model"), tmp_path / "x.jsonl"
    result = predict("--model", model, "--input", image_folder, "--output", out)
    assert (result.exit_code, "takes texts, and the input is images" in result.stderr) == (2, True)


def test_embeddings_are_what_the_last_layer_gets(forms, image_folder, weights, expected, tmp_path):
    import torch

    out = tmp_path / "x.jsonl"
    assert (
        predict("--model", forms / "model.pt", "--input", image_folder, "--output", out, "--embeddings").exit_code == 0
    )
    found = torch.tensor([row["embedding"] for row in rows_of(out)])
    again = (found @ weights["heads.head.weight"].T + weights["heads.head.bias"]).softmax(1)
    assert found.shape == (40, 128)
    assert torch.allclose(again, torch.tensor(expected), atol=1e-5)


# --- stopped, and gone on with


@pytest.fixture
def stopped(monkeypatch):
    """Let the run fail after so many windows, each of a pass."""

    def after_windows(count: int) -> None:
        real, left = pipeline.rows_of, [count]

        def failing(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise StoreError("the disk went away")
            return real(*args)

        monkeypatch.setattr(pipeline, "rows_of", failing)
        monkeypatch.setattr(pipeline, "PASSES", 1)

    return after_windows


@pytest.mark.parametrize("suffix", [".parquet", pytest.param(".jsonl", marks=pytest.mark.extended)])
def test_a_run_goes_on_where_it_stopped(suffix, forms, stopped, monkeypatch, tmp_path):
    words = ("--model", forms / "model.pt", "--input", "digits")
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"x{suffix}"
    first = predict(*words, "--output", whole)
    with monkeypatch.context():
        stopped(3)
        failed = predict(*words, "--output", out)
    assert failed.exit_code == 5
    assert "the 90 rows that were done are kept" in failed.stderr
    monkeypatch.undo()
    with (tmp_path / f"x{suffix}.unfinished").open("ab") as file:
        file.write(b'{"name": "90", "la')
    result = predict(*words, "--output", out, "--resume")
    assert result.exit_code == 0, result.stderr
    assert rows_of(out) == rows_of(whole)
    assert result.stdout.replace(str(out), "") == first.stdout.replace(str(whole), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([whole.name, out.name])


def test_rows_of_two_runs_are_never_mixed(forms, image_folder, stopped, monkeypatch, tmp_path):
    import torch

    weights = torch.load(forms / "model.pt")
    weights["heads.head.bias"] += 1
    torch.save(weights, tmp_path / "other.pt")
    out = tmp_path / "x.jsonl"
    stopped(1)
    predict("--model", forms / "model.pt", "--input", image_folder, "--output", out)
    monkeypatch.undo()
    kept = (tmp_path / "x.jsonl.unfinished").read_bytes()
    for model, source, options, kind in (
        (tmp_path / "other.pt", image_folder, [], "model and set of options"),  # no config.json is beside it
        (forms / "model.pt", "digits", [], "input"),
        (forms / "model.pt", image_folder, ["--fast"], "set of options"),
    ):
        result = predict("--model", model, "--input", source, "--output", out, "--resume", *options)
        assert result.exit_code == 8, result.stderr
        assert f"are of another {kind};" in result.stderr
        assert (tmp_path / "x.jsonl.unfinished").read_bytes() == kept


def test_what_is_left_begins_after_what_is_done(image_folder, digits, tmp_path):
    for form in ("parquet", "jsonl", "csv", "txt"):
        found = find_inputs(Wanted(str(images_as(form, image_folder, tmp_path, digits))))
        for num_done in (0, 1, 7, 14, 39, 40):
            left = [item.name for part in after(found.parts, num_done) for item in part.items()]
            assert left == [str(number) for number in range(num_done, 40)], (form, num_done)


# --- in a store


def test_input_and_output_in_a_store(
    forms, image_folder, expected, stopped,
    monkeypatch, tmp_path,
):  # fmt: skip
    store = fsspec.filesystem("memory")
    store.put(f"{image_folder}/", "/images/", recursive=True)
    for suffix in ("jsonl", "parquet"):
        url, words = f"memory://out/x.{suffix}", ["--model", forms / "model.pt", "--input", "memory://images"]
        stopped(1)
        failed = predict(*words, "--output", url)
        assert (failed.exit_code, store.exists(url)) == (5, False)
        assert f"30 rows that were done are kept in {url}.unfinished" in failed.stderr
        monkeypatch.undo()
        assert predict(*words, "--output", url).exit_code == 8
        assert predict(*words, "--output", url, "--resume").exit_code == 0
        store.get(url, str(tmp_path / f"x.{suffix}"))
        assert answers(tmp_path / f"x.{suffix}") == expected
        assert [name for name in store.find("/out") if "unfinished" in name] == []
        assert predict(*words, "--output", url).exit_code == 8
    store.rm("/out", recursive=True)
    store.rm("/images", recursive=True)


# --- how good it is


def test_the_report_measures_against_folder_names(forms, image_folder, digits, tmp_path):
    for number, label in enumerate(digits.labels[:40].tolist()):
        folder = tmp_path / "images" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03d}.png").symlink_to(image_folder / f"{number:03d}.png")
    out, report = tmp_path / "x.jsonl", tmp_path / "report"
    words = ["--model", forms / "model.pt", "--input", tmp_path / "images", "--output", out]
    assert "say by --truth" in predict(*words, "--report", report).stderr
    result = predict(*words, "--truth=folder", "--report", report)
    assert result.exit_code == 0, result.stderr
    rows, found = rows_of(out), json.loads((report / "report.json").read_text())
    right = sum(row["label"] == row["truth"] for row in rows)
    assert (found["correct"], found["with_truth"], found["accuracy"]) == (right, 40, right / 40)
    assert f"accuracy: {right / 40:.4f} ({right} of 40)" in result.stdout
    pairs = {(each["truth"], each["label"]): each["count"] for each in found["confusion"]}
    assert all(count == sum((r["truth"], r["label"]) == pair for r in rows) for pair, count in pairs.items())
    assert sum(pairs.values()) == 40
    assert found["expected_calibration_error"] == pytest.approx(calibration_error(rows))
    for name in ("confusion.png", "calibration.png"):
        with Image.open(report / name) as image:
            assert min(image.size) > 300
            assert len(image.getcolors(1 << 20) or []) > 5
    assert predict(*words, "--truth=folder", "--report", report).exit_code == 8


def calibration_error(rows: list[dict[str, Any]]) -> float:
    """By its definition, apart from how it is gathered."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row in rows:
        sure = row["probabilities"][row["label"]]
        bins.setdefault(min(14, int(sure * 15)), []).append((sure, row["label"] == row["truth"]))
    gaps = (abs(sum(s for s, _ in found) / len(found) - sum(r for _, r in found) / len(found)) * len(found)
            for found in bins.values())  # fmt: skip
    return sum(gaps) / len(rows)


def test_items_are_sent_to_other_processes(image_folder):
    import pickle

    found = find_inputs(Wanted(str(image_folder)))
    items: list[Item] = [item for part in found.parts for item in pickle.loads(pickle.dumps(part)).items()]
    assert [item.name for item in items] == [f"{number:03d}.png" for number in range(40)]
    assert items[-1].fraction == 1.0
