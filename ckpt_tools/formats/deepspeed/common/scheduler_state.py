"""The state of the learning rate scheduler in a checkpoint that is written: which entry of the source it is, whether
DeepSpeed or torch can load it, and notes on that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.notes import ABSENT_REASON, Note, Outcome
from ckpt_tools.core.values import as_dict, describe_kind
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.state_tree.frozen_or_buffer import is_from_deepspeed

SCHEDULER_ENTRY = "lr_scheduler"

_SKIP_SCHEDULER_ADVICE = "load with load_lr_scheduler_states=False"
_SCHEDULER_RESTORED_TEXT = "load_checkpoint gives it to the run's scheduler"

_DEEPSPEED_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""Schedulers that DeepSpeed makes of its config, lr_schedules.py ``VALID_LR_SCHEDULES``."""


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """``state`` is written as ``lr_scheduler``; ``source_entry`` is the name in ``Manifest.extra`` that it had.

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
        entry = manifest.extra.get(SCHEDULER_ENTRY)
        if is_from_deepspeed(manifest):
            kind = as_dict(config.get("scheduler")).get("type")
            why = _explain_group_mismatch(manifest, entry)
            is_foreign = isinstance(entry, dict) and "last_batch_iteration" not in entry
            if is_foreign and kind in _DEEPSPEED_SCHEDULERS:
                why = f"the recorded config has DeepSpeed's {kind}, and this is the state of another scheduler"
            note = Note(Outcome.KEPT, SCHEDULER_ENTRY, f"{why}; {_SKIP_SCHEDULER_ADVICE}")
            return cls(entry, SCHEDULER_ENTRY, (note,) if why else ())
        return _search_other_entries(manifest) if entry is None else _use_standard_entry(manifest, entry)


def _use_standard_entry(manifest: Manifest, entry: Any) -> SchedulerState:
    """The state in the source's ``lr_scheduler``, which is written there even if no scheduler can load it: it would be
    lost otherwise."""
    state = _unwrap_single_item(entry)
    if problem := _explain_group_mismatch(manifest, state) or _explain_foreign_state(state):
        why = f"{problem}; {_SKIP_SCHEDULER_ADVICE}, which returns it in the client state"
        return SchedulerState(entry, SCHEDULER_ENTRY, (Note(Outcome.KEPT, SCHEDULER_ENTRY, why),))
    return SchedulerState(state, SCHEDULER_ENTRY, (_make_restored_note(SCHEDULER_ENTRY, state),))


def _search_other_entries(manifest: Manifest) -> SchedulerState:
    """The state in the only other entry called after a scheduler that torch or DeepSpeed can load; None if there is no
    such entry, or several."""
    names = [name for name in manifest.extra if "sched" in str(name).lower()]
    entries = {name: _unwrap_single_item(manifest.extra[name]) for name in names}
    problems = {
        name: _explain_foreign_state(value) or _explain_group_mismatch(manifest, value)
        for name, value in entries.items()
    }
    fitting_names = [name for name, problem in problems.items() if not problem]
    if len(fitting_names) == 1:
        (name,) = fitting_names
        return SchedulerState(entries[name], name, (_make_restored_note(name, entries[name]),))
    if fitting_names:
        why = f"the source has several ({join_names(fitting_names)}), which go into the client state"
    elif problems:
        name, problem = next(iter(problems.items()))
        why = f"the source's {name} goes into the client state: {problem}"
    elif "megatron" in manifest.extra:
        why = "the source has Megatron's only, which torch's schedulers do not load"
    else:
        why = ABSENT_REASON
    note = Note(Outcome.MISSING, SCHEDULER_ENTRY, f"{why}; if the run has a scheduler, {_SKIP_SCHEDULER_ADVICE}")
    return SchedulerState(None, SCHEDULER_ENTRY, (note,))


def _unwrap_single_item(value: Any) -> Any:
    """The only item of a list or dict, if it is the state of a scheduler; otherwise ``value`` itself."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return items[0] if len(items) == 1 and not _explain_foreign_state(items[0]) else value


def _explain_foreign_state(state: Any) -> str:
    """Why no scheduler of torch or DeepSpeed can load ``state``; empty if one can."""
    if isinstance(state, list):
        return f"it has {format_count(len(state), 'scheduler')}"
    if not isinstance(state, dict):
        return f"it is a {describe_kind(state)}"
    return "" if {"last_epoch", "last_batch_iteration"} & state.keys() else "it is not the state of one scheduler"


def _explain_group_mismatch(manifest: Manifest, state: Any) -> str:
    """Text on a state with learning rates for another number of groups than the run has; empty if the numbers agree.
    Groups without elements do not count, because DeepSpeed has none."""
    rates, tensors = as_dict(state).get("base_lrs"), manifest.tensors
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
