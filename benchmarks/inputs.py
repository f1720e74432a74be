"""Inputs of works and their cache.

Each is saved by its framework from states of random numbers (`builders`), in processes of its own. An input of another
size or of other builders is another folder.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from math import prod, sqrt
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import MeasureError, measure_success
from fixtures.synthetic import Model

HERE = Path(__file__).parent
WEIGHT_BYTES, STATE_BYTES = 4, 12
"""Bytes of a parameter: fp32 alone, and with AdamW's two moments."""

BUILD_SECONDS = 1800


NUM_HEADS = 4
NUM_EXPERTS = 8
ELEMENTS_PER_SQUARE = 350
"""Parameters over the square of the hidden size: 374 M at 1,024, in 24 layers, as published models of that size."""


def make_llama(hidden: int, layers: int) -> Model:
    """The sizes of a Llama; all are multiples of 16, so that 4 or 8 ranks may cut any dim evenly."""
    return Model(layers, hidden, ffn=11 * hidden // 4, vocab=31 * hidden)


def count_elements(model: Model) -> int:
    return sum(map(prod, model.shapes().values()))


def fit_llama(num_elements: int, hidden: int | None = None) -> Model:
    """A Llama of about so many parameters, and of that width, or as wide as published models of its size."""
    hidden = hidden or max(64, 64 * round(sqrt(num_elements / ELEMENTS_PER_SQUARE) / 64))
    empty, one_layer = (count_elements(make_llama(hidden, layers)) for layers in (0, 1))
    return make_llama(hidden, max(1, round((num_elements - empty) / (one_layer - empty))))


class InputKind(NamedTuple):
    """A kind of checkpoint: what a parameter takes in it, and how many ranks save it."""

    bytes_per_element: int
    world_size: int = 4


KINDS = {
    "dcp": InputKind(STATE_BYTES),  # DCP of FSDP2, fp32 and AdamW
    "dcp8": InputKind(STATE_BYTES, 8),
    "dcp-weights": InputKind(WEIGHT_BYTES),
    "dcp-experts": InputKind(WEIGHT_BYTES),  # DCP of a mixture of experts, all experts of a layer in two tensors
    "megatron": InputKind(WEIGHT_BYTES),  # torch_dist of pipeline parallelism, all layers in one tensor
    "hf-weights": InputKind(WEIGHT_BYTES),  # safetensors shards of DCP's Hugging Face writer
    "tp-weights": InputKind(WEIGHT_BYTES),  # DCP, every matrix cut along its inner axis
    "zero2": InputKind(14),  # bf16 with fp32 masters and AdamW
    "zero3": InputKind(STATE_BYTES),
    "safetensors": InputKind(WEIGHT_BYTES, 1),
    "lora": InputKind(2, 1),  # folders base, in bf16, and adapter
    "torch": InputKind(STATE_BYTES, 1),
}


MARK = ".ckpt-tools-benchmarks"
"""A file in folders of benchmarks. Only in such a folder are files removed."""


def claim_data_folder(folder: Path) -> None:
    """Make the folder of inputs and outputs, or take one of an earlier run, or that in the checkout.

    Raises:
        MeasureError: there are files that no benchmark wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_ours = (folder / MARK).is_file() or folder.is_relative_to(HERE.parent / ".cache")
    if not is_ours and any(folder.iterdir()):
        raise MeasureError(f"{folder} holds files that no benchmark wrote; name an empty folder with --data")
    (folder / MARK).touch()


@dataclass(frozen=True, slots=True)
class InputCache:
    """A folder of inputs, each in a folder of its name, kind, size and builders."""

    root: Path

    def get_path(self, kind: str, size_bytes: int) -> Path:
        return self.root / f"{kind}-{size_bytes}-{_digest_builders()}"

    def get(self, kind: str, size_bytes: int) -> Path:
        """The input, made if needed. Raises `MeasureError`."""
        model = fit_llama(size_bytes // KINDS[kind].bytes_per_element)
        return self.build(self.get_path(kind, size_bytes), kind, model, KINDS[kind].world_size)

    def build(self, path: Path, kind: str, model: Model, ranks: int) -> Path:
        """`path`, with an input of that model by so many ranks, made if needed. Raises `MeasureError`."""
        if path.exists():
            return path
        self.root.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        words = ["-m", "benchmarks.builders", kind, str(partial), *map(str, (model.hidden, model.layers, ranks))]
        try:
            with tempfile.TemporaryDirectory() as folder:
                command, log = [sys.executable, *words], Path(folder, "log")
                measure_success(command, log, time_limit=BUILD_SECONDS)
            return partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def make_room(self, num_bytes: int, keep: Path | None = None) -> bool:
        """Delete inputs except `keep`, the oldest first, until so much is free. False if it is not."""
        self.root.mkdir(parents=True, exist_ok=True)
        name = re.compile(rf"({'|'.join(map(re.escape, KINDS))})-\d+-[0-9a-f]+(\.partial)?")
        folders = [path for path in self.root.iterdir() if path.is_dir() and not path.is_symlink()]
        inputs = [path for path in folders if name.fullmatch(path.name) and path != keep]
        for folder in sorted(inputs, key=lambda folder: folder.stat().st_mtime):
            if shutil.disk_usage(self.root).free < num_bytes:
                shutil.rmtree(folder)
        return shutil.disk_usage(self.root).free >= num_bytes


def _digest_builders() -> str:
    """Digest of the builders and of the frameworks' versions, which decide an input's bytes."""
    digest = hashlib.sha256()
    for name in ("builders.py", "inputs.py"):
        digest.update((HERE / name).read_bytes())
    for framework in ("torch", "deepspeed", "safetensors", "transformers"):
        digest.update(version(framework).encode())
    return digest.hexdigest()[:8]
