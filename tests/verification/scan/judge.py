"""Real loaders load hostile files, in a process of its own whose ``os.system`` only writes down that it was called.

The plan, a list of numbers of samples, is JSON on stdin; the numbers of those that ran something go to stdout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pickle
import posix
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.package
import transformers

from tests.verification.scan.generator import sample, write

called: list[str] = []


def _recorder(command: Any = "", *_: Any) -> int:
    called.append(str(command))
    return 0


def _python_pickle(path: Path) -> None:
    with path.open("rb") as stream:
        pickle._Unpickler(stream).load()  # type: ignore[attr-defined]


def _c_pickle(path: Path) -> None:
    with path.open("rb") as stream:
        for _ in range(3):
            pickle.load(stream)


def _c_pickle_of_bytes(path: Path) -> None:
    pickle.loads(path.read_bytes())


def _torch(path: Path) -> None:
    torch.load(path, weights_only=False)


def _torch_twice(path: Path) -> None:
    with path.open("rb") as stream:
        for _ in range(3):
            torch.load(stream, weights_only=False)


def _numpy(path: Path) -> None:
    found = np.load(path, allow_pickle=True)
    for name in getattr(found, "files", ()):
        found[name]


def _numpy_twice(path: Path) -> None:
    with path.open("rb") as stream:
        for _ in range(3):
            np.load(stream, allow_pickle=True)


def _metadata(path: Path) -> None:
    reader = dcp.FileSystemReader(path.parent)
    metadata = reader.read_metadata()
    for info in metadata.storage_data.values():
        data = (path.parent / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        torch.load(io.BytesIO(data), weights_only=False)


def _items(path: Path) -> None:
    """What a reader that looks for archives finds in a file of items."""
    data = path.read_bytes()
    at = data.find(b"PK\x03\x04")
    while at >= 0:
        with contextlib.suppress(Exception):
            torch.load(io.BytesIO(data[at:]), weights_only=False)
        at = data.find(b"PK\x03\x04", at + 1)


def _joblib(path: Path) -> None:
    import joblib

    joblib.load(path)


def _nemo(path: Path) -> None:
    with tarfile.open(path) as archive:
        member = archive.extractfile("./model_weights.ckpt")
        assert member is not None
        torch.load(io.BytesIO(member.read()), weights_only=False)


def _package(path: Path) -> None:
    torch.package.PackageImporter(str(path)).load_pickle("model", "data.pkl")


def _transformers(path: Path) -> None:
    transformers.GPT2Model.from_pretrained(path.parent, weights_only=False, local_files_only=True)


def _transformers_as_it_is(path: Path) -> None:
    transformers.GPT2Model.from_pretrained(path.parent, local_files_only=True)


LOADERS: list[Callable[[Path], None]] = [_c_pickle, _c_pickle_of_bytes, _python_pickle, _torch, _torch_twice]
JOBLIB = [_joblib] if importlib.util.find_spec("joblib") else []


def loaders(path: Path) -> Iterator[Callable[[Path], None]]:
    """Those that people use for a file of this name. One of safetensors is read by safetensors alone."""
    ending = path.suffix
    if path.name == ".metadata":
        yield from (_metadata, _c_pickle, _python_pickle)
    elif ending == ".distcp":
        yield from (_torch, _items)
    elif ending in (".npy", ".npz"):
        yield from (_numpy, _numpy_twice, _torch, *JOBLIB)
    elif path.name == "pytorch_model.bin":
        yield from (_transformers, _transformers_as_it_is, *LOADERS)
    elif ending == ".nemo":
        yield from (_nemo, *LOADERS)
    else:
        yield from (*LOADERS, _package, *JOBLIB)


def runs(files: dict[str, bytes], folder: Path) -> bool:
    write(files, folder)
    called.clear()
    for name in files:
        for load in loaders(folder / name):
            with contextlib.suppress(BaseException):
                load(folder / name)
    for name in files:
        (folder / name).unlink()
    return bool(called)


def main() -> None:
    warnings.simplefilter("ignore")
    numbers = json.load(sys.stdin)
    os.system = posix.system = _recorder  # type: ignore[attr-defined]
    out, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        found = [number for number in numbers if runs(sample(number).files, Path(folder))]
    sys.stdout = out
    print(json.dumps(found))


if __name__ == "__main__":
    main()
