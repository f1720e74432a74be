"""Killed at any system call that writes, a conversion leaves a destination that is absent, as it was, or complete, and
``--resume`` ends it with the same bits, writing only what was not done."""

import json
import os
import random
import subprocess
import sys

import pytest

from ckpt_tools.conversion.delta import FILE_NAME
from ckpt_tools.formats.safetensors.files import INDEX_NAME
from tests.end_to_end.crashes.cases import CASES, Case, done_bytes
from tests.end_to_end.crashes.runs import WRITE_SIDE, Call, Runs
from tests.support.sweep import spread, tiered

POINTS_IN_SAMPLE = 3
"""Of each writer and mode, in ``make test-all``; ``make soak`` takes them all."""

MODES = [(name, mode) for name in CASES for mode in ("fresh", "overwrite")]
BOTH = pytest.mark.parametrize(
    ("name", "mode"),
    tiered(MODES, test=["file-fresh", "dcp-overwrite"], extended=["file-overwrite", "zero3-fresh", "average-fresh"]),
)
"""A folder and a single file, and others that differ in how they are published."""
WRITERS = pytest.mark.parametrize("name", tiered(CASES, test=["dcp"], extended=["file", "universal", "average"]))


def noted_bytes(case: Case) -> int:
    """What the journal of a killed run says is done, read without our reader."""
    staging = case.folder / f".{case.name}.ckpt-tools-partial"
    output = staging / "output"
    log = staging / f"{output.stat().st_ino}.log" if output.exists() else staging
    return done_bytes(log.read_bytes() if log.is_file() else b"")


def write_calls(case: Case, runs: Runs, words: list[str], before: dict[str, bytes]) -> list[Call]:
    """Every call that writes at the destination, in a run that nothing befalls."""
    case.put(before)
    done = runs.watched(*case.words, *words)
    assert (done.code, case.visible()) == (0, case.expected), done.stderr
    return done.calls(WRITE_SIDE, case.folder, reading=False)


def check_resumed(case: Case, runs: Runs, words: list[str]) -> None:
    """Run again with ``--resume``, and judge what that did of what was left."""
    was_complete = case.visible() == case.expected
    noted = 0 if was_complete else noted_bytes(case)
    done = runs.run(*case.words, *dict.fromkeys([*words, "--resume"]))
    if was_complete and "--overwrite" not in words:
        assert (done.code, "exists" in done.stderr) == (8, True), done.stderr
        assert runs.run("clean", case.target).code == 0
    else:
        assert done.code == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["bytes_recovered"] == noted
        assert report["bytes_written"] == case.num_bytes - noted
    assert case.visible() == case.expected
    assert [path.name for path in case.folder.iterdir()] == [case.name]


def kill_and_resume(case: Case, runs: Runs, call: Call, words: list[str], before: dict[str, bytes]) -> bool:
    """Whether the call was reached; everything that has to hold is asserted."""
    case.put(before)
    killed = runs.killed_at(call, *case.words, *words)
    assert killed.code in (-9, 0), killed.stderr
    assert case.visible() in (before, case.expected), "half a destination"
    check_resumed(case, runs, words)
    return killed.code == -9


@BOTH
@pytest.mark.timeout(3600)
def test_killed_at_every_call(name, mode, made_case, runs, soak):
    case = made_case(name)
    words, before = ["--fsync", "--resume", "--io", "direct"], {}
    if mode == "overwrite":
        words, before = [*words, "--overwrite"], case.old
    calls = write_calls(case, runs, words, before)
    points = spread(calls, None if soak else POINTS_IN_SAMPLE)
    killed = sum(kill_and_resume(case, runs, call, words, before) for call in points)
    # Of a few points one may be a call that some runs have and others do not.
    assert 0 < killed >= min(0.9 * len(points), len(points) - 1), "the calls of one run are those of the next, nearly"


def terminate(case: Case, runs: Runs, call: Call, words: list[str], before: dict[str, bytes]) -> bool:
    """Whether the signal came in time; nothing is left beside the destination, whichever call it came in."""
    case.put(before)
    ended = runs.terminated_at(call, *case.words, *words)
    assert ended.code in (143, 0), (call, ended)
    if ended.code:
        assert ended.stderr == "Stopped by SIGTERM; the destination is either unchanged or complete.\n"
    assert case.visible() in (before, case.expected), "half a destination"
    assert {path.name for path in case.folder.iterdir()} <= {case.name}
    return ended.code == 143


@BOTH
@pytest.mark.timeout(3600)
def test_terminated_at_every_call(name, mode, made_case, runs, soak):
    """Making the staging folder, publishing and cleaning up are whole, or were not begun."""
    case = made_case(name)
    words, before = (["--overwrite"], case.old) if mode == "overwrite" else ([], {})
    calls = write_calls(case, runs, words, before)
    # The last calls are those that publish, and clean up.
    points = calls if soak else [*spread(calls[:-6], POINTS_IN_SAMPLE), *calls[-6:]]
    assert sum(terminate(case, runs, call, words, before) for call in points) >= 0.7 * len(points)


@WRITERS
def test_killed_again_and_again(name, made_case, runs):
    """Each run continues the one before, and is killed in its turn; the bits are those of a run that never was."""
    case, noted = made_case(name), 0
    for _ in range(3):
        runs.killed_at(Call("pwrite64", 2), *case.words, "--resume")
        assert case.visible() in ({}, case.expected)
        assert case.visible() or noted_bytes(case) >= noted
        noted = noted_bytes(case)
    check_resumed(case, runs, [])


def publishing(case: Case) -> Call:
    """The call that shows the output: a file takes no name that something came to have meanwhile."""
    return Call("rename" if case.name == "out" else "renameat2", 1)


@WRITERS
def test_killed_before_it_is_published_nothing_is_written_again(name, made_case, runs):
    """Another process, whose sets have another order, makes the same plan."""
    case = made_case(name)
    assert runs.killed_at(publishing(case), *case.words, "--resume").code == -9
    assert noted_bytes(case) == case.num_bytes
    command = [sys.executable, "-m", "ckpt_tools", *map(str, case.words), "--resume", "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, check=True)
    assert json.loads(done.stdout)["bytes_written"] == 0
    assert case.visible() == case.expected


def test_without_resume_what_is_left_is_replaced(made_case, runs):
    """And without it the first two seconds go without a log, so that a short run is done again."""
    case = made_case("dcp")
    assert runs.killed_at(publishing(case), *case.words, "--resume").code == -9
    done = runs.run(*case.words)
    assert json.loads(done.stdout)["bytes_recovered"] == 0
    assert (case.visible(), [path.name for path in case.folder.iterdir()]) == (case.expected, [case.name])
    case.clear()
    assert runs.killed_at(publishing(case), *case.words).code == -9
    assert (case.visible(), noted_bytes(case)) == ({}, 0)
    check_resumed(case, runs, [])


@pytest.mark.parametrize(
    ("call", "is_noted"), [(Call("write", 6), True), (Call("pwrite64", 3), False)], ids=["our thread", "another"]
)
def test_interrupted(call, is_noted, made_case, runs):
    """The journal is written by our thread: another that is at its third part may be ahead of it, and makes at most
    four writes else, one for the name of each file."""
    case = made_case("dcp")
    ended = runs.interrupted_at(Call("pwrite64", 3), *case.words)
    assert (ended.code, ended.stderr.strip()) == (130, "Interrupted; the destination is either unchanged or complete.")
    assert list(case.folder.iterdir()) == []
    ended = runs.interrupted_at(call, *case.words, "--resume")
    assert (ended.code, ended.stderr.strip()) == (130, "Interrupted; the files written so far are kept for --resume.")
    assert noted_bytes(case) > 0 or not is_noted
    check_resumed(case, runs, [])


NUM_RANDOM, RANDOM_IN_SOAK = 20, 300


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_a_delta_killed_at_random_calls_is_made_again(made_case, runs, soak):
    """It cannot be resumed: after a kill it is absent, and the next run makes it whole."""
    case = made_case("dcp")
    sources = case.words[1].parent
    words = ("delta", sources / "safetensors", sources / "other/zero3", case.folder / "weight_v000001", "--quiet")
    runs.warm(*words)
    expected = case.visible()
    assert sorted(expected) == [f"weight_v000001/{name}" for name in (FILE_NAME, INDEX_NAME)]
    case.clear()
    watched = runs.watched(*words)
    calls = watched.calls(WRITE_SIDE, case.folder, reading=False)
    killed = 0
    for call in random.Random(4711).choices(calls, k=RANDOM_IN_SOAK if soak else NUM_RANDOM):
        case.clear()
        killed += runs.killed_at(call, *words).code == -9
        seen = {path: data for path, data in case.visible().items() if "ckpt-tools-partial" not in path}
        assert seen in ({}, expected)
        assert runs.run(*words).code == (8 if seen else 0)
        assert runs.run("clean", words[3]).code == 0
        assert case.visible() == expected and [path.name for path in case.folder.iterdir()] == ["weight_v000001"]
    assert killed > 0.8 * NUM_RANDOM
