"""Names of a model's tensors, and what wrappers add to them. Imports nothing that costs time."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module")
"""What torch.compile, FSDP1, activation checkpointing and Lightning Fabric put into a name, anywhere in it."""

_EXTRA_STATE_NAME = "_extra_state"
"""How torch names what ``Module.get_extra_state`` returned, behind the module's name."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is a number."""

_WRAPPER_PREFIX = re.compile(r"(?:module\.|model0\.)+")

MODEL_PREFIX = "model."
"""The attribute under which Lightning's modules and many training scripts keep a model. It is also a part of names of
transformers."""


def collect_model_names(manifest: Manifest) -> frozenset[str]:
    """Names of parameters, buffers and their state. Tensors of the user's own entries keep the keys by which these
    entries refer to them."""
    names = {key.fqn for key, entry in manifest.tensors.items() if entry.kind is not Kind.EXTRA}
    return frozenset(names.union((key.fqn for key in manifest.values), manifest.aliases))


def collect_name_shapes(manifest: Manifest) -> frozenset[str]:
    """``collect_model_names`` with 0 for each number: a few dozen, of hundreds of thousands of experts."""
    return frozenset(map(zero_numbers, collect_model_names(manifest)))


def is_extra_state(name: str | int) -> bool:
    """Whether ``name`` is that of a value which ``get_extra_state`` of a module returned."""
    return str(name).rpartition(".")[2] == _EXTRA_STATE_NAME


def iter_names_with_prefix(prefix: str, sorted_names: Sequence[str]) -> Iterator[str]:
    """Those of ``sorted_names`` that begin with ``prefix``."""
    position = bisect_left(sorted_names, prefix)
    while position < len(sorted_names) and sorted_names[position].startswith(prefix):
        yield sorted_names[position]
        position += 1


def zero_numbers(name: str) -> str:
    """``name`` with 0 for each of its numbers: names that differ in numbers alone become equal."""
    return _NUMBER.sub("0", name)


def may_have_wrappers(names: Iterable[str]) -> bool:
    """False if wrappers put nothing into any of the names, and nothing before one."""
    text = "\n".join(("", *names))
    return any(part in text for part in (*WRAPPER_PARTS, "\nmodule.", "\nmodel0."))


def strip_wrapper_parts(name: str) -> str:
    """A name without the ``WRAPPER_PARTS``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def find_shared_wrappers(names: Collection[str]) -> str:
    """The prefix of wrappers that all names share without the ``WRAPPER_PARTS``: ``module.`` any number of times, and
    Megatron's ``model0.`` for the first part of a pipeline."""
    names = set(map(strip_wrapper_parts, names))
    shortest_name = min(names, key=len, default="")
    wrappers_match = _WRAPPER_PREFIX.match(shortest_name)
    prefix = wrappers_match[0] if wrappers_match is not None else ""
    while prefix and not all(name.startswith(prefix) for name in names):
        prefix = prefix[: prefix[:-1].rfind(".") + 1]
    return prefix


def map_to_bare_names(names: Collection[str]) -> dict[str, str]:
    """The names of the bare model, by the given names: without wrappers, in whatever order these were put on."""
    prefix = find_shared_wrappers(names)
    return {name: strip_wrapper_parts(name).removeprefix(prefix) for name in names}


def map_to_bare_model_names(manifest: Manifest) -> dict[str, str]:
    """``map_to_bare_names`` of ``collect_model_names``. Names of weights and of optimizer state are stripped apart
    where that leads to the same names, as they may have other wrappers."""
    names = collect_model_names(manifest)
    weight_keys = [
        *manifest.select_kinds(Kind.PARAMETER, Kind.BUFFER),
        *(key for key in manifest.values if key.slot == WEIGHT),
    ]
    weight_names = names & ({key.fqn for key in weight_keys} | manifest.aliases.keys())
    bare_weight_names, bare_state_names = map_to_bare_names(weight_names), map_to_bare_names(names - weight_names)
    is_same_model = weight_names and {*bare_state_names.values()} <= {*bare_weight_names.values()}
    return {**bare_weight_names, **bare_state_names} if is_same_model else map_to_bare_names(names)


def has_model_attribute_prefix(names: Collection[str], is_known: Callable[[Collection[str]], bool]) -> bool:
    """True if the ``model.`` before all names is the attribute of a model, and no part of its names: names begin with
    ``model.`` again without it, or are known without it and not with it."""
    if not names or not all(name.startswith(MODEL_PREFIX) for name in names):
        return False
    stripped_names = [name.removeprefix(MODEL_PREFIX) for name in names]
    has_prefix_again = any(name.startswith(MODEL_PREFIX) for name in stripped_names)
    return has_prefix_again or (is_known(stripped_names) and not is_known(names))
