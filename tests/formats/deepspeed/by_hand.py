"""Manifests made by hand, whose tensors lie in memory, and the files that a layout makes of them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import Note
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.planning.plan import make_plan
from ckpt_tools.stores.destination import StoreDestination
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.wrappers import overlay_literals
from ckpt_tools.transfer.execute import execute_plan
from ckpt_tools.transfer.runners.threads import ThreadRunner

OPTIONS = {"lr": 0.125, "momentum": 0.5}
SCALER = {"cur_scale": 64.0, "dynamic": True, "scale_window": 3}


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint being made by hand: tensors in a store in memory, each a file of its own."""

    store: MemoryStore = field(default_factory=MemoryStore)
    tensors: dict[StateKey, TensorEntry] = field(default_factory=dict)
    literals: dict[str, bytes] = field(default_factory=dict)

    def add(
        self, fqn: str, slot: str, value: Any, kind: Kind = Kind.STATE, *, rows: Sequence[int] | None = None
    ) -> Checkpoint:
        """A tensor, in one piece or cut before ``rows``."""
        value, file = np.asarray(value), f"{fqn}.{slot}"
        self.store.files[file] = bytearray(value.tobytes())
        bounds = [0, *rows, len(value)] if rows is not None else []
        width, rest = value.nbytes // len(value) if bounds else 0, value.shape[1:]
        shards = [
            Shard(Box((a, *(0,) * len(rest)), (b, *rest)), ByteRange(file, a * width, b * width))
            for a, b in pairwise(bounds)
        ] or [Shard(Box.whole(value.shape), ByteRange(file, 0, value.nbytes))]
        dtype = DType(value.dtype.name)
        table = ShardTable.build(value.shape, dtype, shards)
        self.tensors[StateKey(fqn, slot)] = TensorEntry(value.shape, dtype, kind, table)
        return self

    def weight(self, fqn: str, value: Any, kind: Kind = Kind.PARAMETER, **options: Any) -> Checkpoint:
        return self.add(fqn, WEIGHT, value, kind, **options)

    def adam(self, fqn: str, *shape: int) -> Checkpoint:
        """A parameter with the state of Adam after 4 steps."""
        weight, mean, square = np.random.default_rng(len(self.tensors)).random((3, *shape), np.float32)
        self.weight(fqn, weight).add(fqn, "exp_avg", mean).add(fqn, "exp_avg_sq", square)
        return self.add(fqn, "step", np.float32(4))

    def number(self, fqn: str, slot: str, value: int) -> Checkpoint:
        """State that the source keeps as a plain number."""
        name = f"literal:{fqn}.{slot}"
        self.literals[name] = value.to_bytes(8, "little")
        table = ShardTable.build((), DType.INT64, [Shard(Box.whole(()), ByteRange(name, 0, 8))])
        self.tensors[StateKey(fqn, slot)] = TensorEntry((), DType.INT64, Kind.STATE, table)
        return self

    def bytes_of(self, fqn: str, slot: str = WEIGHT) -> bytes:
        return bytes(self.store.files[f"{fqn}.{slot}"])

    def manifest(self, *groups: Sequence[str] | ParamGroup, source: str = "dcp", **more: Any) -> Manifest:
        """Groups of these parameters, with the same hyperparameters where none are given."""
        found = tuple(g if isinstance(g, ParamGroup) else ParamGroup(tuple(g), OPTIONS) for g in groups)
        return Manifest(source, self.tensors, groups=found, literals=self.literals, **more)

    def files(self, manifest: Manifest, layout: Layout) -> dict[str, bytes]:
        target = MemoryStore()
        write(manifest, layout, self.store, target)
        return {path: bytes(data) for path, data in target.files.items()}


def write(manifest: Manifest, layout: Layout, source: Store, target: Any) -> None:
    plan = make_plan(manifest, layout, memory_bytes=512 << 20, num_workers=1)
    store = overlay_literals(source, manifest.literals)
    execute_plan(plan, store, StoreDestination(target), runner=ThreadRunner(1), on_bytes=lambda _: None)


def loaded(files: Mapping[str, bytes], name: str) -> Any:
    """A file as torch loads it, by the end of its path."""
    (data,) = (data for path, data in files.items() if path.endswith(f"/{name}"))
    return torch.load(io.BytesIO(data), weights_only=False)


def notes_about(layout: Layout, what: str) -> list[Note]:
    return [note for note in layout.notes if what in note.what]
