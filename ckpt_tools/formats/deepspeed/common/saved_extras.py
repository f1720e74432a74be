"""DeepSpeed's scalars, the scheduler and the client state of a checkpoint that is read.

Values stay inert. A ``TensorRef`` stands for each tensor in them, which becomes one of the manifest.
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
from ckpt_tools.formats.deepspeed.common.files import File, plain

SLOT = "extra"
"""The slot of a tensor found in an extra; its fqn is its path there."""

# engine.py, _common_checkpoint_state and _save_moe_checkpoint, and what older versions called theirs. The first row
# becomes the manifest itself.
_READ = ("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
_OWN = (
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
_OF_OPTIMIZER = ("dynamic_loss_scale", "overflow", "clip_grad")
_NEUTRAL = ("global_steps", "lr_scheduler")

RESERVED = frozenset((*_READ, *_OWN, *_NEUTRAL))
"""DeepSpeed's own entries of a model file. All others are client state, and an entry of a client's under one of these
names would replace DeepSpeed's."""


@dataclass(slots=True)
class Extras:
    """Extras being gathered, and the tensors found in them."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[StateKey, TensorEntry] = field(default_factory=dict)
    _uses: Counter[str] = field(default_factory=Counter, repr=False)

    def add_model(self, file: File, without: tuple[str, ...] = ()) -> None:
        """Everything of a model file but the model, and but the entries ``without``, which were read."""
        content = file.content
        self.values["global_step"] = content.get("global_steps")
        if content.get("lr_scheduler") is not None:
            self.values["lr_scheduler"] = self.inert(content["lr_scheduler"], "lr_scheduler", file)
        for name in DESCRIPTION_ENTRIES:
            if name in content:
                self.values[name] = self.inert(content[name], name, file)
        client = (name for name in content if name not in (*RESERVED, *DESCRIPTION_ENTRIES))
        self._add_section("client_state", file, content, client)
        self._add_section("deepspeed", file, content, (name for name in _OWN if name not in without))

    def add_optimizer(self, file: File, own: Mapping[str, Value]) -> None:
        """The loss scaler and the scalars of an optimizer file."""
        if own.get("loss_scaler") is not None:
            self.values["loss_scaler"] = self.inert(plain(own["loss_scaler"]), "loss_scaler", file)
        self._add_section("deepspeed", file, own, _OF_OPTIMIZER)

    def add_module_value(self, name: str, value: Value, file: File) -> None:
        """Keeps a value of a module that is not a tensor: its ``_extra_state``, which may be anything."""
        kept = self.values.setdefault("deepspeed", {}).setdefault("module", {})
        kept[name] = self.inert(value, f"module.{name}", file)

    def options(self, number: int, options: Mapping[str, Value], file: File) -> dict[str, Value]:
        return {name: self.inert(value, f"param_groups.{number}.{name}", file) for name, value in options.items()}

    def _add_section(self, section: str, file: File, content: Mapping[str, Value], names: Iterable[Value]) -> None:
        found = {
            name: self.inert(content[name], f"{section}.{name}", file)
            for name in names
            if name in content and not (section == "deepspeed" and content[name] is None)
        }
        if found:
            self.values.setdefault(section, {}).update(found)

    def inert(self, value: Value, name: str, file: File) -> Value:
        """``value`` with a reference in the place of each tensor; itself where there is none."""
        refs = {id(tensor): self._refer(tensor, path, file) for path, tensor in _tensors(value, name, set())}
        return replace_stored_tensors(value, lambda tensor: refs.get(id(tensor), tensor)) if refs else value

    def _refer(self, tensor: StoredTensor, name: str, file: File) -> TensorRef:
        """A reference to a new tensor. The keys 1 and "1" of one dictionary have the same path."""
        key = StateKey(name, SLOT)
        while key in self.tensors:
            self._uses[name] += 1
            key = StateKey(f"{name}'{self._uses[name]}", SLOT)
        self.tensors[key] = TensorEntry(tuple(tensor.shape), tensor.dtype, Kind.EXTRA, file.table(tensor))
        return TensorRef(key)


def _tensors(value: Value, name: str, seen: set[int]) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor with elements in ``value`` and the path at which it is met first; cycles are followed once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[tuple[Value, Value]] = ()
    if isinstance(value, StoredTensor):
        if value.storage is not None:
            yield name, value
    elif isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = enumerate(value)
    elif isinstance(value, Opaque):
        yield from _tensors(value.args, f"{name}.args", seen)
        yield from _tensors(value.kwargs, f"{name}.kwargs", seen)
        yield from _tensors(value.state, name, seen)
        parts = (("items", value.items), ("pairs", value.pairs))
    for key, part in parts:
        yield from _tensors(part, f"{name}.{key}", seen)
