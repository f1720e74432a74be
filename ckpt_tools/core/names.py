"""Names of a model's tensors, and what wrappers add to them. Imports nothing that costs time."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module")
"""What torch.compile, FSDP1, activation checkpointing and Lightning Fabric put into a name, anywhere in it."""

_EXTRA_STATE = "_extra_state"
"""How torch names what ``Module.get_extra_state`` returned, behind the module's name."""

_WRAPPERS = re.compile(r"(?:module\.|model0\.)+")

MODEL = "model."
"""The attribute under which Lightning's modules and many training scripts keep a model. It is also a part of names of
transformers."""


def model_names(manifest: Manifest) -> frozenset[str]:
    """Names of parameters, buffers and their state. Tensors of the user's own entries keep the keys by which these
    entries refer to them."""
    kinds = manifest.of_kind(Kind.PARAMETER, Kind.BUFFER, Kind.STATE)
    return frozenset(key.fqn for key in (*kinds, *manifest.values)) | set(manifest.aliases)


def is_extra_state(name: str | int) -> bool:
    """Whether a module's ``get_extra_state`` returned what has this name."""
    return str(name).rpartition(".")[2] == _EXTRA_STATE


def beginning_with(prefix: str, ordered: Sequence[str]) -> Iterator[str]:
    """The names that begin with ``prefix``, of those that are ``ordered``."""
    at = bisect_left(ordered, prefix)
    while at < len(ordered) and ordered[at].startswith(prefix):
        yield ordered[at]
        at += 1


def unnumbered(name: str) -> str:
    """A name with 0 for each of its numbers: names that differ in numbers alone are one."""
    return ".".join("0" if part.isdecimal() else part for part in name.split("."))


def without_parts(name: str) -> str:
    """A name without the ``WRAPPER_PARTS``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def shared_wrappers(names: Collection[str]) -> str:
    """The prefix of wrappers that all names share without the ``WRAPPER_PARTS``: ``module.`` any number of times, and
    Megatron's ``model0.`` for the first part of a pipeline."""
    names = set(map(without_parts, names))
    first = min(names, key=len, default="")
    found = _WRAPPERS.match(first)
    front = found[0] if found is not None else ""
    while front and not all(name.startswith(front) for name in names):
        front = front[: front[:-1].rfind(".") + 1]
    return front


def bare_names(names: Collection[str]) -> dict[str, str]:
    """Names as the bare model has them, by what they are: without wrappers, in whatever order these were put on."""
    front = shared_wrappers(names)
    return {name: without_parts(name).removeprefix(front) for name in names}


def bare_model_names(manifest: Manifest) -> dict[str, str]:
    """The same of ``model_names``. State of the optimizer may have other wrappers in its names than the weights."""
    names = model_names(manifest)
    own = [*manifest.of_kind(Kind.PARAMETER, Kind.BUFFER), *(key for key in manifest.values if key.slot == WEIGHT)]
    weights = names & ({key.fqn for key in own} | manifest.aliases.keys())
    bare, bare_of_state = bare_names(weights), bare_names(names - weights)
    is_same_model = weights and {*bare_of_state.values()} <= {*bare.values()}
    return {**bare, **bare_of_state} if is_same_model else bare_names(names)


def is_of_model(names: Collection[str], is_known: Callable[[Collection[str]], bool]) -> bool:
    """True if the ``model.`` before all names is the attribute of a model, and no part of its names: names begin with
    ``model.`` again without it, or are known without it and not with it."""
    if not names or not all(name.startswith(MODEL) for name in names):
        return False
    inner = [name.removeprefix(MODEL) for name in names]
    return any(name.startswith(MODEL) for name in inner) or (is_known(inner) and not is_known(names))
