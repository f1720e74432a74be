"""What a checkpoint of any size costs before a byte of it moves, and whether the plan's figures are true.

The checkpoints are sparse files with torch's own metadata (``fixtures.synthetic``): some thousand chunks, and with
``--soak`` the trillion parameters on 1,024 ranks.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.serialization.torch_zip import ITEM_HEAD_BYTES, ITEM_TAIL_BYTES
from ckpt_tools.stores.local.store import LocalStore
from fixtures import synthetic
from fixtures.synthetic import Model
from tests.support.ranks import for_ranks

pytestmark = pytest.mark.extended

DOUBLING = 2.3
"""How much more processor time twice the size may take: n log n, and some slack."""

TINY = Model(layers=2, hidden=256, ffn=512, vocab=1024)

TARGETS = {"dcp": "zero3", "zero3-bf16": "dcp"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Two sizes of one model, ``large`` with ``growth`` times the tensors of ``small``."""

    small: Path
    large: Path
    growth: float
    target: dict[str, Any]

    def assert_grows_slowly(self, work: Callable[[Path], object]) -> None:
        """The best of two of each in turns, so that a machine that is slow for a while is slow for both."""
        times = [(_seconds(work, self.small), _seconds(work, self.large)) for _ in range(2)]
        ratio = min(large for _, large in times) / min(small for small, _ in times)
        assert ratio < DOUBLING ** log2(self.growth)


def _seconds(work: Callable[[Path], object], path: Path) -> float:
    started = time.process_time()
    work(path)
    return time.process_time() - started


@pytest.fixture(scope="module", params=TARGETS)
def sizes(request, tmp_path_factory):
    """Ten thousand chunks at most, or the trillion parameters and an eighth of them."""
    ranks, layers = (1024, (14, 112)) if request.config.getoption("--soak") else (128, (2, 8))
    folder = tmp_path_factory.mktemp("sizes")
    shapes = [Model(layers=count).shapes() for count in layers]
    paths = [synthetic.make(request.param, found, ranks, folder / f"{len(found)}") for found in shapes]
    target = {"to": TARGETS[request.param], "world_size": 3 * ranks // 8}
    return Sizes(paths[0], paths[1], len(shapes[1]) / len(shapes[0]), target)


def test_planning_grows_with_the_chunks(sizes):
    sizes.assert_grows_slowly(lambda path: ckpt_tools.plan(path, path.parent / "out", **sizes.target))


def test_planning_stays_within_the_memory_that_it_says(sizes):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.target.items()]
    report, peak_bytes = _run("plan", sizes.large, sizes.large.parent / "out", *words)
    assert peak_bytes <= report["peak_memory_bytes"] <= 3 * max(peak_bytes, 40 << 20)
    assert peak_bytes < 2 << 30


LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
found = process.stdout.read()
_, status, usage = os.wait4(process.pid, 0)
assert not os.waitstatus_to_exitcode(status)
print(usage.ru_maxrss * 1024)
sys.stdout.buffer.write(found)
"""


def _run(*words: str | Path) -> tuple[dict[str, Any], int]:
    """What the command reports, and its peak memory. A small process starts it: a child counts its parent's memory as
    its own until it is another program."""
    command = [sys.executable, "-m", "ckpt_tools", *map(str, words), "--json"]
    done = subprocess.run([sys.executable, "-S", "-c", LAUNCHER, *command], capture_output=True, text=True, check=True)
    peak, _, report = done.stdout.partition("\n")
    return json.loads(report), int(peak)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Eight ranks of two million parameters, in both ways."""
    folder = tmp_path_factory.mktemp("tiny")
    return {kind: synthetic.make(kind, TINY.shapes(), 8, folder / kind) for kind in ("dcp", "zero3-fp32")}


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "zero1", "zero2", "zero3", "universal"])
def test_a_conversion_is_as_the_plan_says(to, sources, tmp_path):
    source, size = sources["zero3-fp32"], for_ranks(to, 3)
    words = [f"--world-size={number}" for number in size.values()]
    report, peak_bytes = _run("convert", source, tmp_path / to, "--to", to, *words)
    files = report["plan"]["files"]
    assert {path: (tmp_path / to / path).stat().st_size for path in files} == files
    planned = ckpt_tools.plan(source, tmp_path / "out", to=to, **size)
    assert (report["bytes_read"], report["bytes_written"]) == (planned.bytes_read, planned.bytes_written)
    assert peak_bytes <= planned.peak_memory_bytes <= 1.5 * peak_bytes


def test_of_a_dcp_little_more_than_the_tensors_is_read(sources, tmp_path):
    report, peak_bytes = _run("convert", sources["dcp"], tmp_path / "out", "--to", "safetensors")
    planned = ckpt_tools.plan(sources["dcp"], tmp_path / "again", to="safetensors")
    most = len(TINY.shapes()) * 8 * (ITEM_HEAD_BYTES + ITEM_TAIL_BYTES)
    assert planned.bytes_read <= report["bytes_read"] <= planned.bytes_read + most
    assert peak_bytes <= planned.peak_memory_bytes <= 1.5 * peak_bytes


@pytest.fixture
def reads(monkeypatch):
    """Every range that is read of a local store while the test runs."""
    found: list[tuple[str, int, int]] = []
    read_into = LocalStore.read_into

    def recorded(store: LocalStore, path: str, start: int, buffer: memoryview) -> None:
        found.append((path, start, start + len(buffer)))
        read_into(store, path, start, buffer)

    monkeypatch.setattr(LocalStore, "read_into", recorded)
    return found


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("kind", ["dcp", "zero3-fp32"])
def test_converting_one_tensor_touches_no_byte_of_another(kind, sources, reads, tmp_path):
    ckpt_tools.inspect(sources[kind])
    headers = set(reads)
    reads.clear()
    ckpt_tools.convert(sources[kind], tmp_path / "one.safetensors", include=[NAME])
    beyond_headers = [
        (file, start, stop)
        for file, start, stop in reads
        if not any(file == head and first <= start and stop <= last for head, first, last in headers)
    ]
    manifest = open_checkpoint(sources[kind], ReadOptions()).manifest
    slot = "weight" if kind == "dcp" else "master"
    shards = manifest.tensors[StateKey(NAME, slot)].shards
    places = [shards.get_byte_range(row) for row in range(len(shards))]
    assert sum(stop - start for _, start, stop in beyond_headers) >= shards.numels.sum() * shards.dtype.item_bytes
    for file, start, stop in beyond_headers:
        assert any(at.file == file and at.start <= start and stop <= at.stop for at in places)
