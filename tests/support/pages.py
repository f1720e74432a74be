"""Pages of docs as a reader follows them: their fenced blocks, written and run, and what they print.

A ``console`` block is run by bash, its commands one after the other in one shell, and a ``bash`` block whole. A
``python`` block that begins with a docstring ``NAME.py: ...`` becomes that file; every other one is run in one process,
with the names of the blocks before it on the page. Output is compared where the page prints some: below a command, or
in the block without a language that follows Python. A line ``...`` stands for any lines, and long lines may be wrapped.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, groupby, zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]

WRITE_PAGES = "WRITE_PAGES"
"""Set in the environment by ``pytest --write-pages``."""

WIDTH = 118

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r'"""(\w+\.py):')
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*\n)((?:(?!\$ ).*\n)*)", re.MULTILINE)
_OF_A_LOGGER = re.compile(r"^(\[\d{4}-\d\d-\d\d |DeepSpeed |\w+ing: [\d.]+ ).*\n?", re.MULTILINE)
"""And of progress, which a busy machine prints."""
_MARK = "--- exit code"
_SHELL = """
ckpt-tools() { "$PYTHON" -m ckpt_tools "$@"; }
python() { "$PYTHON" "$@" 2>> "$ERRORS"; }
torchrun() {
    local told code
    for turn in 1 2; do
        : > "$ERRORS"
        told=$("$PYTHON" -m torch.distributed.run "$@" 2>> "$ERRORS"); code=$?
        grep -q "terminate called without an active exception" "$ERRORS" || break
    done
    [ -z "$told" ] || printf '%s\n' "$told"
    return $code
}
exec 2>&1
"""
"""torchrun is tried twice if a thread of Gloo aborts at the end of a rank, whose work is done then (issue 190489 of
pytorch): seldom, and on a busy machine."""

_RUN_BLOCKS = """
import contextlib, importlib, io, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
spaces = {}
for line in sys.stdin:
    page, code = json.loads(line)
    importlib.invalidate_caches()
    output, failed = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, "block", "exec"), spaces.setdefault(page, {"__name__": "__main__"}))
    except BaseException:
        failed = traceback.format_exc()
    print(json.dumps([output.getvalue(), failed]), file=answers, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Command:
    text: str
    """As the page has it, without ``$``."""
    output: str
    """What the page prints below it; empty if that is not compared."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [text for name, text in _FENCE.findall(page.read_text()) if name == language]


def commands(block: str) -> list[Command]:
    return [Command(*parts) for parts in _COMMAND.findall(block)]


def masked(text: str) -> str:
    """Words without what differs from run to run and between machines: times, rates, dates, lines of loggers, and how
    far weights of a training are from each other."""
    words = " ".join(_OF_A_LOGGER.sub("", text).split())
    words = re.sub(r"\b\d+\.\d\d s\b(?: \([\d.]+ \w+/s\))?", "TIME", words)
    words = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", words)
    return re.sub(r"\b\d\.\d{5,}|relative [\d.e-]+", "DIFFERENCE", words)


def is_as_printed(output: str, page: str) -> bool:
    parts = re.split(r"^ *\.\.\.\n", page, flags=re.MULTILINE)
    return re.fullmatch(".*".join(re.escape(masked(part)) for part in parts), masked(output)) is not None


def printed(output: str, page: str) -> str:
    """What a page should print: the same if the output is as printed, else the output, wrapped and shortened alike."""
    if not page or is_as_printed(output, page):
        return page
    lines = _aligned(_OF_A_LOGGER.sub("", output).splitlines())
    if page.endswith("...\n"):
        return f"{lines[0] if lines else ''}\n...\n"
    return "".join(f"{line.rstrip()}\n" for line in chain.from_iterable(map(_wrapped, lines)))


def _aligned(lines: Iterable[str]) -> list[str]:
    """Columns with spaces between them, as on a terminal, where a pipe has tabs."""
    aligned = []
    for has_tabs, group in groupby(lines, lambda line: "\t" in line):
        rows = [line.split("\t") for line in group]
        widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")] if has_tabs else [0]
        aligned += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    return aligned


def _wrapped(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


@dataclass
class Reader(AbstractContextManager["Reader"]):
    """Follows pages in one folder."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def follow(self, page: Path) -> str:
        """Write and run every block of the page. Returns its text with the outputs that there were.

        Raises:
            AssertionError: Something fails where the page shows no error, or the other way round.
        """
        text, at = page.read_text(), 0
        output: str | None = None
        followed = []
        for fence in _FENCE.finditer(text):
            language, block = fence.groups()
            before = text[at : fence.start()]
            if language == "python":
                output = self._run_or_write(page, block)
            elif not language and before.isspace() and output is not None:
                block = printed(output, block)
            elif language == "console":
                block = self.run_commands(block)
            elif language == "bash":
                code, told = self._run_shell(block)
                assert code == 0, f"{block}\n{told}{self._errors()}"
            output = output if language == "python" else None
            followed += [before, f"```{language}\n{block}```"]
            at = fence.end()
        return "".join([*followed, text[at:]])

    def run_commands(self, block: str) -> str:
        """The block with the outputs that there were."""
        found = commands(block)
        script = "".join(f'{each.text}echo "{_MARK} $?"\n' for each in found if not _is_installation(each))
        _, told = self._run_shell(script)
        outputs = iter(re.split(rf"^{_MARK} (\d+)\n", told, flags=re.MULTILINE))
        followed = []
        for each in found:
            output = each.output
            if not _is_installation(each):
                output, code = next(outputs), next(outputs, "no")
                differs = code == "6" and each.text.startswith("ckpt-tools diff ")
                is_right = (code == "0" or differs) is not each.output.startswith("Error")
                assert is_right, f"{each.text}{output}exit code {code}\n{self._errors()}"
            followed.append(f"$ {each.text}{printed(output, each.output)}")
        return "".join(followed)

    def _run_shell(self, script: str) -> tuple[int, str]:
        """The exit code, and what is printed to both outputs; errors of Python and torchrun go to a file."""
        command = ["bash", "-c", _SHELL + script]
        done = subprocess.run(
            command, cwd=self.folder, env=self._variables(), capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    def _run_or_write(self, page: Path, code: str) -> str | None:
        """What the code prints, or None if it is that of a file."""
        if name := _FILE.match(code):
            (self.folder / name[1]).write_text(code)
            return None
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
        output, failed = json.loads(self._process.stdout.readline())
        assert not failed, f"{code}\n{failed}"
        return str(output)

    @property
    def _error_file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-errors.txt")

    def _errors(self) -> str:
        return self._error_file.read_text()[-3000:] if self._error_file.exists() else ""

    def _variables(self) -> dict[str, str]:
        ours = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "ERRORS": str(self._error_file)}
        return {**os.environ, **ours, **self.environment}

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


def check_commands(page: Path, folder: Path) -> None:
    """Run the commands of a page alone, and compare what they print; with ``--write-pages``, put that into the page."""
    with Reader(folder) as reader:
        for block in blocks(page, "console"):
            found = reader.run_commands(block)
            if WRITE_PAGES in os.environ:
                page.write_text(page.read_text().replace(block, found))
            else:
                assert found == block


def _is_installation(command: Command) -> bool:
    """What the tests do not do."""
    return command.text.startswith(("pip install ", "git clone "))
