"""Weights for formats that are a flat list of named arrays, without ties. Pure."""

from __future__ import annotations

from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.messages.wording import format_count


def collect_weights_by_name(manifest: Manifest, format_name: str) -> tuple[dict[str, StateKey], tuple[Note, ...]]:
    """Every weight and buffer by its name. A tied tensor is there under each of its names, and a note says so."""
    keys_by_name = {name: StateKey(name) for name in manifest.weights}
    tied_keys = {alias: keys_by_name[owner] for alias, owner in manifest.aliases.items()}
    tied_bytes = sum(manifest.tensors[key].num_bytes for key in tied_keys.values())
    why = f"{format_name} cannot tie weights; each name is stored with elements of its own"
    note = Note(Outcome.KEPT, format_count(len(tied_keys), "tied name"), why, len(tied_keys), tied_bytes)
    return {**keys_by_name, **tied_keys}, (note,) if tied_keys else ()
