"""What a checkpoint holds, from its headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One logical tensor."""

    name: str
    slot: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_shards: int

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "slot": self.slot,
            "kind": self.kind,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "bytes": self.num_bytes,
            "shards": self.num_shards,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint in figures. ``num_parameters`` counts elements of parameters, each tie once; sizes in bytes."""

    source: str
    format: str
    step: int | None
    world_size: int | None
    num_parameters: int
    num_tensors: int
    num_shards: int
    num_files: int
    num_bytes: int
    bytes_by_dtype: Mapping[str, int]
    optimizer_slots: tuple[str, ...]
    group_sizes: tuple[int, ...]
    aliases: Mapping[str, str]
    extras: tuple[str, ...]
    tensors: tuple[TensorSummary, ...]

    def to_json(self, *, tensors: bool) -> dict[str, Any]:
        found = {
            "source": self.source,
            "format": self.format,
            "step": self.step,
            "world_size": self.world_size,
            "parameters": self.num_parameters,
            "tensors": self.num_tensors,
            "shards": self.num_shards,
            "files": self.num_files,
            "bytes": self.num_bytes,
            "bytes_by_dtype": dict(self.bytes_by_dtype),
            "optimizer_slots": list(self.optimizer_slots),
            "group_sizes": list(self.group_sizes),
            "aliases": dict(self.aliases),
            "extras": list(self.extras),
        }
        return {**found, "tensor_list": [tensor.to_json() for tensor in self.tensors]} if tensors else found


def summarize(manifest: Manifest, source: str) -> Summary:
    """The summary of ``manifest``, which was read from ``source``."""
    tensors = tuple(
        TensorSummary(
            key.fqn, key.slot, entry.kind.value, entry.shape, entry.dtype.value, entry.num_bytes, len(entry.shards)
        )
        for key, entry in manifest.tensors.items()
    )
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.num_bytes
    weights = [e for k, e in manifest.tensors.items() if k.slot == WEIGHT and e.kind is Kind.PARAMETER]
    return Summary(
        source=source,
        format=manifest.format,
        step=manifest.step,
        world_size=manifest.world_size,
        num_parameters=sum(entry.numel for entry in weights),
        num_tensors=len(tensors),
        num_shards=sum(tensor.num_shards for tensor in tensors),
        num_files=len(manifest.files),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        bytes_by_dtype=dict(by_dtype.most_common()),
        optimizer_slots=tuple(
            dict.fromkeys(key.slot for key, entry in manifest.tensors.items() if entry.kind is Kind.STATE)
        ),
        group_sizes=tuple(len(group.params) for group in manifest.groups),
        aliases=dict(manifest.aliases),
        extras=tuple(manifest.extra),
        tensors=tensors,
    )
