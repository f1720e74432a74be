"""Real loaders load hostile files, in a process of its own whose ``os.system`` only records that it was called.

The plan is JSON on stdin: ``samples`` is the module of the samples, ``numbers`` are those to load. The names of the
loaders that ran something go to stdout, for each number, and ``invalid``, the numbers that are not valid files of their
kind for its own loader.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import posix
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.verification.scan import generator, polyglots
from tests.verification.scan.genuine import is_valid
from tests.verification.scan.loaders import Loader, every, torchscript, usual

called: list[str] = []
"""What ran: commands, and imports of modules of ``Modules``."""


def recorder(*args: Any, **options: Any) -> int:
    called.append(str(args or options))
    return 0


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importable modules of any name, whose attributes are recorders, and whose import is recorded too."""

    def __init__(self) -> None:
        self.names: Collection[str] = ()

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in self.names else None

    def exec_module(self, module: types.ModuleType) -> None:
        called.append(f"import of {module.__name__!r}")
        module.__getattr__ = self._attribute

    @staticmethod
    def _attribute(name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return recorder

    def forget(self) -> None:
        for name in self.names:
            sys.modules.pop(name, None)


MODULES = Modules()


def ran(files: generator.Files, loaders: Callable[[Path], Iterator[Loader]], names: Sequence[str] = ()) -> list[str]:
    """The names of the loaders that run something of ``files``, on a machine that has modules called ``names``."""
    MODULES.names = names
    found = dict[str, None]()
    with tempfile.TemporaryDirectory() as folder:
        generator.write(files, Path(folder))
        for name in files:
            for load in loaders(Path(folder, name)):
                if load.__name__ not in found and _runs(load, Path(folder, name)):
                    found[load.__name__] = None
    return list(found)


def _runs(load: Loader, path: Path) -> bool:
    called.clear()
    MODULES.forget()
    with contextlib.suppress(BaseException):
        load(path)
        return bool(called) or load is torchscript
    return bool(called)


def judged(samples: str, numbers: list[int]) -> dict[str, Any]:
    """The answer to a plan."""
    if samples == "generator":
        found = {number: ran(generator.sample(number).files, usual) for number in numbers}
        return {"ran": found, "invalid": []}
    made = {number: polyglots.sample(number) for number in numbers}
    return {
        "ran": {number: ran(each.files, every, each.modules) for number, each in made.items()},
        "invalid": [number for number, each in made.items() if not is_valid(each.kind, each.files)],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    plan = json.load(sys.stdin)
    os.system = posix.system = recorder
    sys.meta_path.append(MODULES)
    out, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
    found = judged(**plan)
    sys.stdout = out
    print(json.dumps(found))


if __name__ == "__main__":
    main()
