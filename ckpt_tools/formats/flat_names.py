"""Weights for formats that are a flat list of named arrays, without ties. Pure."""

from __future__ import annotations

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.wording import format_count


def weights_by_name(manifest: Manifest, format_name: str) -> tuple[dict[str, StateKey], tuple[Note, ...]]:
    """Every weight and buffer by its name. A tied tensor is there under each of its names, and a note says so."""
    names = {
        key.fqn: key for key, entry in manifest.tensors.items() if key.slot == WEIGHT and entry.kind is not Kind.EXTRA
    }
    ties = {alias: names[owner] for alias, owner in manifest.aliases.items()}
    size = sum(manifest.tensors[key].num_bytes for key in ties.values())
    why = f"{format_name} cannot tie weights; each name is stored with elements of its own"
    notes = (Note(Outcome.KEPT, format_count(len(ties), "tied name"), why, len(ties), size),) if ties else ()
    return {**names, **ties}, notes
