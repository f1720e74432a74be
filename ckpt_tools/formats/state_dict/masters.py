"""Masters in the optimizer's state: fp32 copies of the parameters in a slot that is called so. Pure.

TransformerEngine's ``FusedAdam(master_weights=True)`` keeps ``master_param``; Megatron-Core calls it ``fp32_param``.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, Kind, Manifest, StateKey

MASTER_SLOTS = frozenset(
    f"{name}{plural}" for name in ("master", "master_param", "master_weight", "fp32_param") for plural in ("", "s")
)


def rename_master_slots(manifest: Manifest) -> Manifest:
    """The manifest whose masters have the slot ``MASTER``, and whose tree says what they are called there."""
    master_keys = [
        key for key in manifest.select_kinds(Kind.STATE) if key.slot in MASTER_SLOTS and _is_master(manifest, key)
    ]
    if manifest.tree is None or not master_keys:
        return manifest
    slot = master_keys[0].slot
    renamed_keys = {key: StateKey(key.fqn, MASTER) for key in master_keys if key.slot == slot}
    tensors = {renamed_keys.get(key, key): entry for key, entry in manifest.tensors.items()}
    return replace(manifest, tensors=tensors, tree=replace(manifest.tree, masters=slot))


def _is_master(manifest: Manifest, key: StateKey) -> bool:
    state = manifest.tensors[key]
    weight = manifest.tensors.get(StateKey(manifest.aliases.get(key.fqn, key.fqn)))
    return weight is not None and weight.shape == state.shape and state.dtype is DType.FLOAT32
