"""The same work by several strategies: real runs, a case that fails, a command that is repeated, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import training
from training.loop.outlets import read_metrics
from training.studies.compare import CASE_NAME, main

ROOT = Path(training.__file__).parent.parent


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_cases_are_run_and_compared_and_one_that_fails_is_a_row(tmp_path):
    first, broken, last = "ddp", f"zero2 --deepspeed-config {tmp_path / 'none.json'}", "full_shard --async-save"
    small = ["--model=cnn", "--num-samples=64", "--batch-size=16", "--num-workers=2"]
    words, out = [*(f"--case={case}" for case in (first, broken, last)), "--", *small], tmp_path / "out"
    command = [sys.executable, "-m", "training.studies.compare", f"--out={out}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    found = json.loads((out / "comparison.json").read_text())
    rows = {row["case"]: row for row in found["cases"]}
    assert list(rows) == [first, broken, last]
    assert rows[broken]["figures"] is None and "none.json cannot be read" in rows[broken]["error"]
    assert rows[first]["figures"]["final_loss"] == pytest.approx(rows[last]["figures"]["final_loss"], rel=1e-5)
    for case in (first, last):
        figures = rows[case]["figures"]
        assert all(value > 0 for name, value in figures.items() if name != "cuda_peak"), figures
    stall, save = (rows[first]["figures"][name] for name in ("stall_seconds", "save_seconds"))
    assert stall == pytest.approx(save, abs=0.1)
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "comparison.md").read_text()
    assert f"| {broken} | " in table and "| failed " in table and "cannot be read" in table and "| ddp " in table
    [resumed] = [line for line in read_metrics(out / "ddp") if "resumed" in line]
    assert (resumed["resumed"], resumed["step"]) == ("epoch_0002", 8)
    assert [len(epoch["losses"]) for epoch in json.loads((out / "ddp/result.json").read_text())["history"]] == [4, 4]
    # The case that failed is tried again, no other.
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    again = CliRunner().invoke(main, [f"--out={out}", *words])
    assert (again.exit_code, again.output.count("done before")) == (1, 2)
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")} == before
    assert json.loads((out / "comparison.json").read_text()) == found
    other = CliRunner().invoke(main, [f"--out={out}", *words, "--seed=1"])
    assert other.exit_code == 8 and "holds something else than this case" in other.stderr


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--case=--cpu-offload"], 2, "--case \"--cpu-offload\": Invalid value for '--strategy': "),
        (["--case=zero2 --cpu-offload"], 2, '--case "zero2 --cpu-offload": --cpu-offload is for strategies of FSDP2'),
        (["--case=ddp", "--case=ddp"], 2, "two values of --case name the same folder"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_run(words, code, sentence, tmp_path):
    done = CliRunner().invoke(main, [f"--out={tmp_path / 'out'}", *words])
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1), done.output
    assert sentence in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_is_not_removed(tmp_path):
    (tmp_path / "ddp").mkdir()
    (tmp_path / "ddp" / "thesis").write_text("mine")
    done = CliRunner().invoke(main, [f"--out={tmp_path}", "--case=ddp"])
    assert done.exit_code == 8 and "holds something else than this case" in done.stderr
    assert (tmp_path / "ddp" / "thesis").exists() and not (tmp_path / "ddp" / CASE_NAME).exists()
