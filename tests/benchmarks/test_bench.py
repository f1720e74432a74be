"""The code of `make bench` at a small size: it measures, verifies, goes on, survives failures, and reports."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import caching, report
from benchmarks.__main__ import RESULTS
from benchmarks.conversions import COPY, OURS, WORKS
from benchmarks.inputs import InputCache, claim_data_folder
from benchmarks.measure import MeasureError, Usage, measure_command
from benchmarks.runner import Benchmark, BenchmarkJournal, RunSettings, measure_benchmarks
from benchmarks.training import OURS as OUR_TURNS
from benchmarks.training import PROMISED, THEIRS, TurnSettings, take_turns_in_ranks
from benchmarks.turns import compare_with_promises
from tests.support.running import is_dead, start, wait_until

pytestmark = pytest.mark.extended

# One input for both, and one peer that works: starting torch is most of the time. The other peer fails at once, since
# the input is no DeepSpeed checkpoint with the script in it.
FAILING = "zero_to_fp32"
SMALL_WORKS = (WORKS["torch-dcp"], replace(WORKS["safetensors-dcp"], source="torch", peer=FAILING))

SMALL_BENCHMARKS = [Benchmark(work.name, "conversions:measure_conversion", work.about) for work in SMALL_WORKS]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return RunSettings(size_bytes=10_000_000, runs=1, time_limit=60, data=tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def journal(settings):
    """Of a run of the small works."""
    journal = BenchmarkJournal(settings.data / "results.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        for work in SMALL_WORKS:
            patch.setitem(WORKS, work.name, work)
        measure_benchmarks(SMALL_BENCHMARKS, settings, settings.size_bytes, journal, fresh=False)
    return journal


@pytest.fixture
def works(journal):
    """The small works, as measured."""
    return [report.MeasuredWork(work, journal.records[work.name]) for work in SMALL_WORKS]


def test_every_contestant_is_measured_in_every_way_and_its_output_is_equal_to_the_source(works):
    for measured in works:
        work, record = measured.work, measured.record
        wanted = [(contestant, way) for contestant, way in work.list_slots() if contestant != FAILING]
        assert sorted((run["contestant"], run["way"]) for run in record["runs"]) == sorted(wanted)
        assert record["checks"] == dict.fromkeys(set(work.contestants) - {FAILING}, "")


def test_a_failure_is_written_down_and_stops_nothing(works):
    assert [set(measured.record["failures"]) for measured in works] == [set(), {FAILING}]
    assert "No such file" in works[1].record["failures"][FAILING]
    assert works[1].peer is None


def test_what_is_measured_is_plausible(works):
    for run in (run for measured in works for run in measured.record["runs"]):
        assert run["called_write_bytes"] >= 10_000_000 * 0.9
        assert run["peak_bytes"] > 5_000_000
        assert run["cached_share"] == (1 if run["way"] == "warm" else pytest.approx(0, abs=caching.MAX_COLD_SHARE))


def test_the_same_command_goes_on_where_it_was(journal, settings, tmp_path):
    again = BenchmarkJournal(journal.path)
    elsewhere = replace(settings, data=tmp_path / "data")
    measure_benchmarks(SMALL_BENCHMARKS, elsewhere, settings.size_bytes, again, fresh=False)
    assert {path.name for path in settings.data.iterdir()} == {"inputs", "log", journal.path.name}
    assert again.records == journal.records
    assert not (tmp_path / "data").exists()


def test_the_table_and_the_picture_come_out(journal, works, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "README_WORKS", [work.name for work in SMALL_WORKS])
    folder = tmp_path / "results"
    report.write_report(journal, folder)
    table = (folder / "table.md").read_text()
    picture = (folder / "picture.svg").read_text()
    for measured in works:
        assert f"## {measured.work.about}" in table
        assert f"{measured.compute_ratio(OURS, COPY):.2f}" in table
        assert f">{measured.work.about}</text>" in picture
    assert "torch_to_dcp" in table
    assert f">{FAILING}: fails</text>" in report.draw_picture(works)


def test_the_picture_is_that_of_the_results():
    works = report.get_measured_works(BenchmarkJournal(RESULTS / "results.jsonl"))
    shown = [measured for measured in works if measured.work.name in report.README_WORKS]
    assert len(shown) == 6
    assert (RESULTS / "picture.svg").read_text() == report.draw_picture(shown), (
        "write it again with python -m benchmarks --report"
    )


def test_the_page_gets_the_whole_and_readme_a_few_rows(journal, works, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "README_WORKS", (SMALL_WORKS[0].name,))
    readme, page = tmp_path / "README.md", tmp_path / "benchmarks.md"
    for path, name in ((readme, report.README_SECTION), (page, report.PAGE_SECTION)):
        path.write_text("before\n{}\nold\n{}\nafter\n".format(*report.get_markers(name)))
    report.write_report(journal, tmp_path / "results", readme, page)
    few, whole = readme.read_text(), page.read_text()
    for measured in works:
        row = f"| {measured.work.about} |"
        assert row in whole
        assert (row in few) == (measured.work.name in report.README_WORKS)
    for measured in report.get_measured_works(journal):
        promises = {promise: f"- {measured.work.about}: {promise}" for promise in measured.list_promises()}
        assert all((line in whole) != promise.startswith("kept") for promise, line in promises.items())
        assert all(line in (tmp_path / "results" / "table.md").read_text() for line in promises.values())
    assert "Promised" not in few and "\nold\n" not in few + whole
    assert all(text.startswith("before\n") and text.endswith("\nafter\n") for text in (few, whole))


def test_a_part_is_measured_once_and_one_that_fails_stops_no_other(settings, tmp_path, monkeypatch):
    asked = replace(settings, data=tmp_path / "data")
    parts = [
        Benchmark("absent", "commands:fail", "Absent"),
        Benchmark("memory", "commands:measure_memory", "Memory by size"),
    ]
    monkeypatch.setattr("benchmarks.commands.fail", _fail, raising=False)
    monkeypatch.setattr("benchmarks.commands.SIZES", (1,))
    journal = BenchmarkJournal(tmp_path / "results.jsonl")
    for _ in range(2):
        with pytest.raises(MeasureError, match=r"^absent: not here$"):
            measure_benchmarks(parts, asked, 10_000_000, journal, fresh=False)
        assert journal.records.keys() == {"machine", "memory"}
        assert journal.records["memory"]["lines"][2].startswith("| 0.01 GB | ")
    report.write_report(journal, tmp_path)
    assert "\n## Memory by size" in (tmp_path / "table.md").read_text()


def _fail(name: str, settings: RunSettings) -> list[str]:
    raise MeasureError("not here")


def used(code: str, log: Path, time_limit: float = 60) -> Usage:
    return measure_command([sys.executable, "-S", "-c", code], log, time_limit=time_limit)


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path):
    code = f"import os, time; os.fork(); open(f'{tmp_path}/{{os.getpid()}}', 'w'); time.sleep(100)"
    usage = used(code, tmp_path / "log", time_limit=3)
    assert usage.failure == "not done in 3 s"
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == 2
    wait_until(lambda: all(map(is_dead, pids)), 30)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_run_that_is_ended_leaves_no_process_and_no_half_input(number, code, tmp_path):
    """While the processes that make an input start."""
    folders = ["--data", tmp_path / "data", "--results", tmp_path / "results"]
    run = start("--works", "dcp-torch", "--size", "0.01", *folders, module="benchmarks")
    try:
        wait_until(lambda: len(run.processes()) >= 3)
        assert run.stop(number)[0] == code
        wait_until(lambda: not run.processes())
    finally:
        run.end()
    inputs = tmp_path / "data" / "inputs"
    assert not inputs.exists() or all(path.name.endswith(".partial") for path in inputs.iterdir())
    assert number == signal.SIGKILL or not list(inputs.glob("*"))


def test_memory_and_bytes_are_those_of_all_processes_and_not_of_who_asks(tmp_path):
    """Two processes of 60 MB each, which each hold it long enough to be seen."""
    code = "import os, time; os.fork(); block = b'x' * 60_000_000; time.sleep(1)"
    assert used(code, tmp_path / "log").peak_bytes > 115_000_000
    block = b"x" * 200_000_000
    assert used("pass", tmp_path / "log").peak_bytes < len(block) / 4
    code = "import subprocess; subprocess.run(['head', '-c', '5000000', '/dev/zero'])"
    usage = used(code, tmp_path / "log")
    assert 5_000_000 <= usage.called_write_bytes < 5_100_000
    assert (tmp_path / "log").stat().st_size == 5_000_000


def test_files_leave_the_cache_and_come_back(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "empty").touch()
    assert caching.drop_from_cache(tmp_path) <= caching.MAX_COLD_SHARE
    caching.read_into_cache(tmp_path)
    assert caching.get_cached_share(tmp_path) == 1


def test_a_folder_of_somebody_is_not_taken_for_data(tmp_path):
    """In its own folder too, what has not the name of an input is no input, and makes no room."""
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(MeasureError, match="no benchmark wrote"):
        claim_data_folder(tmp_path)
    claim_data_folder(tmp_path / "data")
    claim_data_folder(tmp_path / "data")
    ours, theirs = tmp_path / "data/inputs/dcp-100-0123abcd", tmp_path / "data/inputs/thesis"
    for folder in (ours, theirs):
        folder.mkdir(parents=True)
        (folder / "file").write_text("mine")
    assert not InputCache(tmp_path / "data/inputs").make_room(1 << 60)
    assert (ours.exists(), theirs.exists()) == (False, True)
    assert (tmp_path / "mine").read_text() == "mine"


TINY = TurnSettings(ranks=2, rounds=1, steps=20, size_bytes=2_000_000, model="cnn")


@pytest.mark.soak
@pytest.mark.parametrize("work", PROMISED)
def test_both_are_measured(work, tmp_path):
    turns = take_turns_in_ranks(work, TINY, tmp_path)
    [ours], [theirs] = turns[OUR_TURNS], turns[THEIRS]
    assert ours.wall > 0 and theirs.wall > 0
    assert (ours.cpu > 0) == (theirs.cpu > 0) == work.endswith("-step")
    assert list(tmp_path.iterdir()) == []
    assert f"| {work} | " in compare_with_promises({work: (turns[OUR_TURNS], turns[THEIRS])}, PROMISED)[-1]
