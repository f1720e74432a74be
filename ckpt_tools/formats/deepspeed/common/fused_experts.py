"""Experts that AutoEP distributed: ``ds_autoep_layers`` of a model file.

AutoEP replaces the MoE block of a transformers model by a layer whose experts are three tensors, ``experts.w1``, ``w2``
and ``w3``, each ``[experts, ...]`` (deepspeed/moe/ep_experts.py). Expert-parallel rank e of N has the e-th of N equal
runs of experts, under the same names (``expert_placement``). ``param_shapes`` has the shapes of rank 0's. ``module``
has no experts, and has the router under two names (engine.py ``_save_moe_checkpoint``, auto_ep_layer.py ``setattr(self,
alias_target, self.router)``). DeepSpeed does not list the second as shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.values import StorageRef, StoredTensor, Value, are_naturals, as_dict, format_brief
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates

LAYERS_ENTRY, OLD_LAYERS_ENTRY = "ds_autoep_layers", "autoep_layers"
DISTRIBUTION_ENTRIES = (LAYERS_ENTRY, OLD_LAYERS_ENTRY, "num_experts", "universal_checkpoint_info")
"""Entries of a model file that say how the experts are distributed, which is not so after a conversion."""

FOLDED_RUN_TEXT = (
    "it is of a run with AutoEP and tensor parallelism, which is not supported; save it without tensor parallelism"
)


@dataclass(frozen=True, slots=True)
class AutoEPLayer:
    """A layer with experts. ``moe_number`` is its number among such layers, ``module_name`` its name in the model,
    ``expert_prefix`` the start of the names of its experts. Each of ``num_ranks`` expert-parallel ranks has
    ``num_local_experts`` experts; the file that states this is of expert-parallel rank ``rank``."""

    moe_number: int
    module_name: str
    expert_prefix: str
    num_local_experts: int
    num_ranks: int
    rank: int

    @property
    def num_experts(self) -> int:
        return self.num_local_experts * self.num_ranks


@dataclass(frozen=True, slots=True)
class AutoEPLayers:
    """All layers with experts of a run, without any if AutoEP distributed none. ``path`` is their file."""

    layers: tuple[AutoEPLayer, ...] = ()
    path: str = ""

    @classmethod
    def of(cls, file: DeepSpeedFile) -> AutoEPLayers:
        """The layers of a model file. Raises FormatError if they are malformed, or if experts are distributed in
        another way than in equal runs."""
        if file.content.get(OLD_LAYERS_ENTRY):
            raise UnsupportedError(
                f"it is of a first version of AutoEP ({OLD_LAYERS_ENTRY}), which is not supported", path=file.path
            )
        raw_layers = file.content.get(LAYERS_ENTRY) or []
        if raw_layers and file.content.get("folding") is not None:
            raise UnsupportedError(FOLDED_RUN_TEXT, path=file.path)
        if not isinstance(raw_layers, list):
            raise MalformedError(f"its {LAYERS_ENTRY} is {format_brief(raw_layers)}", path=file.path)
        layers = tuple(_parse_layer(each, file.path) for each in raw_layers)
        prefixes, rank_counts = ({layer.expert_prefix for layer in layers}, {layer.num_ranks for layer in layers})
        if len(prefixes) < len(layers) or len(rank_counts) > 1:
            raise MalformedError(f"the layers of its {LAYERS_ENTRY} do not fit each other", path=file.path)
        return cls(layers, file.path)

    def find_layer(self, name: str) -> AutoEPLayer | None:
        """The layer with ``name`` among the tensors of its experts; None if there is none."""
        return next((layer for layer in self.layers if name.startswith(layer.expert_prefix)), None)

    def list_expert_tensors(self, model: ModelStates) -> list[str]:
        """Names of the tensors of experts. Raises MalformedError if the first dim of one is not the number of experts
        of a rank."""
        shapes = {**model.trainable, **model.frozen_shapes}
        layer_by_name = {name: layer for name in shapes if (layer := self.find_layer(name))}
        for name, layer in layer_by_name.items():
            if shapes[name][:1] != (layer.num_local_experts,):
                raise MalformedError(
                    f"its shape is {list(shapes[name])}, but a rank has {layer.num_local_experts} experts",
                    path=self.path,
                    key=name,
                )
        return list(layer_by_name)

    def add_all_experts(self, model: ModelStates, tables: Mapping[str, ShardTable] | None = None) -> ModelStates:
        """``model``, that of rank 0, with the experts of all ranks. Their tensors in ``module`` are empty, as those of
        parameters are in stage 3: readers take ``tables`` if they are in files of their own, or else the masters."""
        if not self.layers:
            return model
        names = self.list_expert_tensors(model)
        if tables is None:
            dtypes = dict.fromkeys(names, _find_training_dtype(model))
        else:
            dtypes = {name: tables[name].dtype for name in names}
        experts = {
            name: StoredTensor(StorageRef.of_elements("", dtype, 0), dtype, 0, (0,), (1,))
            for name, dtype in dtypes.items()
        }
        return replace(
            model,
            module=dict(self._insert_experts(model, experts)),
            param_shapes=tuple(self._expand_shapes(shapes) for shapes in model.param_shapes),
            frozen_shapes=self._expand_shapes(model.frozen_shapes),
            ties={**model.ties, **dict(self._find_router_ties(model))},
        )

    def _expand_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        return {
            name: (layer.num_experts, *shape[1:]) if (layer := self.find_layer(name)) else shape
            for name, shape in shapes.items()
        }

    def _insert_experts(self, model: ModelStates, experts: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Value]]:
        """The values of ``module``, each layer's followed by the layer's experts. Raises MalformedError if a layer has
        no value there."""
        last_name_by_module = {
            layer.module_name: name
            for name in model.module
            for layer in self.layers
            if name.startswith(f"{layer.module_name}.")
        }
        if len(last_name_by_module) < len(self.layers):
            raise MalformedError(f"a layer of its {LAYERS_ENTRY} is not in module", path=self.path)
        layer_after_name = {last_name_by_module[layer.module_name]: layer for layer in self.layers}
        for name, value in model.module.items():
            yield name, value
            if name in layer_after_name:
                layer = layer_after_name[name]
                yield from ((key, each) for key, each in experts.items() if self.find_layer(key) is layer)

    def _find_router_ties(self, model: ModelStates) -> Iterator[tuple[str, str]]:
        """Pairs of alias and owner: the second name of each tensor of a router, and its first."""
        known_names = {*model.trainable, *model.frozen_shapes, *model.ties}
        for layer in self.layers:
            for name in model.module:
                child, _, suffix = name.removeprefix(f"{layer.module_name}.").partition(".")
                owner = f"{layer.module_name}.router.{suffix}"
                if (
                    name.startswith(f"{layer.module_name}.")
                    and child != "router"
                    and suffix
                    and owner in model.module
                    and name not in known_names
                ):
                    yield name, owner


def _parse_layer(entry: Value, path: str) -> AutoEPLayer:
    """The layer that an entry of ``ds_autoep_layers`` describes. Raises FormatError if it is malformed."""
    values = as_dict(entry)
    number_entries = ("moe_layer_id", "num_experts", "num_local_experts", "ep_size", "ep_rank")
    numbers: Any = [values.get(name) for name in number_entries]
    module_name, expert_prefix = values.get("module_path"), values.get("expert_key_prefix")
    if not are_naturals(numbers) or not isinstance(module_name, str) or not isinstance(expert_prefix, str):
        raise MalformedError(f"its {LAYERS_ENTRY} has no numbers of experts", path=path)
    number, num_experts, num_local_experts, num_ranks, rank = numbers
    if not num_local_experts or num_local_experts * num_ranks != num_experts or rank >= num_ranks:
        raise MalformedError(
            f"its {LAYERS_ENTRY} has {num_local_experts} of {num_experts} experts on each of {num_ranks} ranks",
            path=path,
        )
    if not _is_even_placement(values.get("expert_placement"), num_local_experts, num_ranks):
        why = "its experts are not distributed in equal runs (expert_placement)"
        raise UnsupportedError(why, path=path, key=expert_prefix)
    return AutoEPLayer(number, module_name, f"{expert_prefix}.", num_local_experts, num_ranks, rank)


def _is_even_placement(placement: Value, num_local_experts: int, num_ranks: int) -> bool:
    """Whether rank e has the e-th run of experts. Files without a placement are of versions that had no other."""
    if placement is None:
        return True
    starts = range(0, num_ranks * num_local_experts, num_local_experts)
    even = [{"rank": e, "experts": list(range(at, at + num_local_experts))} for e, at in enumerate(starts)]
    return isinstance(placement, dict) and placement.get("version") == 1 and placement.get("ranks") == even


def _find_training_dtype(model: ModelStates) -> DType:
    """The dtype of the trained weights. Raises UnsupportedError if they have several."""
    dtypes = {value.dtype for name in model.trainable if isinstance(value := model.module.get(name), StoredTensor)}
    if len(dtypes) != 1:
        why = "no file states the dtype of its experts, and its weights have several"
        raise UnsupportedError(why, path=model.file.path)
    return dtypes.pop()
