"""Real loaders of checkpoints and of files beside them; each loads what is at a path as a program would."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging.config
import pickle
import pkgutil
import runpy
import tarfile
import zipimport
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.hub
import torch.package
import transformers
import yaml

Loader = Callable[[Path], object]


def python_pickle(path: Path) -> None:
    with path.open("rb") as stream:
        pickle._Unpickler(stream).load()


def c_pickle(path: Path) -> None:
    with path.open("rb") as stream:
        for _ in range(3):
            pickle.load(stream)


def c_pickle_of_bytes(path: Path) -> None:
    pickle.loads(path.read_bytes())


def torch_load(path: Path) -> None:
    torch.load(path, weights_only=False)


def torch_load_twice(path: Path) -> None:
    with path.open("rb") as stream:
        for _ in range(3):
            torch.load(stream, weights_only=False)


def numpy_load(path: Path) -> None:
    found = np.load(path, allow_pickle=True)
    for name in getattr(found, "files", ()):
        with contextlib.suppress(ValueError):
            found[name]


def numpy_load_twice(path: Path) -> None:
    with path.open("rb") as stream:
        for _ in range(3):
            np.load(stream, allow_pickle=True)


def dcp_metadata(path: Path) -> None:
    reader = dcp.FileSystemReader(path.parent)
    metadata = reader.read_metadata()
    for info in metadata.storage_data.values():
        data = (path.parent / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        torch.load(io.BytesIO(data), weights_only=False)


def dcp_items(path: Path) -> None:
    """Load the archives that a reader finds in a file of items."""
    data = path.read_bytes()
    at = data.find(b"PK\x03\x04")
    while at >= 0:
        with contextlib.suppress(Exception):
            torch.load(io.BytesIO(data[at:]), weights_only=False)
        at = data.find(b"PK\x03\x04", at + 1)


def joblib_load(path: Path) -> None:
    import joblib

    joblib.load(path)


def pandas_read_pickle(path: Path) -> None:
    import pandas as pd

    pd.read_pickle(path)


def nemo(path: Path) -> None:
    """Load the members of a tar as NeMo does with ``model_weights.ckpt``."""
    with tarfile.open(path) as archive:
        for info in archive:
            member = archive.extractfile(info)
            with contextlib.suppress(Exception):
                torch.load(io.BytesIO(member.read() if member else b""), weights_only=False)


def package(path: Path) -> None:
    torch.package.PackageImporter(str(path)).load_pickle("model", "data.pkl")


def torch_hub(path: Path) -> None:
    """Load an archive of one file, as ``torch.hub.load_state_dict_from_url`` does."""
    torch.hub._legacy_zip_load(str(path), str(path.parent / "hub"), None, False)


def program(path: Path) -> None:
    """Run the file as ``python FILE`` does: an archive with ``__main__.py``, compiled code, or source."""
    runpy.run_path(str(path), run_name="__main__")


def zip_program(path: Path) -> None:
    """Run the file as ``python FILE`` does if it is an archive."""
    if isinstance(pkgutil.get_importer(str(path)), zipimport.zipimporter):
        program(path)


def gpt2(path: Path) -> None:
    transformers.GPT2Model.from_pretrained(path.parent, weights_only=False, local_files_only=True)


def gpt2_by_default(path: Path) -> None:
    transformers.GPT2Model.from_pretrained(path.parent, local_files_only=True)


def yaml_unsafe(path: Path) -> None:
    with path.open("rb") as stream:
        list(yaml.unsafe_load_all(stream))


def yaml_c_unsafe(path: Path) -> None:
    with path.open("rb") as stream:
        list(yaml.load_all(stream, Loader=yaml.CUnsafeLoader))


def yaml_full(path: Path) -> None:
    with path.open("rb") as stream:
        list(yaml.full_load_all(stream))


def yaml_old_loader(path: Path) -> None:
    with path.open(encoding="utf-8") as stream:
        yaml.load(stream, Loader=yaml.Loader)


def file_config(path: Path) -> None:
    logging.config.fileConfig(path, disable_existing_loggers=False)


def dict_config(path: Path) -> None:
    data = path.read_bytes()
    for document in yaml.safe_load_all(data) if path.suffix.lower() != ".jsonl" else map(json.loads, data.splitlines()):
        with contextlib.suppress(Exception):
            logging.config.dictConfig(document)


def ray_metadata(path: Path) -> None:
    from ray.tune.trainable.metadata import _TrainingRunMetadata

    _TrainingRunMetadata.from_json_state(path.read_text())


def ray_trial(path: Path) -> None:
    from ray.tune.experiment import Trial

    Trial.from_json_state(path.read_text(), stub=True)


def ray_experiment(path: Path) -> None:
    from ray.tune import ExperimentAnalysis

    ExperimentAnalysis(str(path.parent))


def entry_points(path: Path) -> None:
    """Load the entry points of the packages beside the file."""
    for found in importlib.metadata.distributions(path=[str(path.parents[1])]):
        for point in found.entry_points:
            with contextlib.suppress(AttributeError):
                point.load()


UNPICKLERS: list[Loader] = [c_pickle, c_pickle_of_bytes, python_pickle, torch_load, torch_load_twice]
JOBLIB: list[Loader] = [joblib_load] if importlib.util.find_spec("joblib") else []
PANDAS: list[Loader] = [pandas_read_pickle] if importlib.util.find_spec("pandas") else []
YAML: list[Loader] = [yaml_unsafe, yaml_c_unsafe, yaml_full, yaml_old_loader]
ARCHIVES: list[Loader] = [zip_program, package, torch_hub, nemo]
ANY: list[Loader] = [*UNPICKLERS, *JOBLIB, *PANDAS, numpy_load, numpy_load_twice, *ARCHIVES]
"""Loaders that are tried whatever the name of a file is."""


def usual(path: Path) -> Iterator[Loader]:
    """Loaders that are used for a file of this name."""
    ending = path.suffix
    if path.name == ".metadata":
        yield from (dcp_metadata, c_pickle, python_pickle)
    elif ending == ".distcp":
        yield from (torch_load, dcp_items)
    elif ending in (".npy", ".npz"):
        yield from (numpy_load, numpy_load_twice, torch_load, *JOBLIB)
    elif path.name == "pytorch_model.bin":
        yield from (gpt2, gpt2_by_default, *UNPICKLERS)
    elif ending == ".nemo":
        yield from (nemo, *UNPICKLERS)
    else:
        yield from (*UNPICKLERS, package, *JOBLIB)


def every(path: Path) -> Iterator[Loader]:
    """All loaders that could load a file of this name."""
    ending = path.suffix.lower()
    yield from (*ANY, program, torchscript)
    if path.name == ".metadata":
        yield dcp_metadata
    elif path.name == "entry_points.txt":
        yield entry_points
    if ending in (".txt", ".cfg", ".ini", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl", ".log"):
        yield from (*YAML, file_config)
    if ending in (".json", ".jsonl", ".yaml", ".yml"):
        yield dict_config
    if ending in (".json", ".jsonl"):
        yield from (ray_metadata, ray_trial)
    if path.name.startswith("experiment_state"):
        yield ray_experiment


def torchscript(path: Path) -> Any:
    """Load TorchScript, which runs on the interpreter of torch and not on that of Python."""
    return torch.jit.load(str(path))
