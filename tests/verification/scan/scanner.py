"""Scans samples in a process of its own, under an audit hook, and says which are clean and what happened.

The plan is JSON on stdin: ``samples`` is the module of the samples, ``numbers`` are those to scan. The result goes to
stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import yaml  # noqa: F401 - an import by the scan would be an event

from ckpt_tools.errors import CkptError
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.verification.scan import scan_source
from tests.serialization.hostile_run import Watch
from tests.verification.scan import generator, polyglots
from tests.verification.scan.generator import BENIGN, CARRIERS, Files


def is_clean(files: Files, *, allow_configuration: bool = False) -> bool:
    store = MemoryStore({name: bytearray(data) for name, data in files.items()})
    try:
        return scan_source(Source.open(store), "memory://", allow_configuration=allow_configuration).clean
    except CkptError:
        return False


def main() -> None:
    plan = json.load(sys.stdin)
    numbers = plan["numbers"]
    sample: Callable[[int], Any] = generator.sample if plan["samples"] == "generator" else polyglots.sample
    controls = [name for name, put in CARRIERS.items() if any(is_clean(put(data)) for data in BENIGN)]
    for number in numbers[:50]:
        is_clean(sample(number).files)
    watch = Watch([])
    clean, events = [], list[Any]()
    for number in numbers:
        files = sample(number).files
        watch.on = True
        found = is_clean(files)
        watch.on = False
        clean += [number] if found else []
        events += [(number, each) for each in watch.events]
        watch.events = []
    print(json.dumps({"clean": clean, "events": events[:100], "controls": controls}))


if __name__ == "__main__":
    main()
