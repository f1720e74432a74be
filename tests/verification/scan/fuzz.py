"""Scans mutated files, and has real loaders load those that are clean, under an audit hook that stops what would run.

A process of its own. The plan is JSON on stdin: ``first`` and ``count``, the numbers of the files. The result goes to
stdout: ``ran``, the clean files that a loader ran; ``broken``, those on which the scan failed; ``slowest``, in seconds
of a processor; ``clean``, the number of clean files that were loaded; ``controls``, of hostile files that ran.
"""

import _compat_pickle
import contextlib
import io
import json
import logging.config
import os
import posix
import re
import resource
import signal
import sys
import sysconfig
import tempfile
import time
import types
import warnings
import zipimport
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ckpt_tools.errors import CkptError
from ckpt_tools.serialization.pickle.closed_list import is_listed
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.verification.scan import scan_source
from tests.verification.scan import generator, polyglots
from tests.verification.scan.generator import Files
from tests.verification.scan.loaders import Loader, every, program, torchscript
from tests.verification.scan.mutations import mutated

SPARE_ADDRESS_BYTES = 3 << 30
"""Memory that a loader may ask for: lengths of damaged files are any number."""

LOADER_SECONDS = 20
"""Of a processor."""

CONTROL = 100
"""Each file of such a number is loaded if it is not clean, to see that loaders run something at all."""

FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "subprocess.", "pty.", "socket.connect",
    "socket.bind", "ctypes.dlopen", "code.__new__", "shutil.rmtree", "os.remove", "os.rename", "os.symlink", "os.link",
)  # fmt: skip
_ODD = re.compile(r"[^\w.-]")
_INSTALLED = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


_BINARY = (".safetensors", ".gguf", ".npy", ".npz", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".joblib", ".metadata")


class Stopped(BaseException):
    """A loader was about to run something that a file chose."""


class Watch:
    """Stops what would run while it is on, and remembers the first that did."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.event = ""
        sys.addaudithook(self._see)

    def stop(self, event: str) -> None:
        """Raise Stopped if a loader is running."""
        if self.folder is not None:
            self.event = self.event or event[:200]
            raise Stopped(event)

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "pickle.find_class":
            self._find_class(*args)
        elif event == "exec":
            code = args[0]
            if code.co_names and not code.co_filename.startswith(_INSTALLED) and not _is_called_by_an_import():
                self.stop(f"exec of {code.co_filename}")
        elif event.startswith(FORBIDDEN) and not str(args[0]).startswith((self.folder, *_INSTALLED)):
            self.stop(f"{event}{args!r}")

    def _find_class(self, module: str, name: str) -> None:
        """A name that is not on the closed list is an import, unless no module can be called so: then its call is."""
        listed = _compat_pickle.NAME_MAPPING.get(
            (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        )
        if not module or is_listed(*listed) or is_listed(module, name):
            return
        if not name and module.partition(".")[0] not in sys.stdlib_module_names:
            return  # Python's unpickler imports it alone, and fails: only modules of Python count
        if not _ODD.search(module):
            self.stop(f"{module}.{name}")
        made = types.ModuleType(module)
        made.__getattr__ = self._attribute
        sys.modules[module] = made

    def _attribute(self, name: str) -> Any:
        if not name:
            raise AttributeError(name)
        return self._call

    def _call(self, *args: Any, **options: Any) -> int:
        self.stop("a call of a module of an odd name")
        return 0


def _is_called_by_an_import() -> bool:
    """True for source that an installed module makes when it is imported, such as that of dataclasses."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _loaders(path: Path) -> Iterator[Loader]:
    """Those of ``every``; text is not run as a program, because text is trusted to be text, and a list is a program."""
    is_text = path.suffix.lower() not in _BINARY
    yield from (load for load in every(path) if load is not program or not is_text)


def runs(files: Files, watch: Watch | None) -> list[str]:
    """What would run, by which loader; without a watch, nothing is stopped."""
    found = []
    with tempfile.TemporaryDirectory(dir=_shared_memory()) as folder:
        generator.write(files, Path(folder))
        for name in files:
            for load in _loaders(Path(folder, name)):
                if event := _event(load, Path(folder, name), watch):
                    found.append(f"{load.__name__}: {event}")
    return found


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _event(load: Loader, path: Path, watch: Watch | None) -> str:
    if watch is None:
        with contextlib.suppress(BaseException):
            load(path)
        return ""
    zipimport._zip_directory_cache.clear()
    sys.path_importer_cache.pop(str(path), None)
    modules = set(sys.modules)
    signal.setitimer(signal.ITIMER_VIRTUAL, LOADER_SECONDS)
    watch.folder, watch.event = str(path.parents[1] if path.parent.name == "sub" else path.parent), ""
    with contextlib.suppress(BaseException):
        load(path)
        if load is torchscript:
            watch.event = "TorchScript"
    watch.folder = None
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    for name in set(sys.modules) - modules:
        if _ODD.search(name):
            del sys.modules[name]
    return watch.event


def _prepare(watch: Watch) -> None:
    """Import what every loader imports, and have those of YAML and logging say what they look up."""
    for files in (*polyglots.controls().values(), {"experiment_state-1.json": b"{}"}):
        runs(files, None)
    for constructor in (yaml.constructor.FullConstructor, yaml.constructor.UnsafeConstructor):
        for method in ("find_python_name", "find_python_module"):
            setattr(constructor, method, lambda self, name, *_, **__: watch.stop(f"YAML looks up {name}"))
    resolve = logging.config.BaseConfigurator.resolve

    def resolved(self: Any, name: str) -> Any:
        if not name.startswith("logging."):
            watch.stop(f"logging looks up {name}")
        return resolve(self, name)

    logging.config.BaseConfigurator.resolve = resolved
    os.system = posix.system = lambda *_: watch.stop("os.system")


def scanned(files: Files) -> bool:
    store = MemoryStore({name: bytearray(data) for name, data in files.items()})
    return scan_source(Source.open(store), "memory://").clean


def fuzzed(first: int, count: int) -> dict[str, Any]:
    """The answer to a plan."""
    watch = Watch()
    _prepare(watch)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_ADDRESS_BYTES,) * 2)
    ran, broken, slowest, num_clean, controls = [], [], (0.0, -1), 0, 0
    for number in range(first, first + count):
        files = mutated(number)
        begun = time.process_time()
        try:
            is_clean = scanned(files)
        except CkptError:
            is_clean = False
        except Exception as error:
            is_clean = False
            broken.append([number, repr(error)[:300]])
        slowest = max(slowest, (time.process_time() - begun, number))
        num_clean += is_clean
        if is_clean or number % CONTROL == 0:
            found = runs(files, watch)
            controls += bool(found) and not is_clean
            ran += [[number, found]] if found and is_clean else []
    return {"ran": ran, "broken": broken, "slowest": slowest, "clean": num_clean, "controls": controls}


def main() -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGVTALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    plan = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = fuzzed(**plan)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
