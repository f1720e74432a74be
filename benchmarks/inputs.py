"""The checkpoints that works start from: which there are, and their cache.

Each is made by its framework's own save from states of random numbers (`builders`), in processes of its own that end
when it is made: the suite itself imports no framework. An input of another size or of other builders is another folder.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.llama import Llama
from benchmarks.measure import measured

HERE = Path(__file__).parent
WEIGHT_BYTES, STATE_BYTES = 4, 12
"""Of a parameter: fp32 alone, and with AdamW's two moments."""

BUILD_SECONDS = 1800


class Kind(NamedTuple):
    """A kind of checkpoint: what a parameter takes in it, and how many ranks save it."""

    bytes_per_element: int
    world_size: int = 4


KINDS = {
    "dcp": Kind(STATE_BYTES),  # DCP of FSDP2, fp32 and AdamW
    "dcp8": Kind(STATE_BYTES, 8),
    "dcp-weights": Kind(WEIGHT_BYTES),
    "hf-weights": Kind(WEIGHT_BYTES),  # safetensors shards of DCP's Hugging Face writer
    "tp-weights": Kind(WEIGHT_BYTES),  # DCP, every matrix cut along its inner axis
    "zero2": Kind(14),  # bf16 with fp32 masters and AdamW
    "zero3": Kind(STATE_BYTES),
    "safetensors": Kind(WEIGHT_BYTES, 1),
    "torch": Kind(STATE_BYTES, 1),
}


MARK = ".ckpt-tools-benchmarks"
"""A file in a folder of ours: what has the names of ours in it may be removed, and is in no other."""


class FolderError(Exception):
    """A folder holds somebody's files, and would lose some."""


def claim(folder: Path) -> None:
    """Make the folder of inputs and outputs, or take one that a run made before; the one in the checkout is ours.

    Raises:
        FolderError: there are files that no benchmark wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_ours = (folder / MARK).is_file() or folder.is_relative_to(HERE.parent / ".cache")
    if not is_ours and any(folder.iterdir()):
        raise FolderError(f"{folder} holds files that no benchmark wrote; name an empty folder with --data")
    (folder / MARK).touch()


class BuildError(Exception):
    """An input could not be made; the message is the last line of what its builder said."""


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of inputs, each in a folder of its name, kind, size and builders."""

    root: Path

    def path(self, kind: str, size_bytes: int) -> Path:
        """Where the input lies once it is made."""
        return self.root / f"{kind}-{size_bytes}-{_digest()}"

    def get(self, kind: str, size_bytes: int) -> Path:
        """The input, made if need be. Raises `BuildError`."""
        path = self.path(kind, size_bytes)
        if not path.exists():
            self._build(kind, size_bytes, path)
        return path

    def _build(self, kind: str, size_bytes: int, path: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        model = Llama.of(size_bytes // KINDS[kind].bytes_per_element)
        words = ["-m", "benchmarks.builders", kind, str(partial), str(model.hidden), str(model.layers)]
        try:
            with tempfile.TemporaryDirectory() as folder:
                _make([sys.executable, *words], Path(folder, "log"))
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def make_room(self, num_bytes: int, keep: Path | None = None) -> bool:
        """Delete inputs, the least recently made first and not `keep`, until so much is free; whether it is."""
        self.root.mkdir(parents=True, exist_ok=True)
        inputs = [path for path in self.root.iterdir() if _is_input(path) and path != keep]
        for folder in sorted(inputs, key=lambda folder: folder.stat().st_mtime):
            if self.free_bytes() < num_bytes:
                shutil.rmtree(folder)
        return self.free_bytes() >= num_bytes

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free


def _make(command: Sequence[str], log: Path) -> None:
    """Raises `BuildError`."""
    usage = measured(command, log, time_limit=BUILD_SECONDS, cwd=HERE.parent)
    if usage.timed_out:
        raise BuildError(f"not made in {BUILD_SECONDS} s")
    if usage.exit_code:
        raise BuildError((log.read_text(errors="replace").strip().splitlines() or ["no word of why"])[-1])


def _is_input(path: Path) -> bool:
    known = "|".join(map(re.escape, KINDS))
    is_named = re.fullmatch(rf"({known})-\d+-[0-9a-f]+(\.partial)?", path.name) is not None
    return is_named and path.is_dir() and not path.is_symlink()


def _digest() -> str:
    """Of what decides an input's bytes: the builders, and the frameworks that save."""
    digest = hashlib.sha256()
    for name in ("builders.py", "llama.py"):
        digest.update((HERE / name).read_bytes())
    for framework in ("torch", "deepspeed", "safetensors", "transformers"):
        digest.update(version(framework).encode())
    return digest.hexdigest()[:8]
