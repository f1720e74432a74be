"""The names that a pipeline's parameters have in the whole model, where the run states them.

``PipelineModule`` numbers layers, and no file of DeepSpeed's has their names in the model without a pipeline. A run may
state them in its client state: ``pipeline_names`` has for each layer with tensors, by the pipeline's name for it
(``"1"``, ``"tied_modules.embed"``), the names of that module in the whole model. A tied one has several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core import transforms
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.values import brief
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.formats.deepspeed.zero_reader.layers import TIED
from ckpt_tools.formats.deepspeed.zero_reader.missing_layers import UNTOLD

ENTRY = "pipeline_names"

Names = Mapping[str, tuple[str, ...]]


def whole(manifest: Manifest, path: str) -> Manifest:
    """The manifest under the names of the whole model, if the run states them. ``path`` is a file for messages. Raises
    MalformedError if the entry is not of that form, or does not name each layer once; IncompleteError if there is no
    tensor of a layer that it names."""
    client_state = manifest.extra.get("client_state")
    if not isinstance(client_state, Mapping) or ENTRY not in client_state:
        return manifest
    names = _parsed(client_state[ENTRY], path)
    layers = {fqn: _layer(fqn) for fqn in transforms.model_names(manifest)}
    _check(names, layers, path)
    owners = {fqn: names[layer][0] + fqn.removeprefix(layer) for fqn, layer in layers.items()}
    if len({*owners.values()}) < len(owners):
        raise MalformedError(f"client_state.{ENTRY} gives two tensors one name", path=path)
    renamed, _ = transforms.rename(manifest, owners.__getitem__)
    tied = {other + fqn.removeprefix(layer): owners[fqn] for fqn, layer in layers.items() for other in names[layer][1:]}
    return replace(
        renamed,
        aliases={**renamed.aliases, **tied},
        extra=_without_entry(manifest.extra),
        notes=tuple(note for note in manifest.notes if note.what != UNTOLD),
    )


def _layer(fqn: str) -> str:
    """``1`` of ``1.norm.weight``, and ``tied_modules.embed`` of ``tied_modules.embed.weight``."""
    parts = 2 if fqn.startswith(TIED) else 1
    return ".".join(fqn.split(".")[:parts])


def _parsed(entry: Any, path: str) -> Names:
    if isinstance(entry, Mapping) and all(map(_is_name, entry)) and all(map(_are_names, entry.values())):
        return {layer: tuple(names) for layer, names in entry.items()}
    raise MalformedError(
        f"client_state.{ENTRY} is to have a list of names for each layer, and is {brief(entry)}", path=path
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_name, value))


def _check(names: Names, layers: Mapping[str, str], path: str) -> None:
    found = {*layers.values()}
    if unnamed := sorted(found - names.keys()):
        raise MalformedError(f"client_state.{ENTRY} has no name for this layer", path=path, key=unnamed[0])
    if missing := sorted(names.keys() - found):
        why = f"client_state.{ENTRY} names this layer, and no file contains it"
        raise IncompleteError(why, path=path, key=missing[0])
    counts = Counter(name for each in names.values() for name in each)
    if twice := [name for name, number in counts.items() if number > 1]:
        raise MalformedError(f"client_state.{ENTRY} gives this name twice", path=path, key=twice[0])


def _without_entry(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The entry is in the names now, and would be wrong beside a model without layers of a pipeline."""
    client_state = {name: value for name, value in extra["client_state"].items() if name != ENTRY}
    rest = {name: value for name, value in extra.items() if name != "client_state"}
    return {**rest, **({"client_state": client_state} if client_state else {})}
