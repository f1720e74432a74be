"""DeepSpeed's counters, config and scheduler, and the client state of a checkpoint that is written.

Entries of other frameworks become client state, which ``load_checkpoint`` returns to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.notes import ABSENT_REASON, Note, Outcome
from ckpt_tools.core.values import describe_kind
from ckpt_tools.core.wording import format_count, join_names
from ckpt_tools.formats.deepspeed.common.pickled_objects import DEFAULT_SCALER, is_scaling
from ckpt_tools.formats.deepspeed.common.saved_extras import RESERVED
from ckpt_tools.formats.state_dict.frozen_or_buffer import is_from_deepspeed

DEFAULT_SUB_GROUP_SIZE = 10**9
"""zero/config.py ``sub_group_size``, in elements of one rank."""

_FLAVOUR_SECTIONS = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16, "bfloat16": DType.BFLOAT16}
_OLD_NAMES = ("bfloat16",)
_FP32_NAMES = ("fp32", "float", "float32", "torch.float32")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the source's DeepSpeed config that decide where elements are: a run resumes with the same config.

    ``sub_group_size`` counts elements of a rank (stage 3); ``is_round_robin`` says that groups are flattened in the
    order of ``round_robin_gradients``, ``has_whole_momentum`` that Muon keeps whole parameters (stages 1 and 2).
    """

    sub_group_size: int
    is_round_robin: bool
    has_whole_momentum: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], stage: int, dtype: DType) -> Settings:
        zero = _dict(config.get("zero_optimization"))
        # engine.py _do_optimizer_sanity_check: bf16 in stage 1 with fp32 accumulation is BF16_Optimizer's, which loads
        # the files of stage_1_and_2.py but has no round-robin order.
        accumulate = _dict(config.get("data_types")).get("grad_accum_dtype")
        is_bf16_optimizer = stage == 1 and dtype is DType.BFLOAT16 and accumulate in _FP32_NAMES
        of_stage_1_and_2 = stage < 3 and not is_bf16_optimizer
        is_round_robin = of_stage_1_and_2 and zero.get("round_robin_gradients") is True
        is_offloaded = _dict(zero.get("offload_optimizer")).get("device", "none") != "none"
        # JSON writes 1e9 as a float, and Hugging Face's configs may have ``auto``.
        size: Any = zero.get("sub_group_size")
        is_number = isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < 1 << 62
        sub_group_size = int(size) if is_number else DEFAULT_SUB_GROUP_SIZE
        return cls(sub_group_size, is_round_robin, of_stage_1_and_2 and not is_offloaded)


def adapted(config: Mapping[str, Any], stage: int, dtype: DType) -> dict[str, Any]:
    """``config`` for another stage and type; an empty one gets only these. ``load_checkpoint`` does not read it."""
    found = {**config, "zero_optimization": {**_dict(config.get("zero_optimization")), "stage": stage}}
    for name, flavour in _FLAVOUR_SECTIONS.items():
        if name in config or (flavour is dtype and name not in _OLD_NAMES):
            found[name] = {**_dict(config.get(name)), "enabled": flavour is dtype}
    return found


NAME = "lr_scheduler"

_WITHOUT = "load with load_lr_scheduler_states=False"
_TAKEN = "load_checkpoint gives it to the run's scheduler"

_OWN = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""Schedulers that DeepSpeed makes of its config, lr_schedules.py ``VALID_LR_SCHEDULES``."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """``state`` is written as ``lr_scheduler``; ``source`` is the entry of ``Manifest.extra`` that it was.

    engine.py ``_load_checkpoint`` passes it unchanged to the run's scheduler. Those of torch set its items as their
    attributes (torch 2.15.0, optim/lr_scheduler.py ``load_state_dict``), those of DeepSpeed need
    ``last_batch_iteration`` (lr_schedules.py). With ``load_lr_scheduler_states=False`` it is ignored.
    """

    state: Any
    source: str
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, manifest: Manifest, config: Mapping[str, Any]) -> Scheduler:
        """``config`` is DeepSpeed's of the source, empty where it has none."""
        found = manifest.extra.get(NAME)
        if is_from_deepspeed(manifest):
            kind = _dict(config.get("scheduler")).get("type")
            why = _miscounted(manifest, found)
            if isinstance(found, dict) and kind in _OWN and "last_batch_iteration" not in found:
                why = f"the recorded config has DeepSpeed's {kind}, and this is the state of another scheduler"
            return cls(found, NAME, (Note(Outcome.KEPT, NAME, f"{why}; {_WITHOUT}"),) if why else ())
        return _named(manifest, found) if found is not None else _called_otherwise(manifest)


def _named(manifest: Manifest, found: Any) -> Scheduler:
    """The entry ``lr_scheduler``, which keeps its place whatever its form: it would be lost otherwise."""
    state = _one(found)
    why = _miscounted(manifest, state) or _foreign(state)
    if why:
        note = Note(Outcome.KEPT, NAME, f"{why}; {_WITHOUT}, which returns it in the client state")
        return Scheduler(found, NAME, (note,))
    return Scheduler(state, NAME, (_taken(NAME, state),))


def _called_otherwise(manifest: Manifest) -> Scheduler:
    entries = {name: _one(value) for name, value in manifest.extra.items() if "sched" in str(name).lower()}
    fitting = [name for name, value in entries.items() if not (_foreign(value) or _miscounted(manifest, value))]
    if len(fitting) == 1:
        (name,) = fitting
        return Scheduler(entries[name], name, (_taken(name, entries[name]),))
    if fitting:
        why = f"the source has several ({join_names(fitting)}), which go into the client state"
    elif entries:
        name, value = next(iter(entries.items()))
        why = f"the source's {name} goes into the client state: {_foreign(value) or _miscounted(manifest, value)}"
    elif "megatron" in manifest.extra:
        why = "the source has Megatron's only, which torch's schedulers do not load"
    else:
        why = ABSENT_REASON
    return Scheduler(None, NAME, (Note(Outcome.MISSING, NAME, f"{why}; if the run has a scheduler, {_WITHOUT}"),))


def _one(value: Any) -> Any:
    """The only item of a list, or of a dict by the names of classes; of anything else, itself."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return items[0] if len(items) == 1 and not _foreign(items[0]) else value


def _foreign(state: Any) -> str:
    """Why a scheduler of torch or DeepSpeed does not take ``state``; empty if it does."""
    if isinstance(state, list):
        return f"it has {format_count(len(state), 'scheduler')}"
    if not isinstance(state, dict):
        return f"it is a {describe_kind(state)}"
    return "" if {"last_epoch", "last_batch_iteration"} & state.keys() else "it is not the state of one scheduler"


def _miscounted(manifest: Manifest, state: Any) -> str:
    """Whether it has learning rates for another number of groups: DeepSpeed has no group without elements."""
    rates, tensors = _dict(state).get("base_lrs"), manifest.tensors
    names = [[manifest.aliases.get(name, name) for name in group.params] for group in manifest.groups]
    kept = [group for group in names if any(tensors[StateKey(name)].numel for name in group)]
    if not kept or not isinstance(rates, list) or len(rates) == len(kept):
        return ""
    return f"it has {format_count(len(rates), 'learning rate')} for {format_count(len(kept), 'parameter group')}"


def _taken(name: str, state: Mapping[str, Any]) -> Note:
    called = "" if name == NAME else f"it is called {NAME} now; "
    kinds = ("torch's", "one that DeepSpeed makes of its config, such as WarmupLR")
    kind, other = kinds if "last_epoch" in state else reversed(kinds)
    why = f"{called}{_TAKEN}; if that is not {kind} but {other}, {_WITHOUT}"
    return Note(Outcome.KEPT, name, why)


def skips_scheduler(notes: Iterable[Note]) -> bool:
    """Whether ``notes`` say that no scheduler of the run can load what was written, whatever its kind."""
    return any(_WITHOUT in note.why and _TAKEN not in note.why for note in notes)


_NEUTRAL = ("global_step", "loss_scaler", "deepspeed", "client_state", "megatron")
"""Entries that are not client state. Megatron's hold objects of its classes, which DeepSpeed's loader would import."""

_FROM_SOURCE = frozenset(
    {"data_sampler", "random_ltd", "skipped_steps", "global_samples", "num_experts", "universal_checkpoint_info"}
)
"""DeepSpeed's own entries of a model file that mean the same at any stage and world size."""


@dataclass(frozen=True, slots=True)
class Extras:
    """The entries of ``Manifest.extra`` by what they are. ``counters`` are DeepSpeed's own of a model file, ``own`` all
    that the source's DeepSpeed had."""

    global_steps: int
    lr_scheduler: Any
    loss_scaler: Any
    counters: Mapping[str, Any]
    own: Mapping[str, Any]
    client_state: Mapping[str, Any]
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, manifest: Manifest, dtype: DType) -> Extras:
        extra = manifest.extra
        own = _dict(extra.get("deepspeed"))
        found = extra.get("global_step")
        steps = found if type(found) is int else manifest.step
        scheduler = Scheduler.of(manifest, _dict(own.get("ds_config")))
        others = {name: value for name, value in extra.items() if name not in (*_NEUTRAL, scheduler.source)}
        client = {**others, **_dict(extra.get("client_state"))}
        shadowing = [name for name in client if name in RESERVED]
        # The reason why an entry has no place is a note of the reader, if there is one.
        why_not = {note.what: note.why for note in manifest.notes if note.outcome is Outcome.KEPT}
        reserved = "DeepSpeed uses this name for something else"
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
                *_scaler_notes(scaler, dtype),
                *(Note(Outcome.DROPPED, name, why_not.get(name, reserved)) for name in shadowing),
            ),
        )

    @property
    def config(self) -> Mapping[str, Any]:
        return _dict(self.own.get("ds_config"))

    @property
    def module(self) -> Mapping[str, Any]:
        """Values of the model's modules that are not tensors (``_extra_state``), by name."""
        return _dict(self.own.get("module"))

    @property
    def tag(self) -> str:
        """The source's own tag; else as DeepSpeed names it."""
        found = self.own.get("tag")
        return found if isinstance(found, str) else f"global_step{self.global_steps}"


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _notes(manifest: Manifest, steps: int | None) -> list[Note]:
    notes = []
    if steps is None:
        why = f"{ABSENT_REASON}; DeepSpeed starts counting at 0"
        notes.append(Note(Outcome.DEFAULTED, "global_step", why))
    if "megatron" in manifest.extra:
        what = "Megatron's common state (args, scheduler) and sharded objects"
        notes.append(Note(Outcome.DROPPED, what, "only Megatron uses them; dcp and megatron keep them"))
    partitions = _dict(_dict(manifest.extra.get("deepspeed")).get("partition_state"))
    if partitions:
        why = "it belongs to the partitions of each rank and cannot be partitioned again"
        notes.append(Note(Outcome.DROPPED, "optimizer state of each rank's own kind", why, len(partitions)))
    return notes


def _scaler_notes(found: Any, dtype: DType) -> list[Note]:
    if dtype is DType.FLOAT16 and not is_scaling(found):
        absent = ABSENT_REASON if found is None else "the source's does not scale"
        return [Note(Outcome.DEFAULTED, "loss_scaler", f"{absent}; {DEFAULT_SCALER}")]
    if dtype is not DType.FLOAT16 and is_scaling(found):
        return [Note(Outcome.DROPPED, "loss_scaler", f"training in {dtype.value} does not use loss scaling")]
    if found is not None and not isinstance(found, dict):
        return [Note(Outcome.DROPPED, "loss_scaler", "it is not an entry that DeepSpeed uses")]
    return []
