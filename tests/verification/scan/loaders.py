"""Real loaders of checkpoints and of files beside them; each loads what is at a path as a program would.

``KINDS`` are loaders of one kind of file each, in their safest setting: they say if a file is valid of its kind.
"""

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
import tempfile
import zipimport
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.hub
import torch.package
import yaml
from gguf import GGUFReader
from safetensors import safe_open

from tests.verification.scan.generator import Files, write

Loader = Callable[[Path], object]


def of_stream(name: str, *loads: Callable[[Any], object]) -> Loader:
    """The calls, one after the other, with the opened file."""

    def load(path: Path) -> None:
        with path.open("rb") as stream:
            for each in loads:
                each(stream)

    load.__name__ = name
    return load


def c_pickle_of_bytes(path: Path) -> None:
    pickle.loads(path.read_bytes())


def torch_load(path: Path) -> None:
    torch.load(path, weights_only=False)


def numpy_load(path: Path) -> None:
    found = np.load(path, allow_pickle=True)
    for name in getattr(found, "files", ()):
        with contextlib.suppress(ValueError):
            found[name]


python_pickle = of_stream("python_pickle", lambda stream: pickle._Unpickler(stream).load())
c_pickle = of_stream("c_pickle", *[pickle.load] * 3)
torch_load_twice = of_stream("torch_load_twice", *[partial(torch.load, weights_only=False)] * 3)
numpy_load_twice = of_stream("numpy_load_twice", *[partial(np.load, allow_pickle=True)] * 3)


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
    import transformers

    transformers.GPT2Model.from_pretrained(path.parent, weights_only=False, local_files_only=True)


def gpt2_by_default(path: Path) -> None:
    import transformers

    transformers.GPT2Model.from_pretrained(path.parent, local_files_only=True)


def yaml_old_loader(path: Path) -> None:
    with path.open(encoding="utf-8") as stream:
        yaml.load(stream, Loader=yaml.Loader)


YAML: list[Loader] = [
    of_stream("yaml_unsafe", lambda stream: list(yaml.unsafe_load_all(stream))),
    of_stream("yaml_c_unsafe", lambda stream: list(yaml.load_all(stream, Loader=yaml.CUnsafeLoader))),
    of_stream("yaml_full", lambda stream: list(yaml.full_load_all(stream))),
    yaml_old_loader,
]


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


# In the safest setting


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
