"""Loaders of one kind of file each, in their safest setting: they say if a file is valid of its kind."""

from __future__ import annotations

import io
import json
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import yaml
from gguf import GGUFReader
from safetensors import safe_open

from tests.verification.scan.generator import Files, write


def _safetensors(path: Path) -> None:
    with safe_open(str(path), "np") as opened:
        for name in opened.keys():  # noqa: SIM118
            opened.get_tensor(name)


def _torch(path: Path) -> None:
    torch.load(path, weights_only=True)


def _numpy(path: Path) -> None:
    found = np.load(path, allow_pickle=False)
    for name in getattr(found, "files", ()):
        found[name]


def _dcp(path: Path) -> None:
    if path.name != ".metadata":
        return
    for info in dcp.FileSystemReader(path.parent).read_metadata().storage_data.values():
        data = (path.parent / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        torch.load(io.BytesIO(data), weights_only=True)


def _json_lines(path: Path) -> None:
    for line in path.read_text().splitlines():
        json.loads(line)


KINDS: dict[str, Callable[[Path], object]] = {
    "safetensors": _safetensors,
    "torch": _torch,
    "torch legacy": _torch,
    "GGUF": GGUFReader,
    "DCP": _dcp,
    "npy": _numpy,
    "npz": _numpy,
    "pickle": lambda path: pickle.loads(path.read_bytes()),
    "JSON": lambda path: json.loads(path.read_bytes()),
    "JSON lines": _json_lines,
    "YAML": lambda path: list(yaml.parse(path.read_bytes(), Loader=yaml.SafeLoader)),
    "text": lambda path: path.read_text("utf-8"),
}


def is_valid(kind: str, files: Files) -> bool:
    """True if the loader of ``kind`` loads every file."""
    with tempfile.TemporaryDirectory() as folder:
        write(files, Path(folder))
        try:
            for name in files:
                KINDS[kind](Path(folder, name))
        except Exception:
            return False
    return True
