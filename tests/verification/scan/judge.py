"""Real loaders load hostile files, in a process of its own whose ``os.system`` only records that it was called.

The plan is JSON on stdin: kinds of samples, and the numbers of those to load. For each kind goes to stdout what
``KINDS`` says of it.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import posix
import resource
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.verification.scan import generator, polyglots
from tests.verification.scan.genuine import crafted
from tests.verification.scan.loaders import Loader, every, is_valid, program, torchscript, usual
from tests.verification.scan.mutations import mutated
from tests.verification.scan.scanner import is_clean

SECONDS, SPARE_BYTES = 20, 3 << 30
"""Of all loaders of a damaged file, and the memory that its lengths may ask for."""
MAX_NAMES = 100
CONTROL = 100
"""Each mutated file of such a number is loaded if it is not clean, to see that loaders run something at all."""
_BINARY = (".safetensors", ".gguf", ".npy", ".npz", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".joblib", ".metadata")

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


def of_generator(numbers: list[int]) -> dict[int, list[str]]:
    """The names of the loaders that ran something, by the number of the sample."""
    return {number: ran(generator.sample(number).files, usual) for number in numbers}


def of_polyglots(numbers: list[int]) -> dict[int, Any]:
    """The names of the loaders that ran something, and whether the sample is valid of its kind for its own loader."""
    made = {number: polyglots.sample(number) for number in numbers}
    return {n: [ran(each.files, every, each.modules), is_valid(each.kind, each.files)] for n, each in made.items()}


def of_crafted(numbers: list[int]) -> dict[int, Any]:
    made = list(crafted())
    return {number: _in_a_child(made[number][1], usual) for number in numbers}


def of_mutated(numbers: list[int]) -> dict[int, Any]:
    """Whether it is clean, and what loaders do: of those that are clean, and of some others."""
    torch.set_num_threads(1)
    for files in (*polyglots.controls().values(), {"experiment_state-1.json": b"{}"}):
        ran(files, _all)  # imports what the loaders need
    found = {}
    for number in numbers:
        files = mutated(number)
        if (is_safe := is_clean(files)) or number % CONTROL == 0:
            found[number] = [is_safe, *(_in_a_child(files, _all) or [True, []])]
    return found


def _all(path: Path) -> Iterator[Loader]:
    """Text is not run as a program, because text is trusted to be text, and a list is a program."""
    is_text = path.suffix.lower() not in _BINARY
    yield from (load for load in every(path) if load is not program or not is_text)


def _in_a_child(files: generator.Files, loaders: Callable[[Path], Iterator[Loader]]) -> Any:
    """Whether a loader ran something, and the names that loaders looked up; None if one crashed or did not end."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        names: set[tuple[str, str]] = set()

        def see(event: str, args: tuple[Any, ...]) -> None:
            if event == "pickle.find_class" and len(names) < MAX_NAMES:
                names.add((str(args[0]), str(args[1])))

        sys.addaudithook(see)
        signal.alarm(SECONDS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES,) * 2)
        try:
            os.write(writing, json.dumps([bool(ran(files, loaders)), sorted(names)]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else None


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "generator": of_generator,
    "polyglots": of_polyglots,
    "crafted": of_crafted,
    "mutated": of_mutated,
}


def main() -> None:
    warnings.simplefilter("ignore")
    plan = json.load(sys.stdin)
    os.system = posix.system = recorder
    sys.meta_path.append(MODULES)
    out, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
    found = {kind: KINDS[kind](numbers) for kind, numbers in plan.items()}
    sys.stdout = out
    print(json.dumps(found))


if __name__ == "__main__":
    main()
