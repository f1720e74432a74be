"""Names of the whole model for a run of ``PipelineModule``, which numbers layers, from its client state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core import renaming
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import collect_model_names
from ckpt_tools.core.values import format_brief
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.formats.deepspeed.zero_reader.missing_layers import UNLISTED_LAYERS
from ckpt_tools.formats.deepspeed.zero_reader.stage_files import TIED_PREFIX

PIPELINE_NAMES_ENTRY = "pipeline_names"
"""Entry of the client state with the names of layers in the whole model, which no file of DeepSpeed's has because
``PipelineModule`` numbers layers. For each layer with tensors, by the pipeline's name for it (``"1"``,
``"tied_modules.embed"``), it has the names of that module in the whole model; a tied one has several."""

LayerNames = Mapping[str, tuple[str, ...]]


def apply_whole_names(manifest: Manifest, path: str) -> Manifest:
    """The manifest under the names of the whole model, if the client state has ``PIPELINE_NAMES_ENTRY``; otherwise
    unchanged. ``path`` is a file for messages. Raises MalformedError if the entry is malformed, or does not name each
    layer once; IncompleteError if there is no tensor of a layer that it names."""
    client_state = manifest.extra.get("client_state")
    if not isinstance(client_state, Mapping) or PIPELINE_NAMES_ENTRY not in client_state:
        return manifest
    names = _parse_layer_names(client_state[PIPELINE_NAMES_ENTRY], path)
    layers = {fqn: _find_layer(fqn) for fqn in collect_model_names(manifest)}
    _check_layer_names(names, layers, path)
    name_by_fqn = {fqn: names[layer][0] + fqn.removeprefix(layer) for fqn, layer in layers.items()}
    if len({*name_by_fqn.values()}) < len(name_by_fqn):
        raise MalformedError(f"client_state.{PIPELINE_NAMES_ENTRY} gives two tensors one name", path=path)
    renamed, _ = renaming.rename_tensors(manifest, name_by_fqn.__getitem__)
    # The entry is in the names now, and would be wrong beside a model without layers of a pipeline.
    other_entries = {name: value for name, value in client_state.items() if name != PIPELINE_NAMES_ENTRY}
    extra = {name: value for name, value in manifest.extra.items() if name != "client_state"}
    owner_by_alias = {
        other + fqn.removeprefix(layer): name_by_fqn[fqn] for fqn, layer in layers.items() for other in names[layer][1:]
    }
    return replace(
        renamed,
        aliases={**renamed.aliases, **owner_by_alias},
        extra=extra | ({"client_state": other_entries} if other_entries else {}),
        notes=tuple(note for note in manifest.notes if note.what != UNLISTED_LAYERS),
    )


def _find_layer(fqn: str) -> str:
    """The layer of a tensor: ``1`` of ``1.norm.weight``, ``tied_modules.embed`` of ``tied_modules.embed.weight``."""
    parts = 2 if fqn.startswith(TIED_PREFIX) else 1
    return ".".join(fqn.split(".")[:parts])


def _parse_layer_names(entry: Any, path: str) -> LayerNames:
    if not isinstance(entry, Mapping) or not all(
        _is_name(layer) and isinstance(names, list | tuple) and names and all(map(_is_name, names))
        for layer, names in entry.items()
    ):
        why = f"is to have a list of names for each layer, and is {format_brief(entry)}"
        raise MalformedError(f"client_state.{PIPELINE_NAMES_ENTRY} {why}", path=path)
    return {layer: tuple(names) for layer, names in entry.items()}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _check_layer_names(names: LayerNames, layers: Mapping[str, str], path: str) -> None:
    saved_layers = {*layers.values()}
    if unnamed_layers := sorted(saved_layers - names.keys()):
        why = f"client_state.{PIPELINE_NAMES_ENTRY} has no name for this layer"
        raise MalformedError(why, path=path, key=unnamed_layers[0])
    if absent_layers := sorted(names.keys() - saved_layers):
        why = f"client_state.{PIPELINE_NAMES_ENTRY} names this layer, and no file contains it"
        raise IncompleteError(why, path=path, key=absent_layers[0])
    counts = Counter(name for each in names.values() for name in each)
    if duplicate := next((name for name, number in counts.items() if number > 1), None):
        raise MalformedError(f"client_state.{PIPELINE_NAMES_ENTRY} gives this name twice", path=path, key=duplicate)
