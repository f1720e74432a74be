"""Progress, notices and errors on stderr: as a bar, as lines, as JSON, and in the library as logs."""

import json
import logging
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import ckpt_tools
from ckpt_tools.cli import reporting
from tests.cli.terminals import shown
from tests.support.commands import run_command

pytestmark = pytest.mark.quick


@pytest.fixture
def source(tmp_path):
    tensors = {f"t{number}": np.zeros(1 << 16, np.float32) for number in range(8)}
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def run(*words: object) -> tuple[int, list[str]]:
    """The exit code, and the lines of stderr."""
    done = run_command(*words)
    return done.code, done.err.splitlines()


def test_progress_is_json_where_that_or_logs_are_asked_for(source, tmp_path):
    code, lines = run("convert", source, tmp_path / "o.pt", "--progress", "json", "--workers", "1")
    events = [json.loads(line) for line in lines]
    assert code == 0
    assert events[0]["event"] == "start"
    assert [each["event"] for each in events[1:-1]] == ["progress"] * (len(events) - 2)
    last = events[-1]
    assert (last["event"], last["phase"], last["seconds_left"]) == ("done", "converting", 0)
    assert last["bytes_done"] == last["bytes_total"] == (tmp_path / "o.pt").stat().st_size
    assert {frozenset(each) for each in events} == {frozenset(last)}
    code, lines = run("convert", source, tmp_path / "p.pt", "--log-format", "json")
    assert code == 0 and {json.loads(line)["event"] for line in lines} >= {"start", "done"}


def drawn(monkeypatch: pytest.MonkeyPatch, *, is_json: bool, seconds: float, rows: list[tuple[int, int]]) -> None:
    """Reports ``rows`` of bytes, each ``seconds`` after the one before."""
    now = 100.0
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now)
    lines = reporting._ProgressLines("converting", is_json)
    for done, total in rows:
        now += seconds
        lines.update(done, total)
    lines.finish()


def test_lines_have_bytes_rate_and_time_left(monkeypatch, capsys):
    drawn(monkeypatch, is_json=False, seconds=3, rows=[(0, 10**9), (3 * 10**8, 10**9), (6 * 10**8, 10**9)])
    assert capsys.readouterr().err == "converting: 300.00 MB of 1.00 GB (30 %), 100.00 MB/s, 7 s left\n"


def test_a_run_that_continues_another_has_its_own_rate(monkeypatch, capsys):
    drawn(monkeypatch, is_json=True, seconds=2, rows=[(600, 1000), (700, 1000), (800, 1000)])
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [each["event"] for each in found] == ["start", "progress", "progress", "done"]
    assert [each["bytes_per_second"] for each in found] == [None, 50, 50, 50]
    assert [each["seconds_left"] for each in found] == [None, 6, 4, 4]


@pytest.mark.parametrize("mode", ["none", "plain", "auto"])
def test_short_work_needs_no_line(mode, source, tmp_path):
    assert run("convert", source, tmp_path / "o.pt", "--progress", mode) == (0, [])


def test_a_terminal_shows_a_bar(source, tmp_path):
    code, text = shown("convert", source, tmp_path / "o.pt", columns=80)
    assert code == 0
    assert "converting" in text
    code, text = shown("convert", source, tmp_path / "p.pt", "--progress", "plain", columns=80)
    assert code == 0
    assert "converting" not in text


def test_quiet_and_progress_contradict_each_other(source, tmp_path, monkeypatch):
    words = ("convert", source, tmp_path / "o.pt")
    for order in (("-q", "--progress", "json"), ("--progress", "plain", "--quiet")):
        code, lines = run(*words, *order)
        assert code == 2
        assert "contradict each other" in lines[-1]
    assert run(*words, "-q", "--progress", "none")[0] == 0
    monkeypatch.setenv("CKPT_TOOLS_QUIET", "1")
    assert len(run(*words, "--progress", "json", "--overwrite")[1]) >= 2
    monkeypatch.setenv("CKPT_TOOLS_PROGRESS", "json")
    assert run(*words, "--overwrite") == (0, [])
    monkeypatch.delenv("CKPT_TOOLS_QUIET")
    assert run(*words, "--overwrite", "-q") == (0, [])
    assert run("-q", *words, "--overwrite") == (0, [])
    assert run("-q", "formats") == (2, ["Error: formats has no --quiet"])


@pytest.mark.parametrize("before", [True, False])
def test_verbose_and_the_log_format_stand_before_or_behind(before):
    options = ["-v", "--log-format", "json"]
    words = [*options, "inspect", "no-such-file"] if before else ["inspect", "no-such-file", *options]
    code, lines = run(*words)
    found = json.loads(lines[-1])
    assert code == found["exit_code"] == 3
    assert (found["class"], found["level"]) == ("SourceNotFoundError", "error")
    assert found["message"] == "there is no file or folder no-such-file"
    assert found["traceback"].startswith("Traceback")


def test_errors_of_usage_are_json_too():
    for words in (["convert", "a", "--log-format=json"], ["--log-format", "json", "convrt"]):
        code, lines = run(*words)
        assert code == 2
        assert [(each["class"], each["exit_code"]) for each in map(json.loads, lines)] == [("UsageError", 2)]


def test_notices_are_json_too(capsys):
    reporting.read_log_options(["--log-format", "json"])
    with reporting.log_to_stderr(quiet=False):
        logging.getLogger("ckpt_tools.stores").warning("no answer yet")
        logging.getLogger("ckpt_tools.stores").info("a decision")
    reporting.read_log_options([])
    (found,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (found["level"], found["logger"], found["message"]) == ("warning", "ckpt_tools.stores", "no answer yet")
    assert found["time"].endswith("+00:00")


def test_the_end_on_a_signal_is_json_too():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a.pt"
        command = [sys.executable, "-m", "ckpt_tools", "--log-format", "json", "inspect", url]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode == 143
    assert (json.loads(said[-1])["exit_code"], json.loads(said[-1])["class"]) == (143, "Stopped")


def test_the_library_logs_decisions_and_notes(source, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "ckpt_tools"):
        report = ckpt_tools.convert(source, tmp_path / "o.pt", dtype="bf16")
    said = {record.name: record.getMessage() for record in caplog.records}
    assert said["ckpt_tools.conversion"].startswith("safetensors to torch: ")
    notes = [record.getMessage() for record in caplog.records if record.name == "ckpt_tools.notes"]
    assert notes == [f"{note.outcome.value}: {note.what} ({note.why})" for note in report.notes]
    assert notes
