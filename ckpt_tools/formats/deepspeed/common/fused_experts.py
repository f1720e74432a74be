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
from ckpt_tools.core.values import StoredTensor, Value, are_naturals, format_brief
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates

LAYERS, OLD_LAYERS = "ds_autoep_layers", "autoep_layers"
LEFT_OUT = (LAYERS, OLD_LAYERS, "num_experts", "universal_checkpoint_info")
"""Entries of a model file that say how the experts are distributed, which is not so after a conversion."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer with experts: ``number`` among those, ``module`` is its name, ``prefix`` what names of its experts start
    with. Each of ``num_ranks`` expert-parallel ranks has ``num_local`` experts; this file is of rank ``rank``."""

    number: int
    module: str
    prefix: str
    num_local: int
    num_ranks: int
    rank: int

    @property
    def num_experts(self) -> int:
        return self.num_local * self.num_ranks


@dataclass(frozen=True, slots=True)
class Fused:
    """All layers with experts of a run; none where AutoEP distributed none."""

    layers: tuple[FusedLayer, ...] = ()
    path: str = ""

    @classmethod
    def of(cls, file: File) -> Fused:
        """Raises FormatError where the layers are malformed, or are distributed in another way than evenly."""
        if file.content.get(OLD_LAYERS):
            raise UnsupportedError(
                f"it is of a first version of AutoEP ({OLD_LAYERS}), which is not supported", path=file.path
            )
        found = file.content.get(LAYERS) or []
        if found and file.content.get("folding") is not None:
            raise UnsupportedError(
                "it is of a run with AutoEP and tensor parallelism, which is not supported; save it without tensor "
                "parallelism",
                path=file.path,
            )
        if not isinstance(found, list):
            raise MalformedError(f"its {LAYERS} is {format_brief(found)}", path=file.path)
        layers = tuple(_layer(each, file.path) for each in found)
        if len({layer.prefix for layer in layers}) < len(layers) or len({layer.num_ranks for layer in layers}) > 1:
            raise MalformedError(f"the layers of its {LAYERS} do not fit each other", path=file.path)
        return cls(layers, file.path)

    def layer_of(self, name: str) -> FusedLayer | None:
        """The layer whose experts ``name`` is of."""
        return next((layer for layer in self.layers if name.startswith(layer.prefix)), None)

    def names(self, model: ModelStates) -> list[str]:
        """The tensors of experts. Raises MalformedError where one is not of this rank's number of experts."""
        shapes = {**model.trainable, **model.frozen_shapes}
        found = {name: layer for name in shapes if (layer := self.layer_of(name))}
        for name, layer in found.items():
            if shapes[name][:1] != (layer.num_local,):
                raise MalformedError(
                    f"its shape is {list(shapes[name])}, but a rank has {layer.num_local} experts",
                    path=self.path,
                    key=name,
                )
        return list(found)

    def whole(self, model: ModelStates, values: Mapping[str, tuple[StoredTensor, File]] | None = None) -> ModelStates:
        """The model of rank 0 with the experts of all ranks. ``values`` stand for those that are in files of their own;
        all others are empty, as stage 3 has them, and are read from the masters."""
        if not self.layers:
            return model
        names = self.names(model)
        values = {name: (_empty(model), model.file) for name in names} if values is None else values
        return replace(
            model,
            module=dict(self._ordered(model, {name: value for name, (value, _) in values.items()})),
            homes={**model.homes, **{name: file for name, (_, file) in values.items()}},
            param_shapes=tuple(self._whole_shapes(shapes) for shapes in model.param_shapes),
            frozen_shapes=self._whole_shapes(model.frozen_shapes),
            ties={**model.ties, **dict(self._ties(model))},
        )

    def _whole_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        found = {name: (shape, self.layer_of(name)) for name, shape in shapes.items()}
        return {name: (layer.num_experts, *shape[1:]) if layer else shape for name, (shape, layer) in found.items()}

    def _ordered(self, model: ModelStates, values: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Value]]:
        """The experts of a layer follow its router."""
        last = {
            layer.module: name for name in model.module for layer in self.layers if name.startswith(f"{layer.module}.")
        }
        if len(last) < len(self.layers):
            raise MalformedError(f"a layer of its {LAYERS} is not in module", path=self.path)
        after = {last[layer.module]: layer for layer in self.layers}
        for name, value in model.module.items():
            yield name, value
            if name in after:
                yield from ((key, each) for key, each in values.items() if self.layer_of(key) is after[name])

    def _ties(self, model: ModelStates) -> Iterator[tuple[str, str]]:
        """The second name of each tensor of a router."""
        known = {*model.trainable, *model.frozen_shapes, *model.ties}
        for layer in self.layers:
            for name in model.module:
                child, _, rest = name.removeprefix(f"{layer.module}.").partition(".")
                owner = f"{layer.module}.router.{rest}"
                if (
                    name.startswith(f"{layer.module}.")
                    and child != "router"
                    and rest
                    and owner in model.module
                    and name not in known
                ):
                    yield name, owner


def _layer(found: Value, path: str) -> FusedLayer:
    """One of ``ds_autoep_layers``."""
    values = found if isinstance(found, dict) else {}
    numbers: Any = [
        values.get(name) for name in ("moe_layer_id", "num_experts", "num_local_experts", "ep_size", "ep_rank")
    ]
    module, prefix = values.get("module_path"), values.get("expert_key_prefix")
    if not are_naturals(numbers) or not isinstance(module, str) or not isinstance(prefix, str):
        raise MalformedError(f"its {LAYERS} has no numbers of experts", path=path)
    number, num_experts, num_local, num_ranks, rank = numbers
    if not num_local or num_local * num_ranks != num_experts or rank >= num_ranks:
        raise MalformedError(
            f"its {LAYERS} has {num_local} of {num_experts} experts on each of {num_ranks} ranks", path=path
        )
    if not _is_even(values.get("expert_placement"), num_local, num_ranks):
        raise UnsupportedError(
            "its experts are not distributed in equal runs (expert_placement)", path=path, key=prefix
        )
    return FusedLayer(number, module, f"{prefix}.", num_local, num_ranks, rank)


def _is_even(placement: Value, num_local: int, num_ranks: int) -> bool:
    """Whether rank e has the e-th run of experts. Files without a placement are of versions that had no other."""
    if placement is None:
        return True
    ranks = placement.get("ranks") if isinstance(placement, dict) else None
    even = [{"rank": e, "experts": list(range(e * num_local, (e + 1) * num_local))} for e in range(num_ranks)]
    return isinstance(placement, dict) and placement.get("version") == 1 and ranks == even


def _empty(model: ModelStates) -> StoredTensor:
    """A tensor without elements, of the dtype of what trains. Raises UnsupportedError if there are several."""
    found = [value for name in model.trainable if isinstance(value := model.module.get(name), StoredTensor)]
    if len({value.dtype for value in found}) != 1:
        raise UnsupportedError(
            "no file states the dtype of its experts, and its weights have several", path=model.file.path
        )
    return replace(found[0], storage_offset=0, shape=(0,), strides=(1,))
