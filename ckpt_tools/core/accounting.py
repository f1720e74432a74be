"""The account of a conversion: each tensor and description of the source is written, or a note names it. Pure.

A tensor is left out in one of two steps: an option leaves it out of the manifest, or the writer has no place for it.
Each step makes a note of it. What neither step named is a defect of this program, never a loss in silence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from ckpt_tools.core.format_names import DESCRIPTION_ENTRIES
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest, StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.value_refs import iter_tensor_refs
from ckpt_tools.errors import CkptError
from ckpt_tools.messages.wording import join_names

_COUNT_ONLY_NOTE = re.compile(r"[\d,]+ (?:\S+ )?tensors?(?: .*)?")
"""A note on tensors by their number alone, as selecting some makes it."""


def check_nothing_lost(
    source_manifest: Manifest,
    target_manifest: Manifest,
    written_keys: Collection[StateKey],
    notes: Iterable[Note],
    *,
    is_mapped: bool,
) -> None:
    """Check that each item of the source is in the output, or that ``notes`` name it:

    - each tensor of ``source_manifest`` is in ``target_manifest``, under its name or another; if ``is_mapped``, a
      recipe or an adapter that made tensors of others has checked that itself;
    - each tensor of ``target_manifest`` is in ``written_keys``;
    - each description of ``source_manifest`` is in ``target_manifest``.

    Raises:
        CkptError: an item is neither written nor named.
    """
    loss_notes = [note for note in notes if note.outcome in (Outcome.DROPPED, Outcome.DEFAULTED, Outcome.MISSING)]
    noted_items = [note.what for note in loss_notes]
    unwritten_keys = [] if is_mapped else [*_iter_dropped_keys(source_manifest, target_manifest)]
    unwritten_keys += [
        key for key in target_manifest.tensors if key not in written_keys and not _needs_no_bytes(key, target_manifest)
    ]
    extra = source_manifest.extra if unwritten_keys else {}
    entry_by_key = {ref.key: str(name) for name, value in extra.items() for ref in iter_tensor_refs(value)}
    lost_items = [str(key) for key in unwritten_keys if not _is_noted(key, entry_by_key.get(key), noted_items)]
    # A note that counts tensors without their names ("12 tensors") accounts for as many of those that no note names.
    lost_items = lost_items[sum(note.count for note in loss_notes if _COUNT_ONLY_NOTE.fullmatch(note.what)) :]
    lost_items += [
        name
        for name in DESCRIPTION_ENTRIES
        if name in source_manifest.extra and name not in target_manifest.extra and name not in noted_items
    ]
    if lost_items:
        raise CkptError(
            f"a defect of ckpt-tools: {join_names(lost_items)} would be neither written nor named in a note; please "
            f"report it"
        )


def _needs_no_bytes(key: StateKey, target_manifest: Manifest) -> bool:
    """Whether the tensor is a plain number, which is written as a value; or state of a parameter without elements,
    which some frameworks store and others do not."""
    weight = target_manifest.tensors.get(StateKey(key.fqn))
    is_number = {*target_manifest.tensors[key].shards.files} <= target_manifest.literals.keys()
    return is_number or (weight is not None and not weight.numel)


def _iter_dropped_keys(source_manifest: Manifest, target_manifest: Manifest) -> Iterator[StateKey]:
    """Tensors of ``source_manifest`` that are not in ``target_manifest``, by name, by the shards that a renamed one
    keeps, or by those that one is computed of."""
    operands = (entry for each in target_manifest.computed.values() for entry in each.operands)
    kept_shard_ids = {id(entry.shards) for entry in (*target_manifest.tensors.values(), *operands)}
    for key, entry in source_manifest.tensors.items():
        if key.slot == MASTER or key in target_manifest.tensors or id(entry.shards) in kept_shard_ids:
            continue
        # Of a parameter's two copies one is written where there is room for one.
        master = source_manifest.tensors.get(StateKey(key.fqn, MASTER)) if key.slot == WEIGHT else None
        if master is None or id(master.shards) not in kept_shard_ids:
            yield key


def _is_noted(key: StateKey, entry: str | None, noted_items: Iterable[str]) -> bool:
    """Whether a note names the tensor, its parameter, its slot, or the ``entry`` that refers to it and is left out with
    it."""
    return any(
        what in (str(key), key.fqn)
        or what.startswith((f"{key.slot} of ", f"optimizer state of {key.fqn}"))
        or (key.slot != WEIGHT and what.startswith("optimizer state of parameter group"))
        or (entry is not None and what.casefold().startswith(entry.casefold()))
        or f".{key.fqn}.".startswith((f".{what}.", f".client_state.{what}."))
        for what in noted_items
    )
