"""The batch command over images: the bits of its answers, the file that it writes, and what an end leaves of it."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from ckpt_tools.errors import DestinationExistsError
from inference.batch import pipeline, progress
from inference.batch.output import OutputFile, RowWriter, RunDigests, open_output
from inference.batch.rows import OutputColumns, OutputRow
from inference.models.loading import load_model
from inference.models.results import Prediction
from tests.inference import commands
from tests.inference.commands import predict, rows_of
from tests.training.predictions import all_logits
from training.data.datasets import to_input
from training.loop import evaluation

SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])


@pytest.fixture(scope="module")
def model(forms):
    return forms / "model.pt"


# --- the answers


@pytest.fixture(scope="module")
def expected(model, digits):
    """As training evaluates, in one pass over all."""
    logits = all_logits(evaluation.plain_logits(load_model(model)), digits.pixels)
    return torch.softmax(logits, dim=1).tolist()


def test_predictions_are_those_of_the_model(model, digits, expected, tmp_path):
    """Reading a chunk at a time does not move a bit of what a run's own evaluation gives."""
    out = tmp_path / "predictions.jsonl"
    result = predict(model, "digits", out)
    with torch.no_grad():
        plain = load_model(model)(to_input(digits.pixels)).softmax(1)
    rows = rows_of(out)
    assert [row["name"] for row in rows] == [str(number) for number in range(360)]
    assert [row["truth"] for row in rows] == digits.labels.tolist()
    assert [row["probabilities"] for row in rows] == expected
    assert torch.tensor(expected).allclose(plain, atol=1e-5)
    right = sum(row["label"] == row["truth"] for row in rows)
    assert result.stdout.splitlines() == [f"360 predictions in {out}", f"accuracy: {right / 360:.4f} ({right} of 360)"]


@pytest.mark.parametrize(
    ("model", "source", "out", "options", "code", "sentence"),
    [
        ("model.pt", "digits", "x.csv", "", 2, "--output ends in .jsonl or .parquet"),
        ("model.pt", "digits", "x.jsonl", "--resume --overwrite", 2, "--resume or --overwrite"),
        ("model.pt", "fashion-mnist", "x.jsonl", "", 2, "needs --data-root"),
        ("model.pt", "digits", "x.jsonl", "--workers=2", 2, "--workers is for --runner ray"),
        ("model.pt", "digits", "x.jsonl", "--device=gpu", 2, "--device gpu is not a device"),
        ("model.pt", ".", "x.jsonl", "", 3, ". has no file that can be predicted"),
        ("notes.txt", "digits", "x.jsonl", "", 4, "notes.txt"),
        ("model.pt", "digits", "nodir/x.jsonl", "", 5, "the folder of --output, nodir, does not exist"),
        ("model.pt", "digits", "x.jsonl", "--report=no/r", 5, "the folder of --report, no, does not"),
    ],
)
def test_errors_are_one_sentence_and_leave_nothing(
    model, source, out, options, code, sentence, forms, image_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    place = image_folder if model == "notes.txt" else forms
    result = predict(place / model, source, out, *options.split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert sentence in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: ") and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


# --- the file that is written


def write_broken_images(folder: Path, whole: Path) -> list[str]:
    """One broken image of each kind, between the whole ones by name; gives the names."""
    (folder / "000a.png").write_bytes(whole.read_bytes()[:100])
    (folder / "001a.jpg").write_text("not an image")
    (folder / "003a.png").symlink_to("nowhere")
    os.mkfifo(folder / "004a.png")
    Image.new("1", (9000, 9000)).save(folder / "005a.png")
    (folder / "006a.png").touch()
    (folder / "007a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "z\x1b[2J.png").write_text("text")
    return sorted(path.name for path in folder.iterdir())


@SUFFIXES
def test_a_broken_image_is_a_row_and_disturbs_no_other(suffix, model, image_folder, expected, tmp_path):
    """A name that is not UTF-8 is written with escapes."""
    broken, mixed, out = tmp_path / "broken", tmp_path / "mixed", tmp_path / f"mixed{suffix}"
    broken.mkdir()
    names = write_broken_images(broken, image_folder / "000.png")
    shutil.copytree(image_folder, mixed)
    write_broken_images(mixed, image_folder / "000.png")
    (mixed / "000.png").rename(os.fsdecode(os.fsencode(mixed) + b"/\xe4.png"))
    result = predict(model, mixed, out)
    assert (result.exit_code, result.stdout) == (6, f"40 predictions in {out}\n")
    assert "\x1b" not in result.stderr
    first = f"000a.png, 001a.jpg, 003a.png and {len(names) - 3} more"
    told = f"Error: {len(names)} of 48 inputs could not be predicted: {first}; their rows in {out} say why\n"
    assert result.stderr == told
    rows = rows_of(out)
    whole = [*(f"{number:03d}.png" for number in range(1, 40)), "\\xe4.png"]
    assert sorted(row["name"] for row in rows) == sorted([*names, *whole])
    good = {row["name"]: row["probabilities"] for row in rows if row["error"] is None}
    assert good == dict(zip(whole, [*expected[1:40], expected[0]], strict=True))
    failed = {row["name"]: row for row in rows if row["error"] is not None}
    assert sorted(failed) == names
    assert all(name.partition("\x1b")[0] in row["error"] for name, row in failed.items())
    assert all(row["label"] is row["top"] is row["probabilities"] is None for row in failed.values())
    assert {path.name for path in tmp_path.iterdir()} == {"broken", "mixed", out.name}


@SUFFIXES
def test_an_existing_file_is_replaced_only_if_asked(suffix, model, image_folder, tmp_path):
    out, other, image = tmp_path / f"x{suffix}", tmp_path / "other.jsonl", image_folder / "003.png"
    for path in (out, other):
        path.write_text("mine")
    result = predict(model, image, out)
    assert (result.exit_code, out.read_text()) == (8, "mine")
    assert "--overwrite replaces it" in result.stderr
    rows = commands.predicted(model, image, out, "--overwrite")
    assert [row["name"] for row in rows] == ["003.png"]
    assert other.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == sorted([out, other])


def test_what_somebody_else_has_there_is_never_replaced(model, image_folder, tmp_path):
    """A folder, and a file beside the output that a run would write for itself."""
    (tmp_path / "x.jsonl").mkdir()
    assert predict(model, image_folder, tmp_path / "x.jsonl", "--overwrite").exit_code == 8
    assert (tmp_path / "x.jsonl").is_dir()
    other = tmp_path / "x.parquet.unfinished"
    other.write_text("mine")
    result = predict(model, image_folder, tmp_path / "x.parquet", "--overwrite")
    assert (result.exit_code, other.read_text()) == (8, "mine")
    assert str(other) in result.stderr
    other.unlink()
    other.mkdir()
    (other / "notes").write_text("mine")
    assert predict(model, image_folder, tmp_path / "x.parquet", "--overwrite").exit_code == 0
    assert [path.name for path in other.iterdir()] == ["notes"]


@pytest.mark.parametrize("rows", [b'{"name": "a", "label": 1', b'{"na'])
def test_what_a_kill_left_is_replaced_if_asked(rows, model, image_folder, tmp_path):
    """By a kill while the Parquet file was written, and by one in the middle of the first line."""
    unfinished = tmp_path / "x.parquet.unfinished"
    unfinished.mkdir()
    (unfinished / "rows-000000000000.jsonl").write_bytes(rows)
    (unfinished / "whole").write_bytes(b"PAR1 and no end")
    assert predict(model, image_folder / "000.png", tmp_path / "x.parquet", "--overwrite").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def write_one(writer: RowWriter) -> None:
    writer.begin_run(RunDigests("model", "input", "options"), OutputColumns("label", None, 1), lambda row: None)
    writer.write([OutputRow("a", Prediction.from_outputs(label=0, probabilities=(1.0,)), None, None)])


def test_a_second_run_on_the_same_file_is_refused(model, image_folder, tmp_path):
    out = tmp_path / "x.jsonl"
    with open_output(OutputFile(str(out))) as writer:
        write_one(writer)
        for option in ("--quiet", "--overwrite"):
            result = predict(model, image_folder, out, option)
            assert result.exit_code == 8
            assert "another run is writing to" in result.stderr
    assert [row["name"] for row in rows_of(out)] == ["a"]


def test_a_file_that_appeared_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "x.jsonl"

    def run() -> None:
        with open_output(OutputFile(str(out))) as writer:
            write_one(writer)
            out.write_text("mine")

    with pytest.raises(DestinationExistsError) as raised:
        run()
    assert out.read_text() == "mine"
    assert raised.value.__notes__ == [f"the 1 rows that were done are kept in {out}.unfinished; --resume continues"]


# --- work done is kept

BATCH, CKPT_TOOLS_PREDICT = ("inference.batch",), ("ckpt_tools", "predict")


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        pytest.param(BATCH, signal.SIGKILL, -9, marks=pytest.mark.soak),
        pytest.param(BATCH, signal.SIGINT, 130, marks=pytest.mark.soak),
        pytest.param(CKPT_TOOLS_PREDICT, signal.SIGTERM, 143, marks=pytest.mark.extended),
    ],
)
def test_a_run_that_is_ended_keeps_what_it_predicted(module, number, code, model, many_images, tmp_path):
    """The next run does not replace what was kept unless it is asked to, and leaves nothing then."""
    out, unfinished = tmp_path / "x.parquet", tmp_path / "x.parquet.unfinished"
    command = [sys.executable, "-m", *module, "--model", model, "--input", many_images, "--output", out, "--quiet"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=default_signals) as process:
        while sum(path.stat().st_size for path in unfinished.glob("rows-*")) < 20_000:
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (code, "")
    kept = kept_rows(unfinished)
    rows = [json.loads(line) for line in kept.splitlines(keepends=True) if line.endswith("\n")]
    assert len(rows) > 30
    assert [row["name"] for row in rows] == [f"{number:04d}.png" for number in range(len(rows))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.parquet.unfinished"]
    if number != signal.SIGKILL:
        told = f"the {len(rows):,} rows that were done are kept in {unfinished}; --resume continues"
        assert stderr == f"stopped by {number.name}; {told}\n"
    image = many_images / "0000.png"
    result = predict(model, image, out)
    assert result.exit_code == 8
    assert "x.parquet.unfinished holds the rows of a run that did not finish; --resume" in result.stderr
    assert kept_rows(unfinished) == kept
    assert predict(model, image, out, "--overwrite").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def kept_rows(unfinished: Path) -> str:
    return "".join(part.read_text() for part in sorted(unfinished.glob("rows-*")))


def default_signals() -> None:
    """Tests may run where SIGINT is ignored, which processes inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def limited_files() -> Iterator[None]:
    """No file of this process grows over 20,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@SUFFIXES
def test_a_full_disk_keeps_what_was_predicted(suffix, model, tmp_path):
    """A file may have fewer bytes than the 360 rows take."""
    out, unfinished = tmp_path / f"x{suffix}", tmp_path / f"x{suffix}.unfinished"
    with limited_files():
        result = predict(model, "digits", out, "--quiet")
    assert result.exit_code == 5
    assert list(tmp_path.iterdir()) == [unfinished]
    num_rows = kept_rows(unfinished).count("\n")
    assert num_rows >= 30
    kept = f"the {num_rows} rows that were done are kept in {unfinished}; --resume continues"
    assert result.stderr == f"Error: File too large; {kept}\n"


# --- memory


PEAKS = """
import resource, sys, torch
from inference.batch.__main__ import main

torch.set_num_threads(1)
model, few, many, out = sys.argv[1:]
for name, source in (("few", few), ("many", many)):
    words = ["--model", model, "--input", source, "--output", f"{out}/{name}.jsonl", "--quiet"]
    main(words, standalone_mode=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.extended
def test_memory_does_not_grow_with_the_input(model, many_images, tmp_path):
    """Both runs are in one process, so that only the second's rows can be more than what the first needed."""
    few = tmp_path / "few"
    few.mkdir()
    for number in range(500):
        os.link(many_images / f"{number:04d}.png", few / f"{number:04d}.png")
    command = [sys.executable, "-c", PEAKS, model, few, many_images, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = [1024 * int(line) for line in done.stdout.splitlines() if line.isdigit()]
    # Pixels and rows of 4,500 images more would be 10 MB; their names are 0.3 MB.
    assert peaks[1] - peaks[0] < 4_000_000, peaks


# --- progress


def test_progress_is_a_line_now_and_then(model, image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "WINDOW_PASSES", 1)
    lines = predict(model, image_folder, tmp_path / "x.jsonl").stderr.splitlines()
    assert [re.sub(r"[\d,.]+/s, [\d:]+ left", "RATE", line) for line in lines] == [
        "predicting: 30 done, RATE (75 %)",
        "predicting: 40 done, RATE (100 %)",
    ]
    assert predict(model, image_folder, tmp_path / "x.jsonl", "--overwrite", "--quiet").stderr == ""
