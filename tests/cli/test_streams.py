"""Standard streams that are closed, full or a pipe that nobody reads: one sentence, the right code, and the work."""

import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest

import ckpt_tools
from tests.support.sparse import make_sparse
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

WITHOUT_OUTPUT = {
    ">&-": "Bad file descriptor",
    "<&- >&-": "Bad file descriptor",
    ">/dev/full": "No space left on device",
    "<&- >/dev/full": "No space left on device",
}
WITH_OUTPUT = ("<&-", "2>&-", "2>/dev/full", "<&- 2>&-", "</dev/null")
WITHOUT_BOTH = (">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full", ">&- 2>/dev/full")

SPEAKING = {
    "version": "--version",
    "help": "--help",
    "inspect": "inspect IN",
    "tensors": "inspect IN --tensors",
    "JSON": "inspect IN --json",
    "cat": "cat IN layer.0",
    "recipes": "recipes",
    "convert": "convert IN OUT --to dcp",
    "convert to JSON": "convert IN OUT --to dcp --json",
    "verify": "verify IN IN",
    "ls": "ls RUN",
    "completion": "completion bash",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    (folder / "run" / "step-1").mkdir(parents=True)
    return make_sparse(folder / "run" / "step-1" / "model.safetensors", num_tensors=2, num_rows=10)


def run(words: str, streams: str, source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    places = {"IN": source, "OUT": out, "RUN": source.parents[1]}
    command = " ".join(str(places.get(word, word)) for word in words.split())
    line = f"{sys.executable} -m ckpt_tools {command} {streams}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)


def cases(names: Iterable[str], streams: Iterable[str], *extended: str) -> pytest.MarkDecorator:
    """A test of each command with each of these streams, of which those named are in ``make test-all``."""
    every = [f"{name}: {each}" for name, each in product(names, streams)]
    return pytest.mark.parametrize("case", tiered(every, test=(), extended=extended))


def ran(case: str, source: Path, out: Path, after: str = "") -> subprocess.CompletedProcess[str]:
    """The command of a case, with its streams. What it converts is whole, whatever becomes of its words."""
    name, _, streams = case.partition(": ")
    words = SPEAKING[name]
    done = run(words, streams + after, source, out)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    if words.startswith("convert"):
        ckpt_tools.verify(source, out)
    return done


@cases(
    SPEAKING,
    [*WITHOUT_OUTPUT, *WITHOUT_BOTH],
    *("version: >&-", "inspect: >&-", "JSON: >/dev/full", "cat: >&-", "convert: >&-", "convert to JSON: >/dev/full"),
    *("help: <&- >&-", "completion: >/dev/full", "ls: <&- >/dev/full", "convert: >&- 2>&-", "JSON: >&- 2>/dev/full"),
    *("inspect: >/dev/full 2>/dev/full", "version: <&- >&- 2>&-"),
)
def test_without_output_the_reason_is_told_where_it_can_be(case, source, tmp_path):
    done, streams = ran(case, source, tmp_path / "out"), case.partition(": ")[2]
    assert done.returncode == 5
    if streams in WITHOUT_OUTPUT:
        assert done.stderr.splitlines()[-1] == f"Error: standard output: {WITHOUT_OUTPUT[streams]}"


@cases(
    ["JSON", "help", "inspect", "convert", "verify", "ls"],
    WITH_OUTPUT,
    *("convert: <&- 2>&-", "inspect: 2>/dev/full", "JSON: <&-", "verify: 2>&-", "ls: </dev/null"),
)
def test_without_the_other_streams_nothing_changes(case, source, tmp_path):
    usual = run(SPEAKING[case.partition(": ")[0]], "", source, tmp_path / "usual")
    done = ran(case, source, tmp_path / "out")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, len(usual.stdout.splitlines())), done.stderr


@cases(
    ["JSON", "help", "tensors", "recipes", "convert"],
    ["| head -0", "2>&1 | head -0", "| true", "2>&- | true"],
    *("JSON: 2>&1 | head -0", "convert: | head -0", "tensors: | true", "recipes: 2>&- | true"),
)
def test_a_pipe_that_nobody_reads(case, source, tmp_path):
    """The shell's own code is that of the last command of the pipe."""
    done = ran(case, source, tmp_path / "out", after="; exit ${PIPESTATUS[0]}")
    assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_no_file_gets_the_number_of_a_closed_stream(source, tmp_path):
    """Or what is said would be written into it."""
    for streams in ("<&- >&- 2>&-", ">&-", "2>&-"):
        out = tmp_path / "out"
        run("convert IN OUT --to dcp --overwrite --verbose", streams, source, out)
        ckpt_tools.verify(source, out)
        texts = [file.read_bytes() for file in out.iterdir()]
        assert not any(b"converted" in text or b"load it with" in text for text in texts)
