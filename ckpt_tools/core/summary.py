"""Summary of a checkpoint, from its headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

from ckpt_tools.core.bounded_values import BoundedValues
from ckpt_tools.core.collapsing import TensorLine, TensorSummary, collapse_tensors
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, count_tensors_by_role
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.messages.showing import DisplayableResult, Jsonable, dataclass_to_json

if TYPE_CHECKING:
    from ckpt_tools.core.module_tree import ModuleSummary


@dataclass(frozen=True, slots=True)
class TensorStats(Jsonable):
    """Statistics of the ``num_read`` elements that were read of one tensor: all, or a sample.

    ``min``, ``max``, ``mean`` and ``norm`` (the square root of the sum of squares) are those of its finite elements;
    None if there are none. Complex numbers have no order and no mean here; packed ones (float4, float6) are not read.
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    num_read: int
    min: int | float | None = None
    max: int | float | None = None
    mean: float | None = None
    norm: float | None = None
    num_zeros: int | None = None
    num_nan: int | None = None
    num_inf: int | None = None


@dataclass(frozen=True, slots=True)
class GroupSummary(Jsonable):
    """A parameter group of the optimizer: of how many parameters, and its hyperparameters by name."""

    num_tensors: int
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, repr=False)
class Summary(DisplayableResult):
    """A checkpoint in figures, and its values that are not tensors.

    ``num_parameters`` counts elements of parameters, each tie once. ``tensors_by_role`` counts tensors by
    ``core.manifest.ROLES``. ``num_bytes`` is what the tensors take as they are read, each in its own dtype;
    ``file_bytes`` is the size of the ``num_files`` files that hold them. A file may hold a weight and its fp32 master
    once, so that ``num_bytes`` can be the larger.

    ``notes`` say what was inferred, which files beside the checkpoint were not read, and which entries were not
    understood and are copied as they are.

    ``naming`` tells whose names the tensors have, and which recipe gives those of the hub; None if no recipe tells it.
    ``wrapping`` are parts of names that wrappers put in. ``tensors`` are those that ``include`` and ``exclude`` choose,
    and ``stats`` their statistics if these are computed; the figures are of the whole checkpoint.

    ``values`` are the values in optimizer state, and of ``get_extra_state``, that are not tensors. The options of
    ``groups``, and ``values`` and ``extras``, are bounded by ``BoundedValues``.
    """

    SHOWN: ClassVar[tuple[str, ...]] = (
        *("source", "format", "step", "world_size", "num_parameters", "num_tensors", "num_bytes", "notes"),
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
    values: Mapping[str, Any]
    extras: Mapping[str, Any]
    notes: tuple[Note, ...]
    naming: str | None
    wrapping: tuple[str, ...]
    tensors_by_role: Mapping[str, int]
    tensors: tuple[TensorSummary, ...]
    stats: tuple[TensorStats, ...] | None = None

    def lines(self) -> list[TensorLine]:
        """``tensors`` as people read them: those that differ in the numbers in their names are one line."""
        return collapse_tensors(self.tensors)

    def modules(self, depth: int | None = None) -> tuple[ModuleSummary, ...]:
        """The modules above ``tensors`` with their sizes, down to ``depth`` levels (default: all), each before those in
        it. The first is the whole model."""
        from ckpt_tools.core.module_tree import summarize_modules

        return summarize_modules(self.tensors, depth)

    def to_json(self, *, tensors: bool = True) -> dict[str, Any]:
        """The attributes by name; without ``tensors``, all except that list."""
        found = dataclass_to_json(self)
        return found if tensors else {name: value for name, value in found.items() if name != "tensors"}


def summarize(
    manifest: Manifest,
    source: str,
    files: Mapping[str, int],
    *,
    naming: str | None = None,
    wrapping: tuple[str, ...] = (),
) -> Summary:
    """The summary of ``manifest``, which was read from ``source``; ``files`` are the sizes of all files there.
    ``naming`` and ``wrapping``: as in ``Summary``."""
    stored_file_sizes = [files[name] for name in manifest.files if name in files]
    tensors = tuple(
        TensorSummary(
            key.fqn, key.slot, entry.kind.value, entry.shape, entry.dtype.value, entry.num_bytes, len(entry.shards)
        )
        for key, entry in manifest.tensors.items()
    )
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.num_bytes
    bounded_values = BoundedValues(manifest)
    weights = [e for k, e in manifest.tensors.items() if k.slot == WEIGHT and e.kind is Kind.PARAMETER]
    return Summary(
        source=source,
        format=manifest.format,
        step=manifest.step,
        epoch=_find_epoch(manifest.extra),
        world_size=manifest.world_size,
        num_parameters=sum(entry.numel for entry in weights),
        num_tensors=len(tensors),
        num_shards=sum(tensor.num_shards for tensor in tensors),
        num_files=len(stored_file_sizes),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        file_bytes=sum(stored_file_sizes),
        bytes_by_dtype=dict(by_dtype.most_common()),
        optimizer_slots=tuple(dict.fromkeys(key.slot for key in manifest.select_kinds(Kind.STATE))),
        groups=tuple(
            GroupSummary(len(group.params), bounded_values.convert(group.options)) for group in manifest.groups
        ),
        aliases=dict(manifest.aliases),
        extras={name: bounded_values.convert(value) for name, value in manifest.extra.items()},
        # After extras, as values may be many, and all share one bound.
        values={str(key): bounded_values.convert(value) for key, value in manifest.values.items()},
        notes=(*manifest.notes, *_note_unjoined_state(manifest)),
        naming=naming,
        wrapping=wrapping,
        tensors_by_role=count_tensors_by_role(manifest.tensors),
        tensors=tensors,
    )


def _note_unjoined_state(manifest: Manifest) -> list[Note]:
    if not manifest.unjoined_state:
        return []
    from ckpt_tools.core.transforms import make_unjoined_state_error

    return [Note(Outcome.KEPT, "optimizer state", make_unjoined_state_error(manifest).message)]


def _find_epoch(extra: Mapping[str, Any]) -> int | float | None:
    """The epoch that a trainer wrote down, at the top or among the client's state."""
    mappings = (extra, *(value for name, value in extra.items() if isinstance(value, Mapping) and "sched" not in name))
    candidates = (place.get(name) for place in mappings for name in ("epoch", "current_epoch"))
    return next(
        (value for value in candidates if type(value) is int or (type(value) is float and isfinite(value))), None
    )
