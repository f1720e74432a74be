"""DeepSpeed's counters and config, and the client state of a checkpoint that is written.

Entries of other frameworks become client state, which ``load_checkpoint`` returns to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import ABSENT_REASON, Note, Outcome
from ckpt_tools.core.values import as_dict
from ckpt_tools.formats.deepspeed.common.pickled_objects import DEFAULT_SCALER_TEXT, is_active_scaler
from ckpt_tools.formats.deepspeed.common.saved_extras import RESERVED_ENTRIES
from ckpt_tools.formats.deepspeed.common.scheduler_state import SchedulerState

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
        zero_config = as_dict(config.get("zero_optimization"))
        # engine.py _do_optimizer_sanity_check: bf16 in stage 1 with fp32 accumulation is BF16_Optimizer's, which loads
        # the files of stage_1_and_2.py but has no round-robin order.
        grad_accum_dtype = as_dict(config.get("data_types")).get("grad_accum_dtype")
        is_bf16_optimizer = stage == 1 and dtype is DType.BFLOAT16 and grad_accum_dtype in _FP32_NAMES
        is_stage_1_and_2_optimizer = stage < 3 and not is_bf16_optimizer
        is_round_robin = is_stage_1_and_2_optimizer and zero_config.get("round_robin_gradients") is True
        is_offloaded = as_dict(zero_config.get("offload_optimizer")).get("device", "none") != "none"
        # JSON writes 1e9 as a float, and Hugging Face's configs may have ``auto``.
        size: Any = zero_config.get("sub_group_size")
        is_number = isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < 1 << 62
        sub_group_size = int(size) if is_number else DEFAULT_SUB_GROUP_SIZE
        return cls(sub_group_size, is_round_robin, is_stage_1_and_2_optimizer and not is_offloaded)


def adapt_config(config: Mapping[str, Any], stage: int, dtype: DType) -> dict[str, Any]:
    """``config`` with this stage and dtype, also if it was empty. ``load_checkpoint`` does not read it."""
    adapted_config = {**config, "zero_optimization": {**as_dict(config.get("zero_optimization")), "stage": stage}}
    for name, section_dtype in _DTYPE_SECTIONS.items():
        if name in config or (section_dtype is dtype and name not in _OLD_SECTIONS):
            adapted_config[name] = {**as_dict(config.get(name)), "enabled": section_dtype is dtype}
    return adapted_config


_NON_CLIENT_ENTRIES = ("global_step", "loss_scaler", "deepspeed", "client_state", "megatron")
"""Entries that are not client state. Megatron's hold objects of its classes, which DeepSpeed's loader would import."""

_PORTABLE_ENTRIES = frozenset(
    {"data_sampler", "random_ltd", "skipped_steps", "global_samples", "num_experts", "universal_checkpoint_info"}
)
"""DeepSpeed's own entries of a model file that mean the same at any stage and world size."""


@dataclass(frozen=True, slots=True)
class DeepSpeedExtras:
    """The entries of ``Manifest.extra``, sorted by where DeepSpeed has them. Of a source that is DeepSpeed's,
    ``counters`` are the entries that mean the same at any stage and world size, ``deepspeed_entries`` all entries."""

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
        deepspeed_entries = as_dict(extra.get("deepspeed"))
        global_step = extra.get("global_step")
        steps = global_step if type(global_step) is int else manifest.step
        scheduler = SchedulerState.of(manifest, as_dict(deepspeed_entries.get("ds_config")))
        known_entries = (*_NON_CLIENT_ENTRIES, scheduler.source_entry)
        other_entries = {name: value for name, value in extra.items() if name not in known_entries}
        client_entries = {**other_entries, **as_dict(extra.get("client_state"))}
        reserved_names = [name for name in client_entries if name in RESERVED_ENTRIES]
        # The reason why an entry has no place is a note of the reader, if there is one.
        reason_by_entry = {note.what: note.why for note in manifest.notes if note.outcome is Outcome.KEPT}
        reserved_reason = "DeepSpeed uses this name for something else"
        scaler = extra.get("loss_scaler")
        present_entries = {name: value for name, value in deepspeed_entries.items() if value is not None}
        counters = {name: value for name, value in present_entries.items() if name in _PORTABLE_ENTRIES}
        return cls(
            global_steps=steps or 0,
            lr_scheduler=scheduler.state,
            loss_scaler=scaler,
            counters=counters,
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
        return as_dict(self.deepspeed_entries.get("ds_config"))

    @property
    def module(self) -> Mapping[str, Any]:
        """Values of the model's modules that are not tensors (``_extra_state``), by name."""
        return as_dict(self.deepspeed_entries.get("module"))

    @property
    def tag(self) -> str:
        """The tag of the source; without one, the tag that DeepSpeed makes of the number of steps."""
        source_tag = self.deepspeed_entries.get("tag")
        return source_tag if isinstance(source_tag, str) else f"global_step{self.global_steps}"


def _make_notes(manifest: Manifest, steps: int | None) -> list[Note]:
    notes = []
    if steps is None:
        why = f"{ABSENT_REASON}; DeepSpeed starts counting at 0"
        notes.append(Note(Outcome.DEFAULTED, "global_step", why))
    if "megatron" in manifest.extra:
        what = "Megatron's common state (args, scheduler) and sharded objects"
        notes.append(Note(Outcome.DROPPED, what, "only Megatron uses them; dcp and megatron keep them"))
    partitions = as_dict(as_dict(manifest.extra.get("deepspeed")).get("partition_state"))
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
