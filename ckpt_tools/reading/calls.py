"""Calls beside the tensors of a checkpoint: nothing here executes them, and whoever loads the checkpoint would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.values import Opaque


def with_calls_noted(manifest: Manifest) -> Manifest:
    """``manifest`` with a note for each entry beside the tensors that holds a call which ``scan`` would list."""
    notes = tuple(
        Note(Outcome.KEPT, name, f"it holds a call of {call.ref}, which a loader would execute; `ckpt-tools scan` "
             "tells more")
        for name, value in manifest.extra.items()
        if (call := next(_calls(value), None)) is not None
    )  # fmt: skip
    return replace(manifest, notes=manifest.notes + notes) if notes else manifest


def _calls(value: Any) -> Iterator[Opaque]:
    """Those that the closed list does not know, each object once: one may hold itself."""
    seen = set[int]()
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            todo += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            todo += part
        elif isinstance(part, Opaque) and id(part) not in seen:
            seen.add(id(part))
            if _is_refused(part):
                yield part
            todo += [part.args, part.kwargs, part.state, part.items, part.pairs]


def _is_refused(made: Opaque) -> bool:
    from ckpt_tools.serialization.pickle.closed_list import refusal

    return refusal(made) is not None
