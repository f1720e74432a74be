"""Scans samples in a process of its own, under an audit hook, and says what happened.

The plan is JSON on stdin: kinds of samples, and the numbers of those to scan. The events go to stdout.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # noqa: F401 - an import by the scan would be an event

from ckpt_tools.errors import CkptError
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.verification.scan import scan_source
from tests.verification.scan import generator, polyglots
from tests.verification.scan.generator import Files

ROOT = Path(__file__).parents[3]
FORBIDDEN = (
    "open", "os.", "subprocess.", "pty.", "socket.", "ctypes.", "pickle.", "marshal.", "exec", "compile", "import",
    "code.__new__", "function.__new__", "sys.set", "urllib.", "http.", "ftplib.", "smtplib.", "sqlite3.", "webbrowser.",
    "shutil.", "signal.", "gc.", "tempfile.", "glob.", "array.", "mmap.", "cpython.",
)  # fmt: skip
"""Audit events that no reading of bytes in memory causes."""


class Watch:
    """What the interpreter did while it was on."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.on = False
        sys.addaudithook(self.see)

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event.startswith(FORBIDDEN):
            self.events.append(f"{event}{args!r}"[:300])


def is_clean(files: Files, *, allow_configuration: bool = False) -> bool:
    store = MemoryStore({name: bytearray(data) for name, data in files.items()})
    try:
        return scan_source(Source.open(store), "memory://", allow_configuration=allow_configuration).clean
    except CkptError:
        return False


def told(module: str, plan: dict[str, Any]) -> Any:
    """The answer of a process of ``module`` to a plan. The keys of a JSON object are texts."""
    command = [sys.executable, "-m", f"tests.verification.scan.{module}"]
    done = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def main() -> None:
    made: dict[str, Callable[[int], Any]] = {"generator": generator.sample, "polyglots": polyglots.sample}
    samples = [made[kind](number).files for kind, numbers in json.load(sys.stdin).items() for number in numbers]
    for files in samples[::7]:
        is_clean(files)  # imports what the scan needs
    watch = Watch()
    for files in samples:
        watch.on = True
        is_clean(files)
        watch.on = False
    print(json.dumps(watch.events[:100]))


if __name__ == "__main__":
    main()
