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
from ckpt_tools.formats.deepspeed.common.pickled_objects import DEFAULT_SCALER_TEXT, is_active_scaler
from ckpt_tools.formats.deepspeed.common.saved_extras import RESERVED_ENTRIES
from ckpt_tools.formats.state_dict.frozen_or_buffer import is_from_deepspeed

DEFAULT_SUB_GROUP_SIZE = 10**9
"""zero/config.py ``sub_group_size``, in elements of one rank."""

_DTYPE_SECTIONS = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16, "bfloat16": DType.BFLOAT16}
_OLD_SECTIONS = ("bfloat16",)
_FP32_NAMES = ("fp32", "float", "float32", "torch.float32")


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """The settings of the source's DeepSpeed config that decide where elements are: a run resumes with the same config.

    ``sub_group_size`` counts elements of a rank (stage 3); ``is_round_robin`` says that groups are flattened in the
    order of ``round_robin_gradients``, ``has_whole_momentum`` that Muon keeps whole parameters (stages 1 and 2).
    """

    sub_group_size: int
    is_round_robin: bool
    has_whole_momentum: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], stage: int, dtype: DType) -> PartitionSettings:
        zero_config = _as_dict(config.get("zero_optimization"))
        # engine.py _do_optimizer_sanity_check: bf16 in stage 1 with fp32 accumulation is BF16_Optimizer's, which loads
        # the files of stage_1_and_2.py but has no round-robin order.
        grad_accum_dtype = _as_dict(config.get("data_types")).get("grad_accum_dtype")
        is_bf16_optimizer = stage == 1 and dtype is DType.BFLOAT16 and grad_accum_dtype in _FP32_NAMES
        is_stage_1_and_2_optimizer = stage < 3 and not is_bf16_optimizer
        is_round_robin = is_stage_1_and_2_optimizer and zero_config.get("round_robin_gradients") is True
        is_offloaded = _as_dict(zero_config.get("offload_optimizer")).get("device", "none") != "none"
        # JSON writes 1e9 as a float, and Hugging Face's configs may have ``auto``.
        size: Any = zero_config.get("sub_group_size")
        is_number = isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < 1 << 62
        sub_group_size = int(size) if is_number else DEFAULT_SUB_GROUP_SIZE
        return cls(sub_group_size, is_round_robin, is_stage_1_and_2_optimizer and not is_offloaded)


def adapt_config(config: Mapping[str, Any], stage: int, dtype: DType) -> dict[str, Any]:
    """``config`` for another stage and type; an empty one gets only these. ``load_checkpoint`` does not read it."""
    adapted_config = {**config, "zero_optimization": {**_as_dict(config.get("zero_optimization")), "stage": stage}}
    for name, section_dtype in _DTYPE_SECTIONS.items():
        if name in config or (section_dtype is dtype and name not in _OLD_SECTIONS):
            adapted_config[name] = {**_as_dict(config.get(name)), "enabled": section_dtype is dtype}
    return adapted_config


SCHEDULER_ENTRY = "lr_scheduler"

_SKIP_SCHEDULER_ADVICE = "load with load_lr_scheduler_states=False"
_SCHEDULER_RESTORED_TEXT = "load_checkpoint gives it to the run's scheduler"

_DEEPSPEED_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""Schedulers that DeepSpeed makes of its config, lr_schedules.py ``VALID_LR_SCHEDULES``."""


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """``state`` is written as ``lr_scheduler``; ``source_entry`` is the entry of ``Manifest.extra`` that it was.

    engine.py ``_load_checkpoint`` passes it unchanged to the run's scheduler. Those of torch set its items as their
    attributes (torch 2.15.0, optim/lr_scheduler.py ``load_state_dict``), those of DeepSpeed need
    ``last_batch_iteration`` (lr_schedules.py). With ``load_lr_scheduler_states=False`` it is ignored.
    """

    state: Any
    source_entry: str
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, manifest: Manifest, config: Mapping[str, Any]) -> SchedulerState:
        """``config`` is DeepSpeed's of the source, empty where it has none."""
        scheduler_entry = manifest.extra.get(SCHEDULER_ENTRY)
        if is_from_deepspeed(manifest):
            scheduler_type = _as_dict(config.get("scheduler")).get("type")
            why = _explain_group_mismatch(manifest, scheduler_entry)
            if (
                isinstance(scheduler_entry, dict)
                and scheduler_type in _DEEPSPEED_SCHEDULERS
                and "last_batch_iteration" not in scheduler_entry
            ):
                why = (
                    f"the recorded config has DeepSpeed's {scheduler_type}, and this is the state of another scheduler"
                )
            return cls(
                scheduler_entry,
                SCHEDULER_ENTRY,
                (Note(Outcome.KEPT, SCHEDULER_ENTRY, f"{why}; {_SKIP_SCHEDULER_ADVICE}"),) if why else (),
            )
        return (
            _use_standard_entry(manifest, scheduler_entry)
            if scheduler_entry is not None
            else _search_other_entries(manifest)
        )


def _use_standard_entry(manifest: Manifest, scheduler_entry: Any) -> SchedulerState:
    """The entry ``lr_scheduler``, which keeps its place whatever its form: it would be lost otherwise."""
    state = _unwrap_single_item(scheduler_entry)
    why = _explain_group_mismatch(manifest, state) or _explain_foreign_state(state)
    if why:
        note = Note(
            Outcome.KEPT, SCHEDULER_ENTRY, f"{why}; {_SKIP_SCHEDULER_ADVICE}, which returns it in the client state"
        )
        return SchedulerState(scheduler_entry, SCHEDULER_ENTRY, (note,))
    return SchedulerState(state, SCHEDULER_ENTRY, (_make_restored_note(SCHEDULER_ENTRY, state),))


def _search_other_entries(manifest: Manifest) -> SchedulerState:
    entries = {
        name: _unwrap_single_item(value) for name, value in manifest.extra.items() if "sched" in str(name).lower()
    }
    fitting_names = [
        name
        for name, value in entries.items()
        if not (_explain_foreign_state(value) or _explain_group_mismatch(manifest, value))
    ]
    if len(fitting_names) == 1:
        (name,) = fitting_names
        return SchedulerState(entries[name], name, (_make_restored_note(name, entries[name]),))
    if fitting_names:
        why = f"the source has several ({join_names(fitting_names)}), which go into the client state"
    elif entries:
        name, value = next(iter(entries.items()))
        why = (
            f"the source's {name} goes into the client state: "
            f"{_explain_foreign_state(value) or _explain_group_mismatch(manifest, value)}"
        )
    elif "megatron" in manifest.extra:
        why = "the source has Megatron's only, which torch's schedulers do not load"
    else:
        why = ABSENT_REASON
    return SchedulerState(
        None,
        SCHEDULER_ENTRY,
        (Note(Outcome.MISSING, SCHEDULER_ENTRY, f"{why}; if the run has a scheduler, {_SKIP_SCHEDULER_ADVICE}"),),
    )


def _unwrap_single_item(value: Any) -> Any:
    """The only item of a list, or of a dict by the names of classes; of anything else, itself."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return items[0] if len(items) == 1 and not _explain_foreign_state(items[0]) else value


def _explain_foreign_state(state: Any) -> str:
    """Why a scheduler of torch or DeepSpeed does not take ``state``; empty if it does."""
    if isinstance(state, list):
        return f"it has {format_count(len(state), 'scheduler')}"
    if not isinstance(state, dict):
        return f"it is a {describe_kind(state)}"
    return "" if {"last_epoch", "last_batch_iteration"} & state.keys() else "it is not the state of one scheduler"


def _explain_group_mismatch(manifest: Manifest, state: Any) -> str:
    """Whether it has learning rates for another number of groups: DeepSpeed has no group without elements."""
    rates, tensors = _as_dict(state).get("base_lrs"), manifest.tensors
    names = [[manifest.aliases.get(name, name) for name in group.params] for group in manifest.groups]
    kept_groups = [group for group in names if any(tensors[StateKey(name)].numel for name in group)]
    if not kept_groups or not isinstance(rates, list) or len(rates) == len(kept_groups):
        return ""
    return f"it has {format_count(len(rates), 'learning rate')} for {format_count(len(kept_groups), 'parameter group')}"


def _make_restored_note(name: str, state: Mapping[str, Any]) -> Note:
    rename_text = "" if name == SCHEDULER_ENTRY else f"it is called {SCHEDULER_ENTRY} now; "
    kinds = ("torch's", "one that DeepSpeed makes of its config, such as WarmupLR")
    kind, other = kinds if "last_epoch" in state else reversed(kinds)
    why = f"{rename_text}{_SCHEDULER_RESTORED_TEXT}; if that is not {kind} but {other}, {_SKIP_SCHEDULER_ADVICE}"
    return Note(Outcome.KEPT, name, why)


def must_skip_scheduler(notes: Iterable[Note]) -> bool:
    """Whether ``notes`` say that no scheduler of the run can load what was written, whatever its kind."""
    return any(_SKIP_SCHEDULER_ADVICE in note.why and _SCHEDULER_RESTORED_TEXT not in note.why for note in notes)


_NON_CLIENT_ENTRIES = ("global_step", "loss_scaler", "deepspeed", "client_state", "megatron")
"""Entries that are not client state. Megatron's hold objects of its classes, which DeepSpeed's loader would import."""

_PORTABLE_ENTRIES = frozenset(
    {"data_sampler", "random_ltd", "skipped_steps", "global_samples", "num_experts", "universal_checkpoint_info"}
)
"""DeepSpeed's own entries of a model file that mean the same at any stage and world size."""


@dataclass(frozen=True, slots=True)
class DeepSpeedExtras:
    """The entries of ``Manifest.extra`` by what they are. ``counters`` are DeepSpeed's own of a model file,
    ``deepspeed_entries`` all that the source's DeepSpeed had."""

    global_steps: int
    lr_scheduler: Any
    loss_scaler: Any
    counters: Mapping[str, Any]
    deepspeed_entries: Mapping[str, Any]
    client_state: Mapping[str, Any]
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, manifest: Manifest, dtype: DType) -> DeepSpeedExtras:
        extra = manifest.extra
        deepspeed_entries = _as_dict(extra.get("deepspeed"))
        global_step = extra.get("global_step")
        steps = global_step if type(global_step) is int else manifest.step
        scheduler = SchedulerState.of(manifest, _as_dict(deepspeed_entries.get("ds_config")))
        other_entries = {
            name: value for name, value in extra.items() if name not in (*_NON_CLIENT_ENTRIES, scheduler.source_entry)
        }
        client_entries = {**other_entries, **_as_dict(extra.get("client_state"))}
        reserved_names = [name for name in client_entries if name in RESERVED_ENTRIES]
        # The reason why an entry has no place is a note of the reader, if there is one.
        reason_by_entry = {note.what: note.why for note in manifest.notes if note.outcome is Outcome.KEPT}
        reserved_reason = "DeepSpeed uses this name for something else"
        scaler = extra.get("loss_scaler")
        return cls(
            global_steps=steps or 0,
            lr_scheduler=scheduler.state,
            loss_scaler=scaler,
            counters={
                name: value
                for name, value in deepspeed_entries.items()
                if name in _PORTABLE_ENTRIES and value is not None
            },
            deepspeed_entries=deepspeed_entries,
            client_state={name: value for name, value in client_entries.items() if name not in reserved_names},
            notes=(
                *_make_notes(manifest, steps),
                *scheduler.notes,
                *_make_scaler_notes(scaler, dtype),
                *(Note(Outcome.DROPPED, name, reason_by_entry.get(name, reserved_reason)) for name in reserved_names),
            ),
        )

    @property
    def config(self) -> Mapping[str, Any]:
        return _as_dict(self.deepspeed_entries.get("ds_config"))

    @property
    def module(self) -> Mapping[str, Any]:
        """Values of the model's modules that are not tensors (``_extra_state``), by name."""
        return _as_dict(self.deepspeed_entries.get("module"))

    @property
    def tag(self) -> str:
        """The source's own tag; else as DeepSpeed names it."""
        source_tag = self.deepspeed_entries.get("tag")
        return source_tag if isinstance(source_tag, str) else f"global_step{self.global_steps}"


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _make_notes(manifest: Manifest, steps: int | None) -> list[Note]:
    notes = []
    if steps is None:
        why = f"{ABSENT_REASON}; DeepSpeed starts counting at 0"
        notes.append(Note(Outcome.DEFAULTED, "global_step", why))
    if "megatron" in manifest.extra:
        what = "Megatron's common state (args, scheduler) and sharded objects"
        notes.append(Note(Outcome.DROPPED, what, "only Megatron uses them; dcp and megatron keep them"))
    partitions = _as_dict(_as_dict(manifest.extra.get("deepspeed")).get("partition_state"))
    if partitions:
        why = "it belongs to the partitions of each rank and cannot be partitioned again"
        notes.append(Note(Outcome.DROPPED, "optimizer state of each rank's own kind", why, len(partitions)))
    return notes


def _make_scaler_notes(loss_scaler: Any, dtype: DType) -> list[Note]:
    if dtype is DType.FLOAT16 and not is_active_scaler(loss_scaler):
        reason = ABSENT_REASON if loss_scaler is None else "the source's does not scale"
        return [Note(Outcome.DEFAULTED, "loss_scaler", f"{reason}; {DEFAULT_SCALER_TEXT}")]
    if dtype is not DType.FLOAT16 and is_active_scaler(loss_scaler):
        return [Note(Outcome.DROPPED, "loss_scaler", f"training in {dtype.value} does not use loss scaling")]
    if loss_scaler is not None and not isinstance(loss_scaler, dict):
        return [Note(Outcome.DROPPED, "loss_scaler", "it is not an entry that DeepSpeed uses")]
    return []
