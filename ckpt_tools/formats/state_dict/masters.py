"""Masters in the optimizer's state: fp32 copies of the parameters in a slot that is called so. Pure.

TransformerEngine's ``FusedAdam(master_weights=True)`` keeps ``master_param``; Megatron-Core calls it ``fp32_param``.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, Kind, Manifest, StateKey

SLOTS = frozenset(
    f"{name}{plural}" for name in ("master", "master_param", "master_weight", "fp32_param") for plural in ("", "s")
)


def with_masters(manifest: Manifest) -> Manifest:
    """The manifest whose masters have the slot ``MASTER``, and whose tree says what they are called there."""
    found = [key for key in manifest.select_kinds(Kind.STATE) if key.slot in SLOTS and _is_master(manifest, key)]
    if manifest.tree is None or not found:
        return manifest
    slot = found[0].slot
    names = {key: StateKey(key.fqn, MASTER) for key in found if key.slot == slot}
    tensors = {names.get(key, key): entry for key, entry in manifest.tensors.items()}
    return replace(manifest, tensors=tensors, tree=replace(manifest.tree, masters=slot))


def _is_master(manifest: Manifest, key: StateKey) -> bool:
    state = manifest.tensors[key]
    weight = manifest.tensors.get(StateKey(manifest.aliases.get(key.fqn, key.fqn)))
    return weight is not None and weight.shape == state.shape and state.dtype is DType.FLOAT32
