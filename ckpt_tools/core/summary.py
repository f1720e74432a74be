"""What a checkpoint holds, from its headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from ckpt_tools.core.json_fields import Jsonable, json_of
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest
from ckpt_tools.core.notes import Note
from ckpt_tools.core.showing import Shown
from ckpt_tools.core.shown_values import ShownValues


@dataclass(frozen=True, slots=True)
class TensorSummary(Jsonable):
    """One logical tensor."""

    name: str
    slot: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class GroupSummary(Jsonable):
    """A parameter group of the optimizer: of how many parameters, and its hyperparameters by name."""

    num_tensors: int
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Shown):
    """A checkpoint in figures, and its values that are not tensors.

    ``num_parameters`` counts elements of parameters, each tie once. ``num_bytes`` is what the tensors take as they are
    read, each in its own dtype; ``file_bytes`` is the size of the ``num_files`` files that hold them. A file may hold
    a weight and its fp32 master once, so that ``num_bytes`` can be the larger.

    ``notes`` say what was read in a way that the files do not state, what lies beside the checkpoint and was not read,
    and what was not understood and is only carried along.

    The options of ``groups`` and the values of ``extras`` are bounded, as ``core.shown_values`` says.
    """

    SHOWN: ClassVar[tuple[str, ...]] = (
        "source",
        "format",
        "step",
        "world_size",
        "num_parameters",
        "num_tensors",
        "num_bytes",
        "notes",
    )

    source: str
    format: str
    step: int | None
    epoch: int | float | None
    world_size: int | None
    num_parameters: int
    num_tensors: int
    num_shards: int
    num_files: int
    num_bytes: int
    file_bytes: int
    bytes_by_dtype: Mapping[str, int]
    optimizer_slots: tuple[str, ...]
    groups: tuple[GroupSummary, ...]
    aliases: Mapping[str, str]
    extras: Mapping[str, Any]
    notes: tuple[Note, ...]
    tensors: tuple[TensorSummary, ...]

    def to_json(self, *, tensors: bool = True) -> dict[str, Any]:
        """The attributes by name; without ``tensors``, all but that list."""
        found = json_of(self)
        return found if tensors else {name: value for name, value in found.items() if name != "tensors"}


def summarize(manifest: Manifest, source: str, files: Mapping[str, int]) -> Summary:
    """The summary of ``manifest``, which was read from ``source``; ``files`` are the sizes of what lies there."""
    held = [files[name] for name in manifest.files if name in files]
    tensors = tuple(
        TensorSummary(
            key.fqn, key.slot, entry.kind.value, entry.shape, entry.dtype.value, entry.num_bytes, len(entry.shards)
        )
        for key, entry in manifest.tensors.items()
    )
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.num_bytes
    shown = ShownValues(manifest)
    weights = [e for k, e in manifest.tensors.items() if k.slot == WEIGHT and e.kind is Kind.PARAMETER]
    return Summary(
        source=source,
        format=manifest.format,
        step=manifest.step,
        epoch=_epoch(manifest.extra),
        world_size=manifest.world_size,
        num_parameters=sum(entry.numel for entry in weights),
        num_tensors=len(tensors),
        num_shards=sum(tensor.num_shards for tensor in tensors),
        num_files=len(held),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        file_bytes=sum(held),
        bytes_by_dtype=dict(by_dtype.most_common()),
        optimizer_slots=tuple(
            dict.fromkeys(key.slot for key, entry in manifest.tensors.items() if entry.kind is Kind.STATE)
        ),
        groups=tuple(GroupSummary(len(group.params), shown.of(group.options)) for group in manifest.groups),
        aliases=dict(manifest.aliases),
        extras={name: shown.of(value) for name, value in manifest.extra.items()},
        notes=manifest.notes,
        tensors=tensors,
    )


def _epoch(extra: Mapping[str, Any]) -> int | float | None:
    """The epoch that a trainer wrote down, at the top or among the client's state."""
    places = (extra, *(value for name, value in extra.items() if isinstance(value, Mapping) and "sched" not in name))
    found = (place.get(name) for place in places for name in ("epoch", "current_epoch"))
    return next((value for value in found if type(value) is int or (type(value) is float and isfinite(value))), None)
