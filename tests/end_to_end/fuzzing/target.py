"""What one execution of the fuzzer does: open a checkpoint in memory as the commands do, and read it through.

Every outcome is fine but an exception that is no ``CkptError``: the manifest and its tensors, or one named error.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.summary import summarize
from ckpt_tools.errors import CkptError, MemoryBudgetError
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.transfer.tensor_reader import TensorReader
from ckpt_tools.verification.scan import scan_source

MAX_TENSOR_BYTES = 1 << 16
"""Of a tensor no more is read: what it holds matters less here than that reading it ends."""

SCRATCH_BYTES = 1 << 16

ORBAX = "manifest.ocdbt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was read, or the error that says why not."""

    manifest: Manifest | None = None
    elements: Mapping[tuple[str, str], bytes] = field(default_factory=dict)
    error: CkptError | None = None


def execute(files: Mapping[str, bytes]) -> Outcome:
    """Read a checkpoint. Raises whatever no reader should raise."""
    with opened(files) as source:
        return _execute(source)


def _execute(source: Source) -> Outcome:
    try:
        source, manifest = read_source(source, ReadOptions())
        summary = summarize(manifest, source.store.url, source.files)
        json.dumps(summary.to_json(tensors=True), ensure_ascii=False).encode()
        return Outcome(manifest, elements_of(source.store, manifest))
    except MemoryBudgetError:
        raise
    except CkptError as error:
        str(error).encode(errors="backslashreplace")
        return Outcome(error=error)


def scan(files: Mapping[str, bytes]) -> None:
    """Scan a checkpoint. Raises whatever scanning should not raise."""
    with suppress(CkptError), opened(files) as source:
        scan_source(source, "memory://")


@contextmanager
def opened(files: Mapping[str, bytes]) -> Iterator[Source]:
    """``files`` in memory; those of Orbax in a folder, from which tensorstore reads them."""
    if not any(path.rpartition("/")[2] == ORBAX for path in files):
        yield Source.open(MemoryStore({path: bytearray(data) for path, data in files.items()}))
        return
    with TemporaryDirectory() as folder:
        for path, data in files.items():
            _put(Path(folder), path, data)
        yield Source.open(LocalStore(Path(folder)))


def _put(folder: Path, path: str, data: bytes) -> None:
    """A file that a folder can hold, and whose name leads nowhere else."""
    target = Path(os.path.normpath(folder / path))
    if folder in target.parents and "\0" not in path:
        with suppress(OSError, UnicodeEncodeError):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def elements_of(store: Store, manifest: Manifest) -> dict[tuple[str, str], bytes]:
    """The bytes of every tensor, or the first of them."""
    tensor_reader = TensorReader(store, SCRATCH_BYTES)
    found = {}
    for key, entry in manifest.tensors.items():
        numel = min(entry.numel, MAX_TENSOR_BYTES // entry.dtype.item_bytes)
        out = bytearray(numel * entry.dtype.item_bytes)
        if numel:
            tensor_reader.read(entry, Box.whole(entry.shape), entry.shape, 0, numel, memoryview(out))
        found[tuple(key)] = bytes(out)
    return found
