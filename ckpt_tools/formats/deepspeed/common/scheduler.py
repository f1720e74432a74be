"""The state of the learning rate scheduler, where ``load_checkpoint`` looks for it.

engine.py ``_load_checkpoint`` hands ``lr_scheduler`` to the run's scheduler as it is. A scheduler of torch makes its
items attributes of its own (torch 2.15.0, optim/lr_scheduler.py ``load_state_dict``), one of DeepSpeed's asks for
``last_batch_iteration`` (lr_schedules.py). With ``load_lr_scheduler_states=False`` it is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.notes import ABSENT, Note, Outcome
from ckpt_tools.core.values import kind_of
from ckpt_tools.core.wording import count, listed
from ckpt_tools.formats.state_dict.frozen_or_buffer import is_deepspeed

NAME = "lr_scheduler"

_WITHOUT = "load with load_lr_scheduler_states=False"

_IF_ANY = f"if the run has a scheduler, {_WITHOUT}"

_OWN = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""Schedulers that DeepSpeed makes of its config, lr_schedules.py ``VALID_LR_SCHEDULES``."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """``state`` is what is written as ``lr_scheduler``, ``source`` the entry of ``Manifest.extra`` that it was."""

    state: Any
    source: str
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, manifest: Manifest, config: Mapping[str, Any]) -> Scheduler:
        """``config`` is DeepSpeed's of the source, empty where it has none."""
        found = manifest.extra.get(NAME)
        if is_deepspeed(manifest):
            return cls(found, NAME, _notes_of_own(manifest, found, config))
        return _named(manifest, found) if found is not None else _called_otherwise(manifest)


def _notes_of_own(manifest: Manifest, found: Any, config: Mapping[str, Any]) -> tuple[Note, ...]:
    """Notes on a state that DeepSpeed or a trainer on top of it saved."""
    section = config.get("scheduler")
    kind = section.get("type") if isinstance(section, dict) else None
    why = _miscounted(manifest, found)
    if isinstance(found, dict) and kind in _OWN and "last_batch_iteration" not in found:
        why = f"the recorded config has DeepSpeed's {kind}, and this is the state of another scheduler"
    return (Note(Outcome.KEPT, NAME, f"{why}; {_WITHOUT}"),) if why else ()


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
        why = f"the source has several ({listed(fitting)}), which go into the client state"
    elif entries:
        name, value = next(iter(entries.items()))
        why = f"the source's {name} goes into the client state: {_foreign(value) or _miscounted(manifest, value)}"
    elif "megatron" in manifest.extra:
        why = "the source has Megatron's only, which torch's schedulers do not load"
    else:
        why = ABSENT
    return Scheduler(None, NAME, (Note(Outcome.MISSING, NAME, f"{why}; {_IF_ANY}"),))


def _one(value: Any) -> Any:
    """The only item of a list, or of a dict by the names of classes; of anything else, itself."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return items[0] if len(items) == 1 and not _foreign(items[0]) else value


def _foreign(state: Any) -> str:
    """Why a scheduler of torch or DeepSpeed does not take ``state``; empty if it does."""
    if isinstance(state, list):
        return f"it has {count(len(state), 'scheduler')}"
    if not isinstance(state, dict):
        return f"it is a {kind_of(state)}"
    return "" if {"last_epoch", "last_batch_iteration"} & state.keys() else "it is not the state of one scheduler"


def _miscounted(manifest: Manifest, state: Any) -> str:
    """Whether it has learning rates for another number of groups: DeepSpeed has no group without elements."""
    rates = state.get("base_lrs") if isinstance(state, dict) else None
    kept = [group for group in manifest.groups if any(_numel(manifest, name) for name in group.params)]
    if not kept or not isinstance(rates, list) or len(rates) == len(kept):
        return ""
    return f"it has {count(len(rates), 'learning rate')} for {count(len(kept), 'parameter group')}"


def _numel(manifest: Manifest, name: str) -> int:
    return manifest.tensors[StateKey(manifest.aliases.get(name, name))].numel


def _taken(name: str, state: Mapping[str, Any]) -> Note:
    called = "" if name == NAME else f"it is called {NAME} now; "
    kinds = ("torch's", "one that DeepSpeed makes of its config, such as WarmupLR")
    kind, other = kinds if "last_epoch" in state else reversed(kinds)
    why = f"{called}load_checkpoint gives it to the run's scheduler; if that is not {kind} but {other}, {_WITHOUT}"
    return Note(Outcome.KEPT, name, why)
