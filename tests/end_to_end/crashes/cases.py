"""Conversions to every format, small enough to be killed a thousand times, in several tasks a file all the same."""

import json
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.options import parse_size
from ckpt_tools.errors import MemoryBudgetError
from tests.end_to_end.crashes.runs import Runs
from tests.support.files import files_below, write_files
from tests.support.ranks import for_ranks

SOURCES = {
    "dcp": ("dcp", "dcp", 2),
    "zero1": ("zero1", "zero1", 2),
    "zero2": ("zero2", "zero2", 2),
    "zero3": ("zero3", "zero3", 2),
    "universal": ("universal", "universal", 1),
    "safetensors": ("safetensors", "safetensors", 1),
    "sharded": ("sharded", "safetensors", 1),
    "torch": ("state.pt", "torch", 1),
}
"""Name, format and ranks of a source of each format."""

CASES = {
    "safetensors": ("dcp", "out", ["--to", "safetensors"]),
    "sharded": ("zero3", "out", ["--to", "safetensors", "--max-shard-size", "100kB"]),
    "file": ("universal", "out.safetensors", []),
    "torch": ("zero1", "out.pt", ["--state", "all"]),
    "torch-folder": ("sharded", "out", ["--to", "torch", "--max-shard-size", "100kB"]),
    "dcp": ("torch", "out", ["--to", "dcp", "--world-size", "3"]),
    "zero1": ("dcp", "out", ["--to", "zero1", "--world-size", "2"]),
    "zero2": ("zero3", "out", ["--to", "zero2", "--world-size", "2"]),
    "zero3": ("zero2", "out", ["--to", "zero3", "--world-size", "3"]),
    "universal": ("safetensors", "out", ["--to", "universal"]),
    "average": ("zero2 other/dcp torch", "out", ["--to", "safetensors", "--max-shard-size", "100kB"]),
}
"""By writer: the source, the name of the output, and the options. Every reader takes part. Several sources, of which
some have other values, are averaged."""


@dataclass(frozen=True, slots=True)
class Case:
    """A conversion in ``folder``, where nothing but its output is; ``expected`` are the files of it."""

    folder: Path
    name: str
    words: tuple[str | Path, ...]
    expected: dict[str, bytes]
    old: dict[str, bytes]
    """Another output of the same names, of a checkpoint of other values."""

    @property
    def target(self) -> Path:
        return self.folder / self.name

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.expected.values()))

    def clear(self) -> None:
        """Nothing is there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def put(self, files: dict[str, bytes]) -> None:
        """Something was there before."""
        self.clear()
        write_files(self.folder, files)

    def visible(self) -> dict[str, bytes]:
        """Every file that somebody who looks for a checkpoint sees."""
        return {path: data for path, data in files_below(self.folder).items() if not path.startswith(".out")}


def done_bytes(log: bytes) -> int:
    """Bytes of the tasks that a journal says are done, read without our reader."""
    parts = set()
    for line in log.splitlines():
        checksum, _, text = line.partition(b" ")
        if text and int(checksum, 16) == zlib.crc32(text) and json.loads(text)[0] == "part":
            parts.add(tuple(json.loads(text)[1:5]))
    return sum(stop - start for _, _, start, stop in parts)


def make_sources(folder: Path) -> None:
    """A training state in every format: a megabyte, of which a task is a sixteenth."""
    for place, rate in ((folder, 0.1), (folder / "other", 0.2)):
        place.mkdir(exist_ok=True)
        _make_sources(place, rate)


def _make_sources(folder: Path, rate: float) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 160) for _ in range(3)), torch.nn.LayerNorm(96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, folder / "made.pt")
    for name, format_name, world_size in SOURCES.values():
        cut: dict[str, Any] = {"max_shard_size": "300kB"} if name == "sharded" else for_ranks(format_name, world_size)
        ckpt_tools.convert(folder / "made.pt", folder / name, to=format_name, state="all", **cut)


def make_case(name: str, sources: Path, folder: Path, runs: Runs) -> Case:
    """A conversion that was done once: with one worker, in the smallest tasks."""
    source, output, options = CASES[name]
    folder.mkdir()
    paths = [sources / each.replace("torch", "state.pt") for each in source.split()]
    verb = "convert" if len(paths) == 1 else "average"
    start = (verb, *paths, folder / output, *options, "--workers", "1", "--quiet")
    words = (*start, "--memory", str(_least_memory(start)))
    if verb == "convert":
        runs.warm(verb, sources / "other" / paths[0].name, *words[2:])
    else:
        runs.warm(*words, "--decay", "0.25")
    old = files_below(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    runs.warm(*words)
    return Case(folder, output, words, files_below(folder), old)


def _least_memory(words: tuple[str | Path, ...]) -> int:
    """The budget at which tasks are as small as they get: 64 KiB."""
    from ckpt_tools.cli.main import group

    with pytest.raises(MemoryBudgetError) as caught:
        group.main([*map(str, words), "--memory", "1"], standalone_mode=False)
    found = re.search(r"at least ([\d.]+ MB) of memory", str(caught.value))
    assert found is not None
    return parse_size(found[1])
