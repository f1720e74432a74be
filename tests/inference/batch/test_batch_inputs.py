"""The batch command over tables, texts and stores, stopped and gone on with, and its report."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import s3fs
import torch
from PIL import Image
from pyarrow import parquet

from ckpt_tools.errors import StoreError
from inference.batch import pipeline
from inference.batch.inputs import InputOptions, find_inputs, skip_items
from inference.models.predictor import load_predictor
from tests.inference.commands import predict, predicted, rows_of
from tests.support.s3_server import BUCKET
from training.data.datasets import TensorSamples


def kept_rows(unfinished: Path) -> list[bytes]:
    return [part.read_bytes() for part in sorted(unfinished.glob("rows-*"))]


def probabilities(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["probabilities"] for row in rows]


@pytest.fixture(scope="module")
def model(forms):
    return forms / "model.pt"


@pytest.fixture(scope="module")
def expected(predictor, digits):
    return [list(each.probabilities) for each in predictor.predict(list(digits.pixels[:40]))]


def images_as(form: str, images: Path, folder: Path, digits: TensorSamples) -> Path:
    """The 40 images as a table, with their labels."""
    paths = sorted(images.glob("*.png"))
    labels = digits.labels[: len(paths)].tolist()
    path, pairs = folder / f"table.{form}", list(zip(paths, labels, strict=True))
    if form == "parquet":
        data = [{"bytes": each.read_bytes(), "path": each.name} for each in paths]
        parquet.write_table(pa.table({"image": data, "digit": labels}), path, row_group_size=7)
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"path": str(each), "digit": n}) + "\n" for each, n in pairs))
    elif form == "csv":
        path.write_text("path,digit\n" + "".join(f'"{each}",{n}\n' for each, n in pairs))
    else:
        path.write_text("".join(f"{each}\n" for each in paths))
    return path


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv", "txt"])
def test_a_table_gives_the_answers_of_the_folder(form, model, image_folder, digits, expected, tmp_path):
    table = images_as(form, image_folder, tmp_path, digits)
    truth = [] if form == "txt" else ["--truth", "digit"]
    rows = predicted(model, table, tmp_path / "x.jsonl", *truth)
    assert probabilities(rows) == expected
    assert [row["name"] for row in rows] == [str(number) for number in range(40)]
    assert [row["truth"] for row in rows] == (digits.labels[:40].tolist() if truth else [None] * 40)
    found = find_inputs(InputOptions(str(table)))
    for num_done in (0, 1, 7, 14, 39, 40):
        left = [item.name for part in skip_items(found.parts, num_done) for item in part.items()]
        assert left == [str(number) for number in range(num_done, 40)], num_done


def test_broken_rows_are_rows(model, image_folder, tmp_path):
    table, out = tmp_path / "x.jsonl", tmp_path / "out.jsonl"
    good = json.dumps({"path": str(image_folder / "000.png"), "y": 1})
    bad = ['{"path": ', "[]", "{}", '{"path": "none.png"}', '{"path": "s3://b/x.png"}', good.replace("1}", '"cat"}')]
    told = ("not JSON", "not a JSON object", "no path", "none.png", "another kind", "'cat'")
    table.write_text("\n".join([good, *bad, good]) + "\n")
    result = predict(model, table, out, "--truth", "y")
    assert result.exit_code == 6
    assert "6 of 8 inputs could not be predicted: 1, 2, 3 and 3 more" in result.stderr
    errors = [row["error"] for row in rows_of(out)]
    assert errors[0] is errors[-1] is None
    assert [words for error, words in zip(errors[1:-1], told, strict=True) if words not in error] == []


@pytest.mark.parametrize(("kind", "field", "code"), [("labels", "probabilities", 0), ("writer", "text", 6)])
def test_texts_are_labelled_and_continued(kind, field, code, small_models, image_folder, tmp_path):
    model, lines = small_models / kind, ["good film", "", "the film was not a very bad play", "good film"]
    (tmp_path / "x.txt").write_text("\n".join(lines) + "\n")
    rows = predicted(model, tmp_path / "x.txt", tmp_path / "x.parquet", "--max-new-tokens=8", code=code)
    predictor = load_predictor(model, max_new_tokens=8)
    for row, line in zip(rows, lines, strict=True):
        if row["error"] is None:
            [alone] = predictor.predict([predictor.decode(line.encode(), "x")])
            assert row[field] == (alone.text if field == "text" else list(alone.probabilities or ()))
    assert rows[0][field] == rows[3][field] is not None
    result = predict(model, image_folder, tmp_path / "x.jsonl")
    assert (result.exit_code, "takes texts, and the input is images" in result.stderr) == (2, True)


# --- stopped, and gone on with


@pytest.fixture
def stopped(monkeypatch):
    """Let the run fail after so many windows, each of a pass."""

    def after_windows(count: int) -> None:
        real, left = pipeline.predict_window, [count]

        def failing(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise StoreError("the disk went away")
            return real(*args)

        monkeypatch.setattr(pipeline, "predict_window", failing)
        monkeypatch.setattr(pipeline, "WINDOW_PASSES", 1)

    return after_windows


@pytest.mark.parametrize("suffix", [".parquet", pytest.param(".jsonl", marks=pytest.mark.extended)])
def test_a_run_goes_on_where_it_stopped(suffix, model, stopped, monkeypatch, tmp_path):
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"x{suffix}"
    first = predict(model, "digits", whole)
    stopped(3)
    failed = predict(model, "digits", out)
    assert failed.exit_code == 5
    assert "the 90 rows that were done are kept" in failed.stderr
    monkeypatch.undo()
    last = max((tmp_path / f"x{suffix}.unfinished").glob("rows-*"))
    with last.open("ab") as file:
        file.write(b'{"name": "90", "la')
    result = predict(model, "digits", out, "--resume")
    assert result.exit_code == 0, result.stderr
    assert rows_of(out) == rows_of(whole)
    assert result.stdout.replace(str(out), "") == first.stdout.replace(str(whole), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([whole.name, out.name])


def test_rows_of_two_runs_are_never_mixed(model, weights, image_folder, stopped, monkeypatch, tmp_path):
    bias = weights["heads.head.bias"]
    torch.save({**weights, "heads.head.bias": bias + 1}, tmp_path / "other.pt")
    out, unfinished = tmp_path / "x.jsonl", tmp_path / "x.jsonl.unfinished"
    stopped(1)
    predict(model, image_folder, out)
    monkeypatch.undo()
    kept = kept_rows(unfinished)
    for other, source, options, kind in (
        (tmp_path / "other.pt", image_folder, [], "model and options"),  # no config.json is beside it
        (model, "digits", [], "input"),
        (model, image_folder, ["--fast"], "options"),
    ):
        result = predict(other, source, out, "--resume", *options)
        assert result.exit_code == 8, result.stderr
        assert f"are of another {kind};" in result.stderr
        assert kept_rows(unfinished) == kept


# --- in a store


KILLED = """
import os, signal, sys
from inference.batch import output, pipeline
from inference.batch.__main__ import main

pipeline.WINDOW_PASSES = 1
output.PART_ROWS = int(sys.argv.pop(1))
store, stored = output.RowWriter.store_part, []

def store_and_die(writer):
    store(writer)
    stored.append(1)
    if len(stored) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

output.RowWriter.store_part = store_and_die
main()
"""
"""As if somebody ran ``kill -9`` when two parts are there: others wait, or nothing but to put them together."""


@pytest.fixture
def bucket(s3_server, s3, forms, image_folder):
    """A prefix of an S3 server: the model, and 40 images as files, as cells of a Parquet file, and named by 80 lines.
    And its URL."""
    prefix = s3_server.new_prefix()
    images = {file.name: file.read_bytes() for file in sorted(image_folder.glob("*.png"))}
    cells = pa.BufferOutputStream()
    parquet.write_table(pa.table({"image": [*images.values()] * 2, "number": range(80)}), cells)
    files = {
        "model.safetensors": (forms / "model.safetensors").read_bytes(),
        **{f"images/{name}": data for name, data in images.items()},
        "cells.parquet": cells.getvalue().to_pybytes(),
        "lines.jsonl": "".join(json.dumps({"path": f"images/{name}"}) + "\n" for name in [*images] * 2).encode(),
    }
    s3_server.put(prefix, files)
    s3fs.S3FileSystem.clear_instance_cache()
    return prefix, f"s3://{BUCKET}/{prefix}"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("source", "name"),
    [pytest.param("cells.parquet", "out.jsonl", marks=pytest.mark.soak), ("lines.jsonl", "out.parquet")],
)
def test_a_run_on_s3_that_is_killed_goes_on_and_each_row_is_there_once(
    source, name, bucket, s3_server, expected, monkeypatch, tmp_path
):
    prefix, base = bucket
    monkeypatch.setattr("inference.batch.output.PART_ROWS", 30)
    words = (f"{base}model.safetensors", f"{base}{source}", f"{base}{name}", "--architecture=ours", "--threads=1")
    pairs = zip(("--model", "--input", "--output"), words, strict=False)
    command = [sys.executable, "-c", KILLED, "15", *(word for pair in pairs for word in pair), *words[3:]]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = s3_server.keys(prefix + name)
    assert "" not in left
    assert len([key for key in left if "/rows-" in key]) == 2
    refused = predict(*words)
    assert (refused.exit_code, "--resume continues with them" in refused.stderr) == (8, True)
    assert predict(*words, "--resume").exit_code == 0
    assert s3_server.keys(prefix + name) == [""]
    assert not s3_server.open_uploads(prefix)
    (tmp_path / name).write_bytes(s3_server.files(prefix + name)[""])
    rows = rows_of(tmp_path / name)
    assert len(rows) == len({row["name"] for row in rows}) == 80
    assert probabilities(rows) == expected * 2


# --- how good it is


def test_the_report_measures_against_folder_names(model, image_folder, digits, tmp_path):
    for number, label in enumerate(digits.labels[:40].tolist()):
        folder = tmp_path / "images" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03d}.png").symlink_to(image_folder / f"{number:03d}.png")
    out, report = tmp_path / "x.jsonl", tmp_path / "report"
    given = (model, tmp_path / "images", out, "--report", report)
    assert "say by --truth" in predict(*given).stderr
    result = predict(*given, "--truth=folder")
    assert result.exit_code == 0, result.stderr
    rows, found = rows_of(out), json.loads((report / "report.json").read_text())
    right = sum(row["label"] == row["truth"] for row in rows)
    assert (found["correct"], found["with_truth"], found["accuracy"]) == (right, 40, right / 40)
    assert f"accuracy: {right / 40:.4f} ({right} of 40)" in result.stdout
    pairs = {(each["truth"], each["label"]): each["count"] for each in found["confusion"]}
    assert all(count == sum((r["truth"], r["label"]) == pair for r in rows) for pair, count in pairs.items())
    assert sum(pairs.values()) == 40
    for name in ("confusion.png", "calibration.png"):
        with Image.open(report / name) as image:
            assert min(image.size) > 300
            assert len(image.getcolors(1 << 20) or []) > 5
    assert predict(*given, "--truth=folder").exit_code == 8
