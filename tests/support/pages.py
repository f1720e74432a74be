"""Pages of docs as a reader follows them: their fenced blocks, written, run and compared with what is printed.

A ``console`` block is run by bash, its commands one after the other in one shell, and a ``bash`` block whole. A ``python`` block that begins with
a docstring ``NAME.py: ...`` becomes that file; every other one is run in one process, with the names of the blocks
before it on the page. Output is compared where the page prints some: below a command, or in the block without a
language that follows Python. A line ``...`` stands for any lines, and long lines of a page may be wrapped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r'"""(\w+\.py):')
_MARK = "--- exit code"
_SHELL = """
ckpt-tools() { "$PYTHON" -m ckpt_tools "$@"; }
python() { "$PYTHON" "$@" 2>> "$ERRORS"; }
torchrun() { "$PYTHON" -m torch.distributed.run "$@" 2>> "$ERRORS"; }
exec 2>&1
"""
_RUN_BLOCKS = """
import contextlib, importlib, io, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
spaces = {}
for line in sys.stdin:
    page, code = json.loads(line)
    importlib.invalidate_caches()
    printed, failed = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), spaces.setdefault(page, {"__name__": "__main__"}))
    except BaseException:
        failed = traceback.format_exc()
    print(json.dumps([printed.getvalue(), failed]), file=answers, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    line: str
    output: str
    """What the page prints below it; empty if that is not compared."""


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, or those of one language."""
    found = [Block(*match.groups()) for match in _FENCE.finditer(page.read_text())]
    return [each for each in found if language in (None, each.language)]


def commands(block: Block) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, output = re.sub(r"\\\n", "", part).partition("\n")
        yield Command(line, output)


def masked(text: str) -> str:
    """Words without what differs from run to run and between machines: times, rates, dates, lines of loggers, and how
    far weights of a training are from each other."""
    words = " ".join(re.sub(r"^(\[\d{4}-\d\d-\d\d |DeepSpeed ).*$", "", text, flags=re.MULTILINE).split())
    words = re.sub(r"[\d.]+ s \([\d.]+ \w+/s\)", "TIME", words)
    words = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", words)
    return re.sub(r"\b\d\.\d{5,}|relative [\d.e-]+", "DIFFERENCE", words)


def is_as_printed(output: str, page: str) -> bool:
    parts = re.split(r"^ *\.\.\.\n", page, flags=re.MULTILINE)
    return re.fullmatch(".*".join(re.escape(masked(part)) for part in parts), masked(output)) is not None


@dataclass
class Reader(AbstractContextManager["Reader"]):
    """Follows pages in one folder."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def follow(self, page: Path) -> None:
        """Write and run every block of the page, and compare what it prints."""
        found = blocks(page)
        for block, after in pairwise([*found, Block("", "")]):
            if block.language == "console":
                self.run_commands(block)
            elif block.language == "bash":
                code, output = self._run_shell(block.text)
                assert code == 0, f"{block.text}\n{output}{self._errors()}"
            elif block.language == "python" and (name := _FILE.match(block.text)):
                (self.folder / name[1]).write_text(block.text)
            elif block.language == "python":
                printed = self.run_python(page, block.text)
                assert after.language or not after.text or is_as_printed(printed, after.text), printed

    def run_commands(self, block: Block) -> None:
        """Raises AssertionError if a command fails where the page shows no error, or prints something else."""
        given = [each for each in commands(block) if not each.line.startswith("pip install ")]
        _, printed = self._run_shell("".join(f'{each.line}\necho "{_MARK} $?"\n' for each in given))
        outputs = re.split(rf"^{_MARK} (\d+)\n", printed, flags=re.MULTILINE)
        for each, output, code in zip(given, outputs[::2], outputs[1::2], strict=False):
            differs = code == "6" and each.line.startswith("ckpt-tools diff ")
            assert (code == "0" or differs) is not each.output.startswith("Error"), f"{each.line}\n{output}{self._errors()}"
            assert not each.output or is_as_printed(output, each.output), f"{each.line}\n{output}"
        assert len(outputs) // 2 == len(given), printed

    def _run_shell(self, script: str) -> tuple[int, str]:
        """The exit code, and what is printed to both outputs; errors of Python and torchrun go to a file."""
        command = ["bash", "-c", _SHELL + script]
        done = subprocess.run(
            command, cwd=self.folder, env=self._variables(), capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    def run_python(self, page: Path, code: str) -> str:
        """What the code prints."""
        if self._process is None:
            with self._error_file.open("a") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _RUN_BLOCKS],
                    cwd=self.folder,
                    env=self._variables(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(page), code]) + "\n")
        self._process.stdin.flush()
        printed, failed = json.loads(self._process.stdout.readline())
        assert not failed, f"{code}\n{failed}"
        return str(printed)

    @property
    def _error_file(self) -> Path:
        return self.folder.with_name(self.folder.name + "-errors.txt")

    def _errors(self) -> str:
        return self._error_file.read_text()[-3000:] if self._error_file.exists() else ""

    def _variables(self) -> dict[str, str]:
        ours = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "ERRORS": str(self._error_file)}
        return {**os.environ, **ours, **self.environment}

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None
