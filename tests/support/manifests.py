"""What a reader made of a checkpoint, against the truth of the framework that wrote it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.value_json import value_to_json
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.wrappers import overlay_literals
from ckpt_tools.transfer.tensor_reader import TensorReader
from tests.support.truth import Key, Truth, assert_same_bits, dtype_of


def read_bytes(store: Store, entry: TensorEntry) -> bytes:
    """The elements of a tensor, row-major, as the reader of tensors gives them to every command."""
    out = bytearray(entry.num_bytes)
    reader = TensorReader(store, scratch_bytes=1 << 20)
    reader.read(entry, Box.whole(entry.shape), entry.shape, 0, entry.numel, memoryview(out))
    return bytes(out)


def elements(store: Store, entry: TensorEntry) -> np.ndarray:
    """The same as an array."""
    return np.frombuffer(read_bytes(store, entry), dtype_of(entry.dtype.value)).reshape(entry.shape)


def elements_in(store: Store, manifest: Manifest) -> dict[Key, np.ndarray]:
    """Every tensor of the model and the optimizer, weights under their aliases too."""
    store = overlay_literals(store, manifest.literals)
    entries = {key: entry for key, entry in manifest.tensors.items() if entry.kind is not Kind.EXTRA}
    entries |= {StateKey(alias): manifest.tensors[StateKey(owner)] for alias, owner in manifest.aliases.items()}
    return {(key.fqn, key.slot): elements(store, entry) for key, entry in entries.items()}


def gathered(folder: Path, manifest: Manifest) -> dict[Key, np.ndarray]:
    """The same of a folder."""
    return elements_in(LocalStore(folder), manifest)


def groups_of(manifest: Manifest) -> list[dict[str, Any]]:
    """The parameter groups as a truth has them."""
    return as_json([{"fqns": group.params, "options": group.options} for group in manifest.groups])


def as_json(value: Any) -> Any:
    """A value as JSON brings it back: a truth is a file of JSON."""
    return json.loads(json.dumps(value))


def assert_holds(manifest: Manifest, folder: Path, truth: Truth, *, format_name: str) -> None:
    """All that DeepSpeed holds: tensors bit for bit, kinds, ties, groups and everything that is no tensor."""
    assert_same_bits(truth.tensors, gathered(folder, manifest))
    assert manifest.format == format_name
    assert manifest.aliases == truth.facts["ties"]
    kinds = {key.fqn: entry.kind.value for key, entry in manifest.tensors.items() if entry.kind is not Kind.STATE}
    assert kinds == {fqn: kind for fqn, kind in truth.kinds.items() if fqn not in truth.facts["ties"]}
    assert groups_of(manifest) == truth.facts["groups"]
    assert_facts(manifest, truth.facts)


def assert_facts(manifest: Manifest, facts: Mapping[str, Any]) -> None:
    extra = manifest.extra
    assert (manifest.step, manifest.world_size) == (facts["global_step"], facts["world_size"])
    assert extra["global_step"] == facts["global_step"]
    assert as_json(extra["lr_scheduler"]) == facts["scheduler"]
    assert as_json(extra["client_state"]) == facts["client_state"]
    assert extra["deepspeed"]["skipped_steps"] == facts["skipped_steps"]
    scaler = {k: v for k, v in value_to_json(extra.get("loss_scaler", {})).items() if k != "dtype"}
    assert scaler == facts["loss_scaler"]
