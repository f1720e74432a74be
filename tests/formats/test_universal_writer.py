"""What we write as a universal checkpoint, judged by DeepSpeed's own load in stages 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.execute import execute
from ckpt_tools.formats.base import ReadOptions, WriteOptions
from ckpt_tools.formats.dcp import DcpReader
from ckpt_tools.formats.deepspeed import DeepSpeedReader
from ckpt_tools.formats.universal import UniversalReader, UniversalWriter
from ckpt_tools.layout import Layout
from ckpt_tools.manifest import Manifest
from ckpt_tools.planning import make_plan
from ckpt_tools.runners.threads import ThreadRunner
from ckpt_tools.stores.base import Source
from ckpt_tools.stores.local import LocalStore
from ckpt_tools.stores.overlay import Overlay
from fixtures.store import Fixture
from tests.conftest import Resume
from tests.support.truth import MASTER, WEIGHT, Truth, assert_same_bits

Checkpoint = Callable[[str, str, int], Fixture]

READERS = {"fsdp2": DcpReader(), "zero": DeepSpeedReader(), "universal": UniversalReader()}


def read(kind: str, folder: Path) -> Manifest:
    reader = next(reader for prefix, reader in READERS.items() if kind.startswith(prefix))
    return reader.read_manifest(Source.open(LocalStore(folder)), ReadOptions())


def write(manifest: Manifest, source: Path, out: Path, options: WriteOptions | None = None) -> Layout:
    layout = UniversalWriter().layout(manifest, options or WriteOptions())
    plan = make_plan(manifest, layout, memory_bytes=512 << 20, num_workers=1)
    out.mkdir()
    store = Overlay(LocalStore(source), manifest.literals)
    execute(plan, store, LocalStore(out), runner=ThreadRunner(1), fsync=False, on_bytes=lambda _: None)
    return layout


PLAIN = [("fsdp2", 2), ("zero1-fp32", 1), ("universal-zero3-fp32", 1)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("kind", "world_size"), PLAIN)
def test_a_run_goes_on(
    kind: str, world_size: int, stage: int, checkpoint: Checkpoint, resume: Resume, tmp_path: Path
) -> None:
    made = checkpoint(kind, "plain", world_size)
    truth = Truth.load(made.root)
    manifest = read(kind, made.checkpoint)
    layout = write(manifest, made.checkpoint, tmp_path / "out")
    for note in layout.notes:
        print(note)
    resumed = resume(f"universal-zero{stage}-fp32", "plain", tmp_path / "out", 2)
    print(truth.facts["losses"], resumed.facts["losses"])
    trained = resumed.slot(MASTER)
    want = {k: v for k, v in truth.tensors.items() if k[0] in trained and k[1] != MASTER}
    assert_same_bits(want, {k: v for k, v in resumed.tensors.items() if k[0] in trained and k[1] != MASTER})
    assert resumed.facts["losses"] == truth.facts["losses"]
