"""Any call that fails, once, ends in one clear sentence and a documented exit code, or in a correct result."""

import re
from collections.abc import Iterator
from itertools import product

import pytest

from tests.end_to_end.crashes.cases import CASES, Case
from tests.end_to_end.crashes.runs import READ_SIDE, WRITE_SIDE, Call, Ended, Runs
from tests.support.sweep import spread, tiered

pytestmark = pytest.mark.extended

WRITES_IN_SAMPLE, READS_IN_SAMPLE = 3, 2
WRITES_IN_SOAK, READS_IN_SOAK = 100, 50
"""Of each writer with its reader and each mode, in ``make test-all`` and in ``make soak``, evenly spread: 3,000 points
of 10,000; most of these are the same look at the same folder."""


WRITE_ERRORS = {
    **dict.fromkeys(["openat", "pwrite64", "write", "fallocate", "fsync"], ("EIO", "ENOSPC", "EINTR")),
    **dict.fromkeys(["mkdir", "rename", "renameat2"], ("EIO", "ENOSPC")),
    **dict.fromkeys(["close", "flock"], ("EIO", "EINTR")),
    **dict.fromkeys(["unlink", "unlinkat", "rmdir"], ("EIO",)),
}
READ_ERRORS = {
    **dict.fromkeys(["openat", "read", "pread64", "preadv", "preadv2"], ("EIO", "EINTR")),
    **dict.fromkeys(["newfstatat", "fstat", "statx", "stat", "lstat", "getdents64", "readlink"], ("EIO",)),
}
"""By system call, what it may report."""

SENTENCE = re.compile(r"Error: [^\n]+\n")
FAILED_SENTENCE = re.compile(r"write\(2<[^>]*stderr>.*\(INJECTED\)")


def faults(case: Case, done: Ended, num_writes: int, num_reads: int) -> list[tuple[Call, str]]:
    """Calls of a run at its source and its destination, each with an error that it may report."""
    everywhere = case.folder.parent
    writing = done.calls(WRITE_SIDE, everywhere, reading=False)
    reading = done.calls(READ_SIDE, everywhere, reading=True)
    writes = [(call, error) for call in writing for error in WRITE_ERRORS.get(call.name, ("EIO",))]
    reads = [(call, error) for call in reading for error in READ_ERRORS[call.name]]
    return list(dict.fromkeys([*spread(writes, num_writes), *spread(reads, num_reads)]))


def short_calls(done: Ended) -> Iterator[tuple[str, int]]:
    """Every call that may move less than it was asked to."""
    for name, system_call in {"preadv": "preadv", "pwrite": "pwrite64", "write": "write"}.items():
        number = len(re.findall(rf"^\d+ +{system_call}\(\d+<(?!pipe)", done.trace, re.MULTILINE))
        yield from ((name, which) for which in range(1, number + 1))


def check_ended(case: Case, ended: Ended, before: dict[str, bytes]) -> None:
    """A correct result, or a sentence and a code; never anything between."""
    if ended.code == 0:
        assert case.visible() == case.expected
    else:
        # strace counts the calls of each thread for itself, so that it may hit the one that prints the sentence too.
        assert SENTENCE.fullmatch(ended.stderr) or FAILED_SENTENCE.search(ended.trace), ended.stderr
        assert "unexpected" not in ended.stderr and 1 <= ended.code <= 9, ended.stderr
        assert case.visible() in (before, case.expected), "half a destination"


def check_clean(case: Case, runs: Runs) -> None:
    """Nothing of ours is left, but for what ``clean`` finds."""
    assert runs.run("clean", case.target).code == 0
    assert {path.name for path in case.folder.iterdir()} <= {case.name}


@pytest.mark.parametrize(
    ("name", "mode"),
    tiered(
        product(CASES, ("fresh", "overwrite")),
        test=(),
        extended=["dcp-fresh", "file-overwrite", "sharded-fresh", "universal-overwrite"],
    ),
)
@pytest.mark.timeout(3600)
def test_every_call_may_fail(name, mode, made_case, runs, soak):
    case = made_case(name)
    words, before = (
        (["--overwrite"], case.old) if mode == "overwrite" else (["--fsync", "--resume", "--io", "direct"], {})
    )
    case.put(before)
    done = runs.watched(*case.words, *words)
    assert done.code == 0, done.stderr
    numbers = (WRITES_IN_SOAK, READS_IN_SOAK) if soak else (WRITES_IN_SAMPLE, READS_IN_SAMPLE)
    points = faults(case, done, *numbers)
    injected = 0
    for call, error in points:
        case.put(before)
        ended = runs.failing_at(call, error, *case.words, *words)
        injected += ended.num_injected
        check_ended(case, ended, before)
        if mode == "fresh" and not case.visible():
            assert runs.run(*case.words, "--resume").code == 0
            assert case.visible() == case.expected
        check_clean(case, runs)
    assert injected >= 0.9 * len(points), "the calls of one run are those of the next"


FULL = [(*each, error) for each in product(("sharded", "dcp", "file"), ("reserved", "not reserved"))
        for error in ("ENOSPC", "EDQUOT")]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "how", "error"),
    tiered(FULL, test=(), extended=["sharded-not reserved-ENOSPC", "dcp-reserved-EDQUOT", "file-reserved-ENOSPC"]),
)
@pytest.mark.timeout(3600)
def test_a_disk_that_stays_full(name, how, error, made_case, runs, soak):
    """In the middle of a write, and from then on. Without ``fallocate`` the C library writes to each block instead."""
    case = made_case(name)
    watching = ["-e", "trace=pwrite64,fallocate,kill"]
    said = {"ENOSPC": "No space left on device", "EDQUOT": "Disk quota exceeded"}[error]
    unreserved = [] if how == "reserved" else ["-e", "inject=fallocate:error=EOPNOTSUPP"]
    done = runs.run(*case.words, strace=[*watching, *unreserved])
    assert (done.code, case.visible()) == (0, case.expected)
    calls = done.calls({"pwrite64"}, case.folder, reading=False)
    for call in spread(calls[1:], 12 if soak else 2):
        full = [*watching, *unreserved, "-e", f"inject=pwrite64:error={error}:when={call.number}+"]
        for words, before in ((["--overwrite"], case.old), (["--resume"], {})):
            case.put(before)
            ended = runs.run(*case.words, *words, strace=full)
            assert (ended.code, SENTENCE.fullmatch(ended.stderr) is not None) == (5, True), ended.stderr
            assert said in ended.stderr and case.visible() == before
            assert {path.name for path in case.folder.iterdir()} == {case.name} or words == ["--resume"]
        assert runs.run(*case.words, "--resume").code == 0
        assert case.visible() == case.expected
        assert [path.name for path in case.folder.iterdir()] == [case.name]


@pytest.mark.parametrize("name", tiered(CASES, test=(), extended=("dcp", "file", "torch")))
@pytest.mark.timeout(3600)
def test_calls_that_move_less_than_they_could(name, made_case, runs, soak):
    case = made_case(name)
    done = runs.watched(*case.words)
    for call in spread(list(short_calls(done)), None if soak else 3):
        case.clear()
        assert runs.run(*case.words, short=call).code == 0
        assert case.visible() == case.expected, call
