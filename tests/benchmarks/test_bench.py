"""The code of `make bench` at a small size: it measures, verifies, goes on, survives failures, and reports."""

import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import caching, report
from benchmarks.__main__ import RESULTS, main
from benchmarks.figures import results
from benchmarks.inputs import Cache, claim, count_elements, fit_llama
from benchmarks.journal import Journal
from benchmarks.measure import MeasureError, Usage, measured
from benchmarks.parts import Part, measure_parts
from benchmarks.picture import draw
from benchmarks.serving import BINARY, EIGHT, JSON, LOOP, ONE, PNG, ROW, Loaded, Requests, Turn, rows
from benchmarks.suite import Runner, Settings, slots
from benchmarks.training import OURS as OUR_TURNS
from benchmarks.training import PROMISED, THEIRS, Asked, take_turns_in_ranks
from benchmarks.turns import Taken, compare, ratio
from benchmarks.works import COPY, OURS, WORKS
from tests.support.running import is_dead, start, wait_until

pytestmark = pytest.mark.extended

BY_NAME = {work.name: work for work in WORKS}

# One input for both, and one peer that works: starting torch is most of the time. The other peer fails at once, since
# the input is no DeepSpeed checkpoint with the script in it.
FAILING = "zero_to_fp32"
SVG = "{http://www.w3.org/2000/svg}"
SMALL_WORKS = (BY_NAME["torch-dcp"], replace(BY_NAME["safetensors-dcp"], source="torch", peer=FAILING))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(size_bytes=10_000_000, runs=1, time_limit=60, data=tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def journal(settings):
    """Of a run of the small works."""
    made = Journal(settings.data / "results.jsonl")
    for work in SMALL_WORKS:
        Runner(work, settings, made).run()
    return made


def test_every_contestant_is_measured_in_every_way_and_its_output_is_equal_to_the_source(journal):
    for work in SMALL_WORKS:
        runs = [run for run in journal.find(kind="run", work=work.name) if run["contestant"] != FAILING]
        assert [run["reason"] for run in runs if run["status"] != "done"] == []
        wanted = {(contestant, way) for contestant, way in slots(work) if contestant != FAILING}
        assert {(run["contestant"], run["way"]) for run in runs} == wanted
        checks = {check["contestant"]: check for check in journal.find(kind="check", work=work.name)}
        assert checks.keys() == set(work.contestants) - {FAILING}
        assert [check for check in checks.values() if check["status"] != "equal"] == []


def test_a_failure_is_written_down_once_and_stops_nothing(journal):
    (failed,) = journal.find(kind="run", contestant=FAILING)
    assert failed["status"] == "failed" and "No such file" in failed["reason"]
    result = list(results(journal, SMALL_WORKS))[1]
    assert result.peer is None
    assert result.failures == {FAILING: failed["reason"]}


def test_what_is_measured_is_plausible(journal):
    for run in journal.find(kind="run", status="done"):
        assert run["called_write_bytes"] >= 10_000_000 * 0.9
        assert run["peak_bytes"] > 5_000_000
        assert run["cached_share"] == (pytest.approx(0, abs=caching.MAX_COLD_SHARE) if run["way"] == "cold" else 1)


def test_the_same_command_goes_on_where_it_was(journal, settings, tmp_path):
    again = Journal(journal.path)
    for work in SMALL_WORKS:
        Runner(work, replace(settings, data=tmp_path / "data"), again).run()
    assert {path.name for path in settings.data.iterdir()} == {"inputs", "log", journal.path.name}
    assert again.records == journal.records
    assert not (tmp_path / "data").exists()


def copied(journal: Journal, path: Path, **changes: Any) -> Journal:
    """With other values of all records."""
    made = Journal(path)
    for record in journal.records:
        made.add({**record, **changes})
    return made


def test_another_size_starts_afresh_with_an_input_of_its_own(journal, settings, tmp_path):
    other, work = copied(journal, tmp_path / "results.jsonl"), SMALL_WORKS[0]
    once = Runner(work, settings, Journal(tmp_path / "once.jsonl"))
    double = Runner(work, replace(settings, size_bytes=20_000_000), other)
    assert {record["work"] for record in other.records} == {SMALL_WORKS[1].name}
    assert double.source == once.inputs.path(work.source, 20_000_000) != once.source
    assert (once.key["size_bytes"], double.key["size_bytes"]) == (10_000_000, 20_000_000)


def test_the_table_and_the_picture_come_out(journal, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "README_WORKS", [work.name for work in SMALL_WORKS])
    folder = tmp_path / "results"
    report.write(journal, folder)
    table = (folder / "table.md").read_text()
    for result in results(journal):
        assert f"## {result.work.about}" in table
        assert f"{result.ratio(OURS, COPY):.2f}" in table
    assert "torch_to_dcp" in table
    picture = (folder / "picture.svg").read_text()
    assert all(f">{result.work.about}</text>" in picture for result in results(journal))
    assert f">{FAILING}: fails</text>" in draw(list(results(journal, SMALL_WORKS)))


def test_the_picture_is_that_of_the_results():
    found = [each for each in results(Journal(RESULTS / "results.jsonl")) if each.work.name in report.README_WORKS]
    assert len(found) == 6
    assert (RESULTS / "picture.svg").read_text() == draw(found), "write it again with python -m benchmarks --report"


def test_bars_are_as_long_as_the_seconds():
    """The axis is linear and begins at zero: ours and a peer's bar have the ratio of the seconds that stand above."""
    root = ElementTree.parse(RESULTS / "picture.svg").getroot()
    bars = [float(each.attrib["width"]) for each in root.iter(f"{SVG}rect") if "fill" in each.attrib]
    words = (re.search(r": ([\d.]+) s$", each.text or "") for each in root.iter(f"{SVG}text"))
    seconds = [float(found[1]) for found in words if found]
    assert len(seconds) == 11
    assert [bar for bar in bars if bar] == pytest.approx([each * bars[0] / seconds[0] for each in seconds], rel=0.05)


def test_the_table_says_what_is_of_other_code(journal, tmp_path):
    later, table = copied(journal, tmp_path / "results.jsonl"), tmp_path / "table.md"
    report.write(later, tmp_path)
    assert not re.search("earlier version|other versions", table.read_text())
    later.forget(keep={"kind": None}, work=SMALL_WORKS[1].name)
    for record in journal.find(work=SMALL_WORKS[1].name):
        later.add({**record, "code": "another"})
    report.write(later, tmp_path)
    about = BY_NAME[SMALL_WORKS[0].name].about
    assert f"earlier version of ckpt-tools than the others: {about}.\n" in table.read_text()
    report.write(copied(journal, tmp_path / "all.jsonl", code="0123456789ab"), tmp_path)
    said = "Measured with other versions of ckpt-tools than this one; digests of their code: 0123456789ab.\n"
    assert said in table.read_text()


def test_the_page_gets_the_whole_and_readme_a_few_rows(journal, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "README_WORKS", (SMALL_WORKS[0].name,))
    readme, page = tmp_path / "README.md", tmp_path / "benchmarks.md"
    for path, name in ((readme, report.README_SECTION), (page, report.PAGE_SECTION)):
        path.write_text("before\n{}\nold\n{}\nafter\n".format(*report.markers(name)))
    report.write(journal, tmp_path / "results", readme, page)
    few, whole = readme.read_text(), page.read_text()
    for result in results(journal):
        assert f"| {result.work.about} |" in whole
        assert (f"| {result.work.about} |" in few) == (result.work.name in report.README_WORKS)
        assert all(f"- {result.work.about}: {promise}" in whole for promise in result.promises())
    assert "Promised" not in few and "\nold\n" not in few + whole
    assert all(text.startswith("before\n") and text.endswith("\nafter\n") for text in (few, whole))


def test_readme_has_six_rows():
    assert len(report.README_WORKS) == 6 and set(report.README_WORKS) <= BY_NAME.keys()
    start, end = report.markers(report.README_SECTION)
    rows = report.README.read_text().partition(start)[2].partition(end)[0].strip().splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        f"| {work.about}" for work in WORKS if work.name in report.README_WORKS
    ]


def test_the_command_line_reports_without_measuring(journal, tmp_path, capsys):
    (tmp_path / "results.jsonl").write_bytes(journal.path.read_bytes())
    main(["--report", "--results", str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "table.md")
    assert (tmp_path / "results.jsonl").read_bytes() == journal.path.read_bytes()
    assert (tmp_path / "table.md").exists()


def test_a_work_that_is_not_there_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["--works", "dcp-torch", "alchemy"])
    assert "alchemy" in capsys.readouterr().err


def test_a_part_is_measured_once_and_one_that_fails_stops_no_other(settings, tmp_path, monkeypatch):
    asked = replace(settings, data=tmp_path / "data")
    small = Part("memory", "memory:measure_sizes", "Memory by size")
    monkeypatch.setattr("benchmarks.parts.PARTS", (Part("absent", "parts:fail", "Absent"), small))
    monkeypatch.setattr("benchmarks.parts.fail", _fail, raising=False)
    monkeypatch.setattr("benchmarks.memory.TIMES", (1,))
    journal = Journal(tmp_path / "results.jsonl")
    for _ in range(2):
        with pytest.raises(MeasureError, match=r"^absent: not here$"):
            measure_parts(("absent", "memory"), asked, 10_000_000, journal)
        (record,) = journal.records
        assert record["part"] == "memory" and record["lines"][2].startswith("| 0.01 GB | ")
    report.write(journal, tmp_path)
    assert "\n## Memory by size" in (tmp_path / "table.md").read_text()


def _fail(settings: Settings) -> list[str]:
    raise MeasureError("not here")


def test_only_what_is_between_the_markers_changes_and_both_documents_have_them(tmp_path):
    document = tmp_path / "page.md"
    start, end = report.markers("speed")
    document.write_text(f"before\n{start}\nold\n{end}\nafter\n")
    report.refresh(document, "speed", "new")
    assert document.read_text() == f"before\n{start}\nnew\n{end}\nafter\n"
    for document, name in ((report.README, report.README_SECTION), (report.PAGE, report.PAGE_SECTION)):
        start, end = report.markers(name)
        assert document.read_text().index(start) < document.read_text().index(end)


def used(code: str, log: Path, time_limit: float = 60) -> Usage:
    return measured([sys.executable, "-S", "-c", code], log, time_limit=time_limit, cwd=log.parent)


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path):
    code = "import os, time; os.fork(); open(str(os.getpid()), 'w'); time.sleep(100)"
    usage = used(code, tmp_path / "log", time_limit=3)
    assert usage.timed_out
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == 2
    wait_until(lambda: all(map(is_dead, pids)), 30)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak),
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


def test_a_line_cut_short_is_left_out(tmp_path):
    path = tmp_path / "results.jsonl"
    Journal(path).add({"kind": "run", "seconds": 1.5})
    with path.open("a") as file:
        file.write('{"kind": "ru')
    again = Journal(path)
    assert again.records == [{"kind": "run", "seconds": 1.5}]
    again.add({"kind": "check"})
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["run", "check"]


def test_files_leave_the_cache_and_come_back(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "empty").touch()
    assert caching.cool(tmp_path) <= caching.MAX_COLD_SHARE
    caching.warm(tmp_path)
    assert caching.cached_share(tmp_path) == 1


def test_a_model_has_about_the_size_that_was_asked_for_and_every_work_says_who_is_better_at_what():
    for num_elements in (10**6, 16 * 10**6, 375 * 10**6, 1125 * 10**6):
        model = fit_llama(num_elements)
        assert count_elements(model) == pytest.approx(num_elements, rel=0.07)
        assert model.hidden % 16 == model.ffn % 16 == model.vocab % 16 == 0
    for work in WORKS:
        assert work.contestants[:2] == (OURS, COPY)
        assert not work.target.peer or work.peer, work.name


def test_a_folder_of_somebody_is_not_taken_for_data(tmp_path):
    """In its own folder too, what has not the name of an input is no input, and makes no room."""
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(MeasureError, match="no benchmark wrote"):
        claim(tmp_path)
    claim(tmp_path / "data")
    claim(tmp_path / "data")
    ours, theirs = tmp_path / "data/inputs/dcp-100-0123abcd", tmp_path / "data/inputs/thesis"
    for folder in (ours, theirs):
        folder.mkdir(parents=True)
        (folder / "file").write_text("mine")
    assert not Cache(tmp_path / "data/inputs").make_room(1 << 60)
    assert (ours.exists(), theirs.exists()) == (False, True)
    assert (tmp_path / "mine").read_text() == "mine"


SAID = """Running 5s test @ http://127.0.0.1:35583
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   112.62ms   41.09ms 401.20ms   71.20%
  Latency Distribution
     50%  950.00us
     75%   60.00ms
     90%  101.00ms
     99%    1.25s
  2667 requests in 5.00s, 1.02MB read
{more}Requests/sec:    533.48
Transfer/sec:    208.40KB
"""


def test_what_wrk_says_is_read():
    assert Loaded.of(SAID.format(more="")) == Loaded(2667, 533.48, 0.00095, 1.25)


@pytest.mark.parametrize(
    "more", ["  Non-2xx or 3xx responses: 3\n", "  Socket errors: connect 0, read 2, write 0, timeout 0\n"]
)
def test_an_answer_that_is_an_error_ends_the_measurement(more):
    with pytest.raises(MeasureError, match="not every request was answered: " + more.strip()[:12]):
        Loaded.of(SAID.format(more=more))


def test_any_byte_can_be_asked():
    script = Requests("/p", [bytes([0, 34, 92]), b"a"], {"A": "b"}).script()
    assert script.startswith('local bodies, n = {"\\000\\034\\092","\\097"}, 0\nwrk.method = "POST"\n')
    assert 'wrk.headers["A"] = "b"\n' in script


def test_the_table_compares_the_service_round_by_round():
    rates = {
        LOOP: (1000, 100), ROW: (200, 200), JSON: (900, 90), BINARY: (900, 90), PNG: (500, 50), EIGHT: (400, 40),
        ONE: (100, 10), "LitServe": (300, 30),
    }  # fmt: skip
    lines = rows({who: [Turn(rate, 0.05, 0.08, 0.001, 4 * 10**8) for rate in each] for who, each in rates.items()})
    assert "| bare loop | 550 | 50.0 ms | 80.0 ms | 1.00 ms | 400 MB |" in lines
    assert "| ours, PNG / bare loop | 0.50 | at least 0.6 |" in lines
    assert "| ours, JSON / LitServe | 3.00 | at least 1.5 |" in lines
    assert "| ours, JSON, 8 clients / ours, JSON, 1 client | 4.00 | at least 3 |" in lines
    assert "| p50 of ours, JSON, 1 client | 50.0 ms | at most 103.0 ms |" in lines
    assert "| memory above LitServe's | 0 MB | at most 100 MB |" in lines


TINY = Asked(ranks=2, rounds=1, steps=20, size_bytes=2_000_000, model="cnn")


@pytest.mark.soak
@pytest.mark.parametrize("work", PROMISED)
def test_both_are_measured(work, tmp_path):
    turns = take_turns_in_ranks(work, TINY, tmp_path)
    [ours], [theirs] = turns[OUR_TURNS], turns[THEIRS]
    assert ours.wall > 0 and theirs.wall > 0
    assert (ours.cpu > 0) == (theirs.cpu > 0) == work.endswith("-step")
    assert list(tmp_path.iterdir()) == []
    assert f"| {work} | " in compare({work: (turns[OUR_TURNS], turns[THEIRS])}, PROMISED)[-1]


def test_a_ratio_is_the_median_of_the_rounds():
    ours, theirs = [Taken(wall, 3 * wall) for wall in (1, 3, 2)], [Taken(2, 2)] * 3
    assert (ratio("wall", ours, theirs), ratio("cpu", ours, theirs)) == (1, 3)


def test_a_work_whose_processor_time_is_not_measured_has_no_such_ratio():
    assert (
        compare({"resume": ([Taken(1)], [Taken(2)])}, PROMISED)[-1]
        == "| resume | 1.0000 s | 2.0000 s | 0.50 | at most 1.2 |  |  |"
    )
