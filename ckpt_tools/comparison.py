"""Proof of equality: two manifests, streamed side by side, bit by bit; and one checkpoint against its own checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpt_tools.assemble import Assembler
from ckpt_tools.boxes import Box
from ckpt_tools.dtypes import DType
from ckpt_tools.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.runners.threads import ThreadRunner
from ckpt_tools.stores.base import Store

Progress = Callable[[int, int], None]
"""Hears of bytes done so far and in all."""

BLOCK_BYTES = 4 << 20
"""Read, compared and forgotten at a time, on either side."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not the same."""

    key: StateKey
    what: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.key.fqn, "slot": self.key.slot, "difference": self.what}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was compared. ``num_bytes`` are logical bytes of the tensors on one side."""

    num_tensors: int
    num_bytes: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def num_equal(self) -> int:
        return self.num_tensors - len({difference.key for difference in self.differences})

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "differences": [difference.to_json() for difference in self.differences],
        }


@dataclass(frozen=True, slots=True)
class Side:
    """One of two checkpoints."""

    store: Store
    manifest: Manifest

    def named(self) -> dict[StateKey, TensorEntry]:
        """Every tensor by every name it has. A tied weight has several; optimizer state has its owner's alone."""
        found = {_neutral(key): entry for key, entry in self.manifest.tensors.items()}
        for alias, owner in self.manifest.aliases.items():
            found[StateKey(alias)] = self.manifest.tensors[StateKey(owner)]
        return found


def _neutral(key: StateKey) -> StateKey:
    """User entries lie beside the model in one format and among DeepSpeed's client state in another."""
    return key._replace(fqn=key.fqn.removeprefix("client_state.")) if key.slot == "extra" else key


def _with_masters(ours: dict[StateKey, TensorEntry], theirs: Mapping[StateKey, TensorEntry]) -> None:
    """Where only the other side keeps fp32 masters, they are to be our weights, uncast."""
    for key in theirs:
        if key.slot == MASTER and key not in ours and (weight := ours.get(StateKey(key.fqn))) is not None:
            ours[key] = replace(weight, kind=Kind.STATE).cast(DType.FLOAT32)


@dataclass(frozen=True, slots=True)
class _Block:
    """Elements ``[start, stop)`` of one tensor."""

    key: StateKey
    start: int
    stop: int


def compare(expected: Side, found: Side, *, num_workers: int, on_bytes: Callable[[int], None]) -> VerifyReport:
    """Whether ``found`` holds the tensors of ``expected``, bit for bit, and no others.

    Raises:
        CkptError: one of them cannot be read.
    """
    ours, theirs = expected.named(), found.named()
    _with_masters(ours, theirs)
    differences = list(_by_header(ours, theirs))
    shared = [key for key in ours if key in theirs and not _header_difference(ours[key], theirs[key])]
    work = _Compare(ours, theirs, Assembler(expected.store, BLOCK_BYTES), Assembler(found.store, BLOCK_BYTES))
    blocks = (block for key in shared for block in _blocks(key, ours[key]))
    differing: dict[StateKey, int] = {}
    for block, count in ThreadRunner(num_workers).run(work, blocks):
        if count:
            differing[block.key] = differing.get(block.key, 0) + count
        on_bytes((block.stop - block.start) * ours[block.key].dtype.item_bytes)
    differences += [
        Difference(key, f"{differing[key]:,} of {ours[key].numel:,} elements differ")
        for key in shared
        if key in differing
    ]
    return VerifyReport(len(ours), sum(entry.num_bytes for entry in ours.values()), tuple(differences))


def _by_header(ours: Mapping[StateKey, TensorEntry], theirs: Mapping[StateKey, TensorEntry]) -> Iterator[Difference]:
    for key, entry in ours.items():
        if key not in theirs:
            yield Difference(key, "missing")
        elif what := _header_difference(entry, theirs[key]):
            yield Difference(key, what)
    for key in theirs:
        if key not in ours and not _is_state_of_nothing(key, theirs):
            yield Difference(key, "not in the source")


def _is_state_of_nothing(key: StateKey, tensors: Mapping[StateKey, TensorEntry]) -> bool:
    """Some frameworks keep optimizer state of parameters without elements, others none."""
    weight = tensors.get(StateKey(key.fqn))
    return key.slot != WEIGHT and weight is not None and weight.numel == 0


def _header_difference(ours: TensorEntry, theirs: TensorEntry) -> str | None:
    if ours.shape != theirs.shape:
        return f"shape {list(theirs.shape)} instead of {list(ours.shape)}"
    if ours.dtype is not theirs.dtype:
        return f"{theirs.dtype.value} instead of {ours.dtype.value}"
    return None


def _blocks(key: StateKey, entry: TensorEntry) -> Iterator[_Block]:
    step = BLOCK_BYTES // entry.dtype.item_bytes
    for start in range(0, entry.numel, step):
        yield _Block(key, start, min(start + step, entry.numel))


@dataclass(frozen=True, slots=True)
class _Compare:
    """Counts the elements of a block that differ in any bit."""

    ours: Mapping[StateKey, TensorEntry]
    theirs: Mapping[StateKey, TensorEntry]
    our_side: Assembler
    their_side: Assembler

    def __call__(self, block: _Block) -> tuple[_Block, int]:
        item = self.ours[block.key].dtype.item_bytes
        pair = np.empty((2, (block.stop - block.start) * item), np.uint8)
        for row, side, entry in ((0, self.our_side, self.ours), (1, self.their_side, self.theirs)):
            tensor = entry[block.key]
            side.read(tensor, Box.whole(tensor.shape), tensor.shape, block.start, block.stop, pair[row].data)
        if np.array_equal(pair[0], pair[1]):
            return block, 0
        return block, int((pair[0] != pair[1]).reshape(-1, item).any(axis=1).sum())
