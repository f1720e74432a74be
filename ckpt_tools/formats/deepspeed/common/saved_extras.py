"""DeepSpeed's scalars, the scheduler and the client state of a checkpoint that is read.

Values stay inert. Each tensor in them becomes a tensor of the manifest, and a ``TensorRef`` takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.format_names import DESCRIPTION_ENTRIES
from ckpt_tools.core.manifest import Kind, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.value_refs import replace_stored_tensors
from ckpt_tools.core.values import Opaque, StoredTensor, Value
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, unwrap_attributes

EXTRA_SLOT = "extra"
"""The slot of a tensor found in an extra; its fqn is its path there."""

# Entries of engine.py's _common_checkpoint_state and _save_moe_checkpoint, and their names in older versions. The first
# ones become the tensors of the manifest.
_MANIFEST_ENTRIES = (
    "module",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
)
_DEEPSPEED_ENTRIES = (
    "optimizer",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "sparse_tensor_module_names",
    "csr_tensor_module_names",
    "num_experts",
    "ds_autoep_layers",
    "autoep_layers",
    "folding",
    "universal_checkpoint_info",
)
_OPTIMIZER_ENTRIES = ("dynamic_loss_scale", "overflow", "clip_grad")
_COMMON_ENTRIES = ("global_steps", "lr_scheduler")

RESERVED_ENTRIES = frozenset((*_MANIFEST_ENTRIES, *_DEEPSPEED_ENTRIES, *_COMMON_ENTRIES))
"""DeepSpeed's own entries of a model file. All others are client state, and an entry of a client's under one of these
names would replace DeepSpeed's."""


@dataclass(slots=True)
class ExtrasCollector:
    """Gathers ``values``, the extras of a manifest by name, and the ``tensors`` found in them."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[StateKey, TensorEntry] = field(default_factory=dict)
    _name_counts: Counter[str] = field(default_factory=Counter, repr=False)

    def add_model(self, file: DeepSpeedFile, skipped_entries: tuple[str, ...] = ()) -> None:
        """Adds the entries of a model file, without those of the model and ``skipped_entries``, which are read
        elsewhere."""
        content = file.content
        self.values["global_step"] = content.get("global_steps")
        if content.get("lr_scheduler") is not None:
            self.values["lr_scheduler"] = self.replace_tensors(content["lr_scheduler"], "lr_scheduler", file)
        for name in DESCRIPTION_ENTRIES:
            if name in content:
                self.values[name] = self.replace_tensors(content[name], name, file)
        client_names = (name for name in content if name not in (*RESERVED_ENTRIES, *DESCRIPTION_ENTRIES))
        self._add_section("client_state", file, content, client_names)
        own_names = (name for name in _DEEPSPEED_ENTRIES if name not in skipped_entries)
        self._add_section("deepspeed", file, content, own_names)

    def add_optimizer(self, file: DeepSpeedFile, state_dict: Mapping[str, Value]) -> None:
        """Adds the loss scaler and the scalars of an optimizer file."""
        if state_dict.get("loss_scaler") is not None:
            scaler = unwrap_attributes(state_dict["loss_scaler"])
            self.values["loss_scaler"] = self.replace_tensors(scaler, "loss_scaler", file)
        self._add_section("deepspeed", file, state_dict, _OPTIMIZER_ENTRIES)

    def add_value(self, section: str, key: str | int, value: Value, file: DeepSpeedFile) -> None:
        """Keeps a value among DeepSpeed's entries: in ``module`` one of a module that is not a tensor (its
        ``_extra_state``), or in other sections state of the optimizer of another kind."""
        values = self.values.setdefault("deepspeed", {}).setdefault(section, {})
        values[key] = self.replace_tensors(value, f"{section}.{key}", file)

    def replace_option_tensors(
        self, number: int, options: Mapping[str, Value], file: DeepSpeedFile
    ) -> dict[str, Value]:
        """The hyperparameters of param group ``number`` with a reference in the place of each tensor."""
        path = f"param_groups.{number}"
        return {name: self.replace_tensors(value, f"{path}.{name}", file) for name, value in options.items()}

    def _add_section(
        self, section: str, file: DeepSpeedFile, content: Mapping[str, Value], names: Iterable[Value]
    ) -> None:
        entries = {
            name: self.replace_tensors(content[name], f"{section}.{name}", file)
            for name in names
            if name in content and not (section == "deepspeed" and content[name] is None)
        }
        if entries:
            self.values.setdefault(section, {}).update(entries)

    def replace_tensors(self, value: Value, name: str, file: DeepSpeedFile) -> Value:
        """``value`` with a reference in the place of each tensor; itself where there is none."""
        found = _find_tensors(value, name, set())
        refs = {id(tensor): self._add_tensor(tensor, path, file) for path, tensor in found}
        return replace_stored_tensors(value, lambda tensor: refs.get(id(tensor), tensor)) if refs else value

    def _add_tensor(self, tensor: StoredTensor, name: str, file: DeepSpeedFile) -> TensorRef:
        """Adds ``tensor`` under ``name`` and returns a reference to it. A name may come twice, because the keys 1 and
        "1" of one dictionary have the same path; the second gets a number."""
        key = StateKey(name, EXTRA_SLOT)
        while key in self.tensors:
            self._name_counts[name] += 1
            key = StateKey(f"{name}'{self._name_counts[name]}", EXTRA_SLOT)
        self.tensors[key] = TensorEntry(tuple(tensor.shape), tensor.dtype, Kind.EXTRA, file.build_shard_table(tensor))
        return TensorRef(key)


def _find_tensors(value: Value, name: str, seen_ids: set[int]) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of ``value`` that is in the file, and the path at which it is met first; cycles are followed
    once."""
    if id(value) in seen_ids:
        return
    seen_ids.add(id(value))
    children: Iterable[tuple[Value, Value]] = ()
    if isinstance(value, StoredTensor):
        if value.storage is not None:
            yield name, value
    elif isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        children = enumerate(value)
    elif isinstance(value, Opaque):
        yield from _find_tensors(value.args, f"{name}.args", seen_ids)
        yield from _find_tensors(value.kwargs, f"{name}.kwargs", seen_ids)
        yield from _find_tensors(value.state, name, seen_ids)
        children = (("items", value.items), ("pairs", value.pairs))
    for key, child in children:
        yield from _find_tensors(child, f"{name}.{key}", seen_ids)
