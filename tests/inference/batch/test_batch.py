from __future__ import annotations

import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from pyarrow import parquet

from ckpt_tools.errors import DestinationExistsError
from inference.batch import inputs as inputs_module
from inference.batch import pipeline, progress
from inference.batch.__main__ import main
from inference.batch.items import Item
from inference.batch.output import Output, Run, Writer, open_output
from inference.batch.pipeline import AHEAD, predicted
from inference.batch.rows import Columns, Row
from inference.models.loading import load_model
from inference.models.predictor import load_predictor
from inference.models.results import Prediction
from tests.inference.conftest import FORMS
from tests.training.predictions import all_logits
from training.config.options import DATASETS
from training.data.datasets import to_input
from training.loop import evaluation
from training.models.config_json import LABELS


def predict(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def rows_of(out: Path) -> list[dict[str, Any]]:
    if out.suffix == ".parquet":
        return parquet.read_table(out).to_pylist()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_predictions_are_those_of_the_model(forms, digits, tmp_path):
    out = tmp_path / "predictions.jsonl"
    result = predict("--model", forms / "model.safetensors", "--input=digits", f"--output={out}")
    with torch.no_grad():
        expected = load_model(forms / "model.pt")(to_input(digits.pixels)).softmax(1)
    rows = rows_of(out)
    assert [row["name"] for row in rows] == [str(number) for number in range(360)]
    assert [row["truth"] for row in rows] == digits.labels.tolist()
    assert torch.tensor([row["probabilities"] for row in rows]).allclose(expected, atol=1e-5)
    right = sum(row["label"] == row["truth"] for row in rows)
    assert result.stdout.splitlines() == [f"360 predictions in {out}", f"accuracy: {right / 360:.4f} ({right} of 360)"]


def test_every_form_and_both_outputs_agree(forms, image_folder, tmp_path):
    written = []
    for form, suffix in (*((form, ".jsonl") for form in FORMS), (FORMS[0], ".parquet")):
        out = tmp_path / f"{form}{suffix}"
        assert predict("--model", forms / form, "--input", image_folder, f"--output={out}").exit_code == 0
        written.append(rows_of(out))
    assert all(rows == written[0] for rows in written)


def test_a_folder_of_images_gives_the_answers_of_the_dataset(forms, image_folder, tmp_path):
    of_dataset, of_folder = tmp_path / "dataset.jsonl", tmp_path / "folder.jsonl"
    predict("--model", forms / "model.pt", "--input=digits", f"--output={of_dataset}")
    result = predict("--model", forms / "model.pt", f"--input={image_folder}", f"--output={of_folder}")
    assert "accuracy" not in result.stdout
    rows = rows_of(of_folder)
    assert [row["name"] for row in rows] == [f"{number:03d}.png" for number in range(40)]
    assert {row["truth"] for row in rows} == {None}
    expected = [(row["label"], row["probabilities"]) for row in rows_of(of_dataset)[:40]]
    assert [(row["label"], row["probabilities"]) for row in rows] == expected


def test_labels_vary(forms, image_folder, tmp_path):
    """The model of these tests answers more than one class, so that equal answers mean something."""
    out = tmp_path / "out.jsonl"
    predict("--model", forms / "sharded", f"--input={image_folder}", f"--output={out}")
    assert len({row["label"] for row in rows_of(out)}) > 1


@pytest.mark.parametrize(
    ("form", "args", "code", "sentence"),
    [
        ("model.pt", ["--input=digits", "--output=x.csv"], 2, "--output ends in .jsonl or .parquet"),
        ("model.pt", ["--input=digits", "--output=x.jsonl", "--resume", "--overwrite"], 2, "--resume or --overwrite"),
        ("model.pt", ["--input=fashion-mnist", "--output=x.jsonl"], 2, "needs --data-root"),
        ("model.pt", ["--input=digits", "--data-root=.", "--output=x.jsonl"], 2, "for --input fashion-mnist alone"),
        ("model.pt", ["--input=digits", "--truth=label", "--output=x.jsonl"], 2, "not for digits, which knows its"),
        ("model.pt", ["--input=digits", "--workers=2", "--output=x.jsonl"], 2, "--workers is for --runner ray"),
        ("model.pt", ["--input=digits", "--top=0", "--output=x.jsonl"], 2, "--top is a number from 1, not 0"),
        ("model.pt", ["--input=digits", "--device=gpu", "--output=x.jsonl"], 2, "--device gpu is not a device"),
        ("model.pt", ["--input=/none", "--output=x.jsonl"], 3, "no file or folder /none"),
        ("model.pt", ["--input=.", "--output=x.jsonl"], 3, ". has no file that can be predicted"),
        ("none.pt", ["--input=digits", "--output=x.jsonl"], 3, "there is no file or folder"),
        ("model.pt", ["--input=digits", "--output=nodir/x.jsonl"], 5, "the folder of --output, nodir, does not exist"),
        ("model.pt", ["--input=digits", "--output=/proc/x.jsonl"], 5, "/proc"),
        (
            "model.pt",
            ["--input=digits", "--output=x.jsonl", "--report=no/r"],
            5,
            "the folder of --report, no, does not",
        ),
    ],
)
def test_errors_are_one_sentence(form, args, code, sentence, forms, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = predict("--model", forms / form, *args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_datasets_are_those_of_training_that_have_labels_of_their_own():
    assert tuple(name for name in DATASETS if name in LABELS) == inputs_module.DATASETS


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
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_broken_image_is_a_row_and_disturbs_no_other(suffix, forms, image_folder, tmp_path):
    broken, mixed = tmp_path / "broken", tmp_path / "mixed"
    broken.mkdir()
    names = write_broken_images(broken, image_folder / "000.png")
    shutil.copytree(image_folder, mixed)
    write_broken_images(mixed, image_folder / "000.png")
    out, expected = tmp_path / f"mixed{suffix}", tmp_path / f"whole{suffix}"
    assert predict("--model", forms / "model.pt", f"--input={image_folder}", f"--output={expected}").exit_code == 0
    result = predict("--model", forms / "model.pt", f"--input={mixed}", f"--output={out}")
    assert (result.exit_code, result.stdout) == (6, f"40 predictions in {out}\n")
    first = ", ".join(names[:3])
    assert result.stderr == (
        f"Error: 7 of 47 inputs could not be predicted: {first} and 4 more; their rows in {out} say why\n"
    )
    rows = rows_of(out)
    assert [row["name"] for row in rows] == sorted([*names, *(row["name"] for row in rows_of(expected))])
    assert [row for row in rows if row["error"] is None] == rows_of(expected)
    failed = {row["name"]: row for row in rows if row["error"] is not None}
    assert sorted(failed) == names
    assert all(name in row["error"] for name, row in failed.items())
    assert all(row["label"] is row["top"] is row["probabilities"] is None for row in failed.values())
    assert {path.name for path in tmp_path.iterdir()} == {"broken", "mixed", f"mixed{suffix}", f"whole{suffix}"}


def test_images_that_are_all_broken_still_end_with_a_file(forms, image_folder, tmp_path):
    folder, out = tmp_path / "images", tmp_path / "x.jsonl"
    folder.mkdir()
    (folder / "a.png").write_text("text")
    result = predict("--model", forms / "model.pt", f"--input={folder}", f"--output={out}")
    assert result.exit_code == 6
    assert "1 of 1 inputs could not be predicted: a.png; their" in result.stderr
    assert [row["error"] for row in rows_of(out)] == [f"{folder / 'a.png'} is not an image file that can be read"]


def test_predictions_have_the_bits_of_one_pass_over_all(forms, digits, tmp_path):
    """Reading a chunk at a time must not move a bit of what a run's own evaluation gives."""
    out = tmp_path / "x.jsonl"
    predict("--model", forms / "model.pt", "--input=digits", f"--output={out}")
    logits = all_logits(evaluation.plain_logits(load_model(forms / "model.pt")), digits.pixels)
    assert [row["probabilities"] for row in rows_of(out)] == torch.softmax(logits, dim=1).tolist()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_one_image_file_is_one_row(suffix, forms, image_folder, tmp_path):
    out = tmp_path / f"x{suffix}"
    assert (
        predict("--model", forms / "model.pt", f"--input={image_folder / '003.png'}", f"--output={out}").exit_code == 0
    )
    assert [row["name"] for row in rows_of(out)] == ["003.png"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_name_that_is_not_utf_8_is_written_with_escapes(suffix, forms, image_folder, tmp_path):
    folder, out = tmp_path / "images", tmp_path / f"x{suffix}"
    folder.mkdir()
    shutil.copy(image_folder / "000.png", os.fsencode(folder) + b"/\xe4.png")
    (folder / "\x1b[2J.png").write_text("text")
    result = predict("--model", forms / "model.pt", f"--input={folder}", f"--output={out}")
    assert result.exit_code == 6
    assert "\x1b" not in result.stderr
    assert [row["name"] for row in rows_of(out)] == ["\x1b[2J.png", "\\xe4.png"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_existing_file_is_replaced_only_if_asked(suffix, forms, image_folder, tmp_path):
    out, other = tmp_path / f"x{suffix}", tmp_path / "other.jsonl"
    for path in (out, other):
        path.write_text("mine")
    result = predict("--model", forms / "model.pt", f"--input={image_folder}", f"--output={out}")
    assert (result.exit_code, out.read_text()) == (8, "mine")
    assert "--overwrite replaces it" in result.stderr
    assert (
        predict("--model", forms / "model.pt", f"--input={image_folder}", f"--output={out}", "--overwrite").exit_code
        == 0
    )
    assert len(rows_of(out)) == 40
    assert other.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == sorted([out, other])


def test_a_folder_is_never_replaced(forms, image_folder, tmp_path):
    out = tmp_path / "x.jsonl"
    out.mkdir()
    assert (
        predict("--model", forms / "model.pt", f"--input={image_folder}", f"--output={out}", "--overwrite").exit_code
        == 8
    )
    assert out.is_dir()


@pytest.mark.parametrize("suffix", [".unfinished", ".unfinished-columns", ".unfinished-run"])
def test_a_file_of_somebody_else_beside_it_is_never_replaced(suffix, forms, image_folder, tmp_path):
    out, other = tmp_path / "x.parquet", tmp_path / f"x.parquet{suffix}"
    other.write_text("mine")
    args = ("--model", forms / "model.pt", f"--input={image_folder}", f"--output={out}", "--overwrite")
    result = predict(*args)
    assert (result.exit_code, other.read_text()) == (8, "mine")
    assert str(other) in result.stderr


def test_what_a_kill_left_is_replaced_if_asked(forms, image_folder, tmp_path):
    """By a kill while the Parquet file was written, and by one in the middle of the first line."""
    out = tmp_path / "x.parquet"
    for rows in (b'{"name": "a", "label": 1', b'{"na'):
        (tmp_path / "x.parquet.unfinished").write_bytes(rows)
        (tmp_path / "x.parquet.unfinished-columns").write_bytes(b"PAR1 and no end")
        args = ("--model", forms / "model.pt", f"--input={image_folder}", f"--output={out}")
        assert predict(*args, "--overwrite").exit_code == 0
        assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def write_one(writer: Writer) -> None:
    writer.begin(Run("model", "input", "options"), Columns("label", None, 1), lambda row: None)
    writer.write([Row("a", Prediction.of(label=0, probabilities=(1.0,)), None, None)])


def test_a_second_run_on_the_same_file_is_refused(forms, image_folder, tmp_path):
    out = tmp_path / "x.jsonl"
    output = Output(out, overwrite=False)
    with open_output(output) as writer:
        write_one(writer)
        for option in ("--quiet", "--overwrite"):
            result = predict("--model", forms / "model.pt", f"--input={image_folder}", f"--output={out}", option)
            assert result.exit_code == 8
            assert "another run is writing to" in result.stderr
    assert [row["name"] for row in rows_of(out)] == ["a"]


def test_a_file_that_appeared_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "x.jsonl"

    def run() -> None:
        with open_output(Output(out, overwrite=False)) as writer:
            write_one(writer)
            out.write_text("mine")

    with pytest.raises(DestinationExistsError) as raised:
        run()
    assert out.read_text() == "mine"
    assert raised.value.__notes__ == [f"the 1 rows that were done are kept in {out}.unfinished; --resume continues"]


# --- work done is kept


BATCH = ("inference.batch",)
CKPT_TOOLS_PREDICT = ("ckpt_tools", "predict")


def start(*args: object, module: Sequence[str] = BATCH, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *module, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_for_rows(path: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        if path.exists() and path.stat().st_size > 20_000:
            return
        time.sleep(0.002)
    pytest.fail(f"it ended before it was told to: {process.communicate()}")


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        pytest.param(BATCH, signal.SIGKILL, -9, marks=pytest.mark.extended),
        pytest.param(BATCH, signal.SIGTERM, 143, marks=pytest.mark.soak),
        pytest.param(BATCH, signal.SIGINT, 130, marks=pytest.mark.soak),
        pytest.param(BATCH, signal.SIGHUP, 129, marks=pytest.mark.soak),
        pytest.param(CKPT_TOOLS_PREDICT, signal.SIGTERM, 143, marks=pytest.mark.extended),
        pytest.param(CKPT_TOOLS_PREDICT, signal.SIGINT, 130, marks=pytest.mark.soak),
    ],
)
def test_a_run_that_is_ended_keeps_what_it_predicted(module, number, code, forms, many_images, tmp_path):
    out = tmp_path / "x.parquet"
    unfinished = tmp_path / "x.parquet.unfinished"
    args = ("--model", forms / "model.pt", f"--input={many_images}", f"--output={out}", "--quiet")
    with start(*args, module=module, preexec_fn=default_signals) as process:
        wait_for_rows(unfinished, process)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (code, "")
    lines = unfinished.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    assert len(rows) > 30
    assert [row["name"] for row in rows] == [f"{number:04d}.png" for number in range(len(rows))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.parquet.unfinished", "x.parquet.unfinished-run"]
    if number != signal.SIGKILL:
        kept = f"the {len(rows):,} rows that were done are kept in {unfinished}; --resume continues"
        assert stderr == f"stopped by {number.name}; {kept}\n"
    check_next_run(forms, many_images / "0000.png", out)


def default_signals() -> None:
    """Tests may run where SIGINT is ignored, which processes inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def check_next_run(forms: Path, image: Path, out: Path) -> None:
    """It does not replace what was kept unless it is asked to, and leaves nothing then."""
    kept = out.with_name(f"{out.name}.unfinished").read_bytes()
    result = predict("--model", forms / "model.pt", f"--input={image}", f"--output={out}")
    assert result.exit_code == 8
    assert "x.parquet.unfinished holds the rows of a run that did not finish; --resume" in result.stderr
    assert out.with_name(f"{out.name}.unfinished").read_bytes() == kept
    assert predict("--model", forms / "model.pt", f"--input={image}", f"--output={out}", "--overwrite").exit_code == 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@contextmanager
def limited_files() -> Iterator[None]:
    """No file of this process grows over 20,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_full_disk_keeps_what_was_predicted(suffix, forms, tmp_path):
    """A file may have fewer bytes than the 360 rows take."""
    out = tmp_path / f"x{suffix}"
    args = ("--model", forms / "model.pt", "--input=digits", f"--output={out}", "--quiet")
    with limited_files():
        result = predict(*args)
    assert result.exit_code == 5
    unfinished = tmp_path / f"x{suffix}.unfinished"
    assert sorted(tmp_path.iterdir()) == [unfinished, tmp_path / f"x{suffix}.unfinished-run"]
    num_rows = unfinished.read_text().count("\n")
    assert num_rows >= 30
    assert (
        result.stderr
        == f"Error: File too large; the {num_rows} rows that were done are kept in {unfinished}; --resume continues\n"
    )


def test_a_run_that_fails_before_the_first_prediction_leaves_nothing(forms, tmp_path):
    (tmp_path / "model.pt").write_text("not a model")
    result = predict("--model", tmp_path / "model.pt", "--input=digits", f"--output={tmp_path / 'x.jsonl'}")
    assert result.exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


# --- memory


@pytest.mark.parametrize(
    ("window_bytes", "passes"),
    [
        (0, 1),
        (2 * evaluation.CHUNK * 28 * 28, 2),
        pytest.param(1 << 40, 16, marks=pytest.mark.extended),
    ],
)
def test_some_windows_of_images_are_held(window_bytes, passes, forms, image_folder, monkeypatch):
    """Of as many passes as fit, and always of one."""
    monkeypatch.setattr(pipeline, "WINDOW_BYTES", window_bytes)
    predictor = load_predictor(forms / "model.pt")
    image = (image_folder / "000.png").read_bytes()
    window, num_taken = passes * evaluation.CHUNK, 0

    def items() -> Iterator[Item]:
        nonlocal num_taken
        for number in range(6 * window):
            num_taken += 1
            yield Item(str(number), image, None, number / (6 * window))

    num_rows = 0
    for rows in predicted(items(), predictor):
        assert len(rows) == window
        assert num_taken - num_rows <= (AHEAD + 1) * window
        num_rows += len(rows)
    assert num_rows == 6 * window


def peak_bytes(images: Path, model: Path, out: Path) -> int:
    """Of a process over the files of a folder, at its end."""
    program = (
        "import resource, sys, torch; torch.set_num_threads(1)\n"
        "from inference.batch.__main__ import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", program, "--model", str(model), f"--input={images}", f"--output={out}", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.extended
def test_memory_does_not_grow_with_the_input(forms, many_images, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for number in range(500):
        os.link(many_images / f"{number:04d}.png", few / f"{number:04d}.png")
    peaks = [peak_bytes(folder, forms / "model.pt", tmp_path / f"{folder.name}.jsonl") for folder in (few, many_images)]
    # Pixels and rows of 4,500 images more would be 10 MB; their names are 0.3 MB.
    assert peaks[1] - peaks[0] < 4_000_000, peaks


# --- progress


def test_progress_is_a_line_now_and_then(forms, image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_LINE_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "PASSES", 1)
    args = ["--model", forms / "model.pt", f"--input={image_folder}", f"--output={tmp_path / 'x.jsonl'}", "--overwrite"]
    lines = predict(*args).stderr.splitlines()
    assert [re.sub(r"[\d,.]+/s, [\d:]+ left", "RATE", line) for line in lines] == [
        "predicting: 30 done, RATE (75 %)",
        "predicting: 40 done, RATE (100 %)",
    ]
    assert predict(*args, "--quiet").stderr == ""


@pytest.mark.extended
def test_progress_on_a_terminal_is_a_bar(forms, image_folder, tmp_path):
    mine, its = pty.openpty()
    command = [sys.executable, "-m", "inference.batch", "--model", str(forms / "model.pt"), f"--input={image_folder}"]
    command += [f"--output={tmp_path / 'x.jsonl'}"]
    done = subprocess.run(command, stderr=its, stdout=subprocess.PIPE, check=False)
    os.close(its)
    assert done.returncode == 0
    assert b"predicting" in os.read(mine, 65536)
    os.close(mine)
