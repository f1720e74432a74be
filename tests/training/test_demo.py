"""The demo's steps on the small runs, and what it takes for the demo to fail."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ckpt_tools.errors import DestinationExistsError
from inference.demo import FORMAT_FILES, Row, check_results, convert_and_check, describe, remove_former, table_of
from training.checkpoints.locking import LOCK_NAME, only_run
from training.config.train_config import TrainConfig

GOOD = Row(
    checkpoint="fsdp2, 2 ranks",
    format="safetensors",
    file="model.safetensors",
    files=1,
    bytes=4_000_000,
    seconds=0.25,
    tensors=128,
    tensors_equal=128,
    total=360,
    run_correct=342,
    file_correct=342,
    predictions_equal=360,
)


@pytest.mark.parametrize("format_name", FORMAT_FILES)
@pytest.mark.parametrize(("name", "tensors"), [("fsdp2", 8), ("zero3-vit", 128)])
def test_a_file_predicts_as_its_run_did(name, tensors, format_name, small_run, tmp_path):
    run = small_run(name)
    row = convert_and_check(run, format_name, tmp_path)
    assert (row.tensors, row.tensors_equal) == (tensors, tensors)
    assert (row.total, row.predictions_equal) == (360, 360)
    assert row.file_correct == row.run_correct == run.correct
    assert row.files == 1
    assert row.bytes == (tmp_path / FORMAT_FILES[format_name]).stat().st_size


def test_a_file_of_another_epoch_is_found_out(small_run, tmp_path):
    """The predictions of a run are its last epoch's: a file of the first has to differ, or the demo proves nothing."""
    run = small_run("fsdp2")
    earlier = replace(run, checkpoint=str(Path(run.checkpoint).with_name("epoch_0001")))
    row = convert_and_check(earlier, "safetensors", tmp_path)
    assert row.predictions_equal < row.total
    assert any("predictions differ" in sentence for sentence in row.failures())


def test_inspection_fits_a_line(small_run):
    line = describe(Path(small_run("zero3").checkpoint))
    assert "zero3, step 8, 105,866 parameters" in line
    assert "optimizer " in line
    assert "\n" not in line


def test_all_well_has_no_failures():
    assert GOOD.failures() == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tensors_equal": 127}, "1 of 128 tensors differ"),
        ({"predictions_equal": 359}, "1 of 360 predictions differ from the run's own"),
        ({"file_correct": 323}, "its accuracy of 0.8972 is under 0.9"),
    ],
)
def test_each_fault_is_a_failure(change, sentence):
    assert replace(GOOD, **change).failures() == [f"model.safetensors: {sentence}"]


def test_the_table_has_every_figure():
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table_of([GOOD]))
    for cell in ("fsdp2, 2 ranks", "safetensors", "4,000,000", "0.25", "128/128", "0.9500 (342/360)"):
        assert cell in captured.get()


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_a_former_run_is_removed(engine, small_run, tmp_path):
    """All that a run of the demo leaves, and the files that it makes of it; the demo records no events."""
    made = Path(small_run(engine).checkpoint).parents[1]
    shutil.copytree(made, tmp_path / engine, ignore=shutil.ignore_patterns("tensorboard"))
    within = shutil.copytree(made / "checkpoints/epoch_0001", tmp_path / engine / "checkpoints/epoch_0001_step_000006")
    shutil.copytree(within, within.with_name(".epoch_0001_step_000007.partial"))
    for name in (*FORMAT_FILES.values(), LOCK_NAME):
        (tmp_path / engine / name).write_text("")
    remove_former(tmp_path / engine)
    assert [path.name for path in (tmp_path / engine).iterdir()] == [LOCK_NAME]
    remove_former(tmp_path / engine)
    remove_former(tmp_path / "absent")


def test_a_run_at_work_is_left_alone(tmp_path):
    with only_run(TrainConfig(out=tmp_path / "fsdp2", engine="fsdp2")):
        (tmp_path / "fsdp2/result.json").write_text("its own")
        with pytest.raises(DestinationExistsError, match="another run is writing"):
            remove_former(tmp_path / "fsdp2")
    assert (tmp_path / "fsdp2/result.json").exists()


@pytest.mark.parametrize(
    "name", ["notes.txt", ".env", "src/main.py", "checkpoints/epoch_0001/notes.txt", "checkpoints/mine", "empty/"]
)
def test_a_folder_with_anything_else_is_left_alone(name, tmp_path):
    kept = tmp_path / "fsdp2/checkpoints/epoch_0001/.metadata"
    kept.parent.mkdir(parents=True)
    for path in (kept, tmp_path / "fsdp2" / name):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") and path != kept else path.write_text("mine")
    with pytest.raises(DestinationExistsError, match="that no demo wrote"):
        remove_former(tmp_path / "fsdp2")
    assert (kept.read_text(), (tmp_path / "fsdp2" / name).exists()) == ("mine", True)


def test_a_link_to_a_run_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/result.json").write_text("mine")
    (tmp_path / "fsdp2").symlink_to("mine")
    with pytest.raises(DestinationExistsError, match="is not a folder that a demo made"):
        remove_former(tmp_path / "fsdp2")
    assert (tmp_path / "mine/result.json").read_text() == "mine"


def test_only_results_of_a_demo_are_replaced(tmp_path):
    check_results(tmp_path / "absent.json")
    (tmp_path / "ours.json").write_text(json.dumps([GOOD.to_json()]))
    check_results(tmp_path / "ours.json")
    for text in ("mine", "{}", '[{"accuracy": 1}]', "[1]"):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(DestinationExistsError, match="was not written by a demo"):
            check_results(tmp_path / "results.json")
