"""What is neither weight nor optimizer state: DeepSpeed's counters, the scheduler, the client state.

Everything of another framework's that has no place of its own becomes client state, which ``load_checkpoint`` hands
back to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import ABSENT, Note, Outcome
from ckpt_tools.formats.deepspeed.common.pickled_objects import DEFAULT_SCALER, is_scaling

_NEUTRAL = ("global_step", "loss_scaler", "deepspeed", "client_state", "megatron")
"""Entries that are no client's. Those of Megatron hold objects of its classes, which DeepSpeed's loader would import.
"""

_FROM_SOURCE = frozenset(
    {"data_sampler", "random_ltd", "skipped_steps", "global_samples", "num_experts", "universal_checkpoint_info"}
)
"""DeepSpeed's own entries of a model file that mean the same at any stage and world size."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Sorted entries of ``Manifest.extra``. ``counters`` are DeepSpeed's own of a model file, ``own`` all that the
    source's DeepSpeed had."""

    global_steps: int
    lr_scheduler: Any
    loss_scaler: Any
    counters: Mapping[str, Any]
    own: Mapping[str, Any]
    client_state: Mapping[str, Any]
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, manifest: Manifest, dtype: DType) -> Extras:
        # A list of the formats that can be written needs neither.
        from ckpt_tools.formats.deepspeed.common.saved_extras import RESERVED
        from ckpt_tools.formats.deepspeed.common.scheduler import Scheduler

        extra = manifest.extra
        own = _dict(extra.get("deepspeed"))
        steps = _steps(manifest)
        scheduler = Scheduler.of(manifest, _dict(own.get("ds_config")))
        others = {name: value for name, value in extra.items() if name not in (*_NEUTRAL, scheduler.source)}
        client = {**others, **_dict(extra.get("client_state"))}
        shadowing = [name for name in client if name in RESERVED]
        scaler = extra.get("loss_scaler")
        return cls(
            global_steps=steps or 0,
            lr_scheduler=scheduler.state,
            loss_scaler=scaler,
            counters={name: value for name, value in own.items() if name in _FROM_SOURCE and value is not None},
            own=own,
            client_state={name: value for name, value in client.items() if name not in shadowing},
            notes=(
                *_notes(manifest, steps),
                *scheduler.notes,
                *_scaler_notes(manifest, scaler, dtype),
                *(Note(Outcome.DROPPED, name, _why_not(manifest, name)) for name in shadowing),
            ),
        )

    @property
    def config(self) -> Mapping[str, Any]:
        """The source's DeepSpeed config; empty where it has none."""
        return _dict(self.own.get("ds_config"))

    @property
    def module(self) -> Mapping[str, Any]:
        """What modules of the model keep beside tensors (``_extra_state``), by name."""
        return _dict(self.own.get("module"))

    @property
    def tag(self) -> str:
        """The source's own tag; else as DeepSpeed names it."""
        found = self.own.get("tag")
        return found if isinstance(found, str) else f"global_step{self.global_steps}"


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _steps(manifest: Manifest) -> int | None:
    found = manifest.extra.get("global_step")
    return found if type(found) is int else manifest.step


def _notes(manifest: Manifest, steps: int | None) -> list[Note]:
    notes = []
    if steps is None:
        why = f"{ABSENT}; DeepSpeed starts counting at 0"
        notes.append(Note(Outcome.DEFAULTED, "global_step", why))
    if "megatron" in manifest.extra:
        what = "Megatron's common state (args, scheduler) and sharded objects"
        notes.append(Note(Outcome.DROPPED, what, "only Megatron uses them; dcp and megatron keep them"))
    partitions = _dict(_dict(manifest.extra.get("deepspeed")).get("partition_state"))
    if partitions:
        why = "it belongs to the partitions of each rank and cannot be partitioned again"
        notes.append(Note(Outcome.DROPPED, "optimizer state of each rank's own kind", why, len(partitions)))
    return notes


def _why_not(manifest: Manifest, name: str) -> str:
    """Why an entry has no place: what is not understood says it better than its name."""
    known = {note.what: note.why for note in manifest.notes if note.outcome is Outcome.KEPT}
    return known.get(name, "DeepSpeed uses this name for something else")


def _scaler_notes(manifest: Manifest, found: Any, dtype: DType) -> list[Note]:
    if dtype is DType.FLOAT16 and not is_scaling(found):
        absent = ABSENT if found is None else "the source's does not scale"
        return [Note(Outcome.DEFAULTED, "loss_scaler", f"{absent}; {DEFAULT_SCALER}")]
    if dtype is not DType.FLOAT16 and is_scaling(found):
        return [Note(Outcome.DROPPED, "loss_scaler", f"training in {dtype.value} does not use loss scaling")]
    if found is not None and not isinstance(found, dict):
        return [Note(Outcome.DROPPED, "loss_scaler", "it is not an entry that DeepSpeed uses")]
    return []
