"""Which files of layers and of experts a tag has to have, as its model files say."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ckpt_tools.formats.deepspeed.names import LAYER, expert_name, expert_optim_name, layer_name

MAX_EXPERTS = 1 << 20

_NUMBERED = re.compile(r"(\d{1,9})\..+", re.DOTALL)
_EP_SIZE = re.compile(r"ep_size_(\d{1,9})")

Head = Mapping[Any, Any]
"""What a model file holds."""


def model_parallel_size(head: Head) -> int | None:
    """Tensor-parallel ranks times stages of a pipeline; None if the file does not say."""
    size, parallel = head.get("mp_world_size"), head.get("checkpoint_parallel_dimensions")
    degrees = [each for each in (parallel.values() if isinstance(parallel, dict) else ()) if type(each) is int]
    return max(size, prod(degrees)) if type(size) is int else None


def missing(names: Collection[str], heads: Iterable[Head]) -> str | None:
    """The first file of a layer or an expert that ``names`` lack; ``heads`` are all model files."""
    cuts: dict[str, set[int]] = {}
    for match in filter(None, map(LAYER.fullmatch, names)):
        cuts.setdefault(match["cut"] or "", set()).add(int(match["layer"]))
    for cut, held in cuts.items():
        if others := set().union(*cuts.values()) - held:
            return layer_name(min(others), cut)
    for head in heads:
        for name in (*_experts(head), *_expert_optimizers(head)):
            if name not in names:
                return name
        layers = _layers(head).difference(*cuts.values()) if head.get("module") is None else set()
        if layers:
            return layer_name(min(layers), min(cuts, default=""))
    return None


def _experts(head: Head) -> Iterator[str]:
    """A file for each expert of each layer, if they are not in the model's own file."""
    counts, module = head.get("num_experts"), head.get("module")
    is_whole = isinstance(module, dict) and any(".deepspeed_experts." in str(name) for name in module)
    for layer, count in enumerate(counts if isinstance(counts, list) and not is_whole else ()):
        if type(count) is int and count <= MAX_EXPERTS:
            yield from (expert_name(layer, number) for number in range(count))


def _expert_optimizers(head: Head) -> Iterator[str]:
    """Without ZeRO a file for each expert-parallel rank; groups of experts are called after their number."""
    found = head.get("optimizer")
    inner = found.get("optimizer_state_dict", found) if isinstance(found, dict) else {}
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    owned = [group for group in groups or () if isinstance(group, dict) and group.get("moe")]
    sizes = [int(match[1]) for group in owned if (match := _EP_SIZE.fullmatch(str(group.get("name"))))]
    yield from map(expert_optim_name, range(min(max(sizes, default=0), MAX_EXPERTS)))


def _layers(head: Head) -> set[int]:
    """The layers of a stage that have parameters or buffers, by its names (``3.weight``)."""
    shapes = head.get("param_shapes")
    lists = [*(shapes if isinstance(shapes, list) else ()), head.get("buffer_names"), head.get("frozen_param_shapes")]
    names = (name for found in lists if isinstance(found, list | dict) for name in found)
    return {int(match[1]) for match in map(_NUMBERED.fullmatch, map(str, names)) if match}
