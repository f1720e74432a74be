"""Real loaders load mutants, each in a process of its own: some crash a loader.

The plan is JSON on stdin: rules, and numbers of mutants, or null for the crafted files. To stdout goes what each ran,
and which names its loaders looked up.
"""

from __future__ import annotations

import io
import json
import os
import posix
import signal
import sys
import warnings
from typing import Any

from tests.verification.scan import judge
from tests.verification.scan.generator import Files
from tests.verification.scan.loaders import usual
from tests.verification.scan.mutants import crafted, mutant

SECONDS = 20
MAX_NAMES = 100


def judged(files: Files) -> Any:
    """What loaders run, and the names that they look up; None if one crashed or did not end."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        names: set[tuple[str, str]] = set()

        def see(event: str, args: tuple[Any, ...]) -> None:
            if event == "pickle.find_class" and len(names) < MAX_NAMES:
                names.add((str(args[0]), str(args[1])))

        sys.addaudithook(see)
        signal.alarm(SECONDS)
        try:
            os.write(writing, json.dumps([bool(judge.ran(files, usual)), sorted(names)]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else None


def main() -> None:
    warnings.simplefilter("ignore")
    plan = json.load(sys.stdin)
    os.system = posix.system = judge.recorder  # type: ignore[attr-defined]
    out, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
    found = []
    for rule, numbers in plan:
        samples = [mutant(rule, number) for number in numbers] if numbers is not None else list(crafted())
        found += [judged(files) for _, files in samples]
    sys.stdout = out
    print(json.dumps(found))


if __name__ == "__main__":
    main()
