"""What a run of the command line did, call by call, and how to have one of the calls kill it or fail."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITE_SIDE = frozenset(
    "openat mkdir mkdirat rename renameat renameat2 fallocate ftruncate pwrite64 pwritev write fsync fdatasync "  # noqa: SIM905
    "copy_file_range close unlink unlinkat rmdir flock link linkat symlink symlinkat fchmod chmod".split()
)
READ_SIDE = frozenset(
    "openat read pread64 preadv preadv2 readv newfstatat fstat statx stat lstat getdents64 readlink".split()  # noqa: SIM905
)
"""System calls that change what is there, and that look at it; opening does either."""

_CALL = re.compile(r"^(\d+) +(\w+)\((.*)$")
_CREATES = re.compile(r"O_CREAT|O_WRONLY|O_RDWR")
_READS = re.compile(r"O_RDONLY")


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """The call number ``number`` of that name that one thread makes, counted from 1."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: the exit code, or a signal as a negative number."""

    code: int
    stdout: str
    stderr: str
    trace: str = field(repr=False)

    def calls(self, names: Collection[str], folder: Path, *, reading: bool) -> list[Call]:
        """The calls of these names that name ``folder`` or something in it, those of different threads as one."""
        return list(dict.fromkeys(self._calls(names, folder, reading)))

    def _calls(self, names: Collection[str], folder: Path, reading: bool) -> Iterator[Call]:
        counts: Counter[tuple[str, str]] = Counter()
        for line in self.trace.splitlines():
            match = _CALL.match(line)
            if match is None:
                continue
            thread, name, rest = match.groups()
            counts[thread, name] += 1
            flags = _READS if reading else _CREATES
            if name in names and str(folder) in rest and (name != "openat" or flags.search(rest)):
                yield Call(name, counts[thread, name])

    @property
    def num_injected(self) -> int:
        return self.trace.count("(INJECTED)")


class Runs:
    """A process that runs the command line, in ``folder``, with these variables added to its environment.

    It neither reads nor writes bytecode: a run makes the same calls whatever was imported before.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir()
        root = Path(__file__).parents[3]
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.crashes.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={
                **os.environ,
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
                **(environment or {}),
            },
        )

    def close(self) -> None:
        with self._server:
            assert self._server.stdin is not None
            self._server.stdin.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def warm(self, *words: str | Path) -> None:
        """Have the server import what the command needs. It has to succeed."""
        assert self._ask(warm=True, words=[*map(str, words), "--json"])["code"] == 0

    def run(
        self, *words: str | Path, strace: Sequence[str] = (), short: tuple[str, int] | None = None, prompt: bool = True
    ) -> Ended:
        """Run the command, with these options of strace; the call ``short`` moves half of what it could."""
        full = [*map(str, words), "--json"]
        answer = self._ask(words=full, folder=str(self.folder), strace=list(strace), short=short, prompt=prompt)
        trace = (self.folder / "trace").read_text() if strace else ""
        return Ended(answer["code"], answer["stdout"], answer["stderr"], trace)

    def watched(self, *words: str | Path) -> Ended:
        """Every call that reads or writes."""
        return self.run(*words, strace=["-e", f"trace={','.join(sorted({*WRITE_SIDE, *READ_SIDE, 'kill'}))}"])

    def killed_at(self, call: Call, *words: str | Path) -> Ended:
        """SIGKILL as the call is entered, so that it does not take place."""
        return self._with(call, "signal=SIGKILL", words)

    def interrupted_at(self, call: Call, *words: str | Path) -> Ended:
        """As by Ctrl-C."""
        return self._with(call, "signal=SIGINT", words)

    def terminated_at(self, call: Call, *words: str | Path) -> Ended:
        """As by ``kill`` and whoever ends jobs."""
        return self._with(call, "signal=SIGTERM", words)

    def failing_at(self, call: Call, error: str, *words: str | Path) -> Ended:
        """The call does not take place and returns the error."""
        return self._with(call, f"error={error}", words)

    def _with(self, call: Call, what: str, words: Sequence[str | Path]) -> Ended:
        inject = f"inject={call.name}:{what}:when={call.number}"
        return self.run(*words, strace=["-e", f"trace={call.name},kill", "-e", inject])
