"""Names, ties and parallel sizes of a model file, as the readers of ZeRO and of universal both need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import StateKey, TensorEntry
from ckpt_tools.core.values import StoredTensor, Value, as_dict
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import ModelStates
from ckpt_tools.formats.deepspeed.names import split_expert_name

KeyedEntries = Iterator[tuple[StateKey, TensorEntry]]


def check_parameter_names(model: ModelStates) -> None:
    """Raises IncompleteError if a parameter that trains is not in ``module``."""
    missing = model.trainable.keys() - model.module.keys()
    if missing:
        raise IncompleteError(
            "it is in param_shapes but not in module: it was lost, or a hook of the model gives it another name in "
            "state_dict(), and nothing says which; save a checkpoint of the model without the hook",
            path=model.file.path,
            key=min(missing),
        )


def check_experts(model: ModelStates) -> None:
    """Checks a model that is read without files of experts. Raises IncompleteError if the run has ``deepspeed.moe``
    layers and not all experts are in the model's file, where ckpt-tools writes them and DeepSpeed does not;
    UnsupportedError if the run is of AutoEP."""
    if model.file.content.get("ds_autoep_layers") or model.file.content.get("autoep_layers"):
        why = "it is of a run with experts (AutoEP) of a kind that is not supported"
        raise UnsupportedError(why, path=model.file.path)
    expert_counts = model.file.content.get("num_experts")
    numbers = [count for count in expert_counts if type(count) is int] if isinstance(expert_counts, list) else []
    saved_experts = {parts[:2] for name in model.module if (parts := split_expert_name(name))}
    if len(saved_experts) < sum(numbers):
        raise IncompleteError(
            f"it is of a run with {sum(numbers)} experts and has {len(saved_experts)} of them, and there are no files "
            "of experts (layer_0_expert_0_mp_rank_00_model_states.pt) beside it",
            path=model.file.path,
        )


def check_model_parts(model: ModelStates, num_parts: int) -> None:
    """Raises FormatError if the run cut its model into another number of parts than ``num_parts``, the number of files:
    IncompleteError if parts are missing, MalformedError if there are too many."""
    expected_parts = count_model_parts(model.file.content)
    reason, path = f"the model is cut into {expected_parts} parts, and there are files of {num_parts}", model.file.path
    if expected_parts > num_parts:
        raise IncompleteError(f"{reason}: mp_rank_{num_parts:02d} is missing", path=path)
    if expected_parts < num_parts:
        raise MalformedError(f"{reason}, perhaps from an earlier save", path=path)


def count_model_parts(content: Mapping[Any, Any]) -> int:
    """The tensor-parallel ranks times the stages of the pipeline, as a model file states them; 1 if it does not."""
    size, degrees = content.get("mp_world_size"), as_dict(content.get("checkpoint_parallel_dimensions")).values()
    return max(size if type(size) is int else 1, prod(degree for degree in degrees if type(degree) is int))


def find_aliases(model: ModelStates, are_tied: Callable[[str, StoredTensor, StoredTensor], bool]) -> Mapping[str, str]:
    """Owners of tied parameters, by alias: those that DeepSpeed saw, and views of the same elements.

    ``are_tied(alias, alias_tensor, owner_tensor)`` confirms a tie that DeepSpeed saw: it compares addresses, which
    empty tensors and views of other shapes may share too. Of several views of the same elements one that trains is the
    owner, and otherwise the first in ``module``.
    """
    trainable, module = model.trainable, model.module
    owner_by_alias = {
        alias: owner
        for alias, owner in model.ties.items()
        if alias not in trainable
        and isinstance(one := module.get(alias), StoredTensor)
        and isinstance(other := module.get(owner), StoredTensor)
        and are_tied(alias, one, other)
    }
    owner_by_view: dict[object, str] = {}
    parameters = [name for name in module if name not in model.buffers]
    for name in sorted(parameters, key=lambda name: name not in trainable):
        owner = owner_by_view.setdefault(_make_view_key(name, module[name], model.find_value_file(name).path), name)
        if owner != name and name not in trainable:
            owner_by_alias.setdefault(name, owner)
    return {alias: owner_by_alias.get(owner, owner) for alias, owner in owner_by_alias.items()}


def _make_view_key(name: str, value: Value, path: str) -> object:
    """A key that two tied parameters share; the name alone for one without elements."""
    if not isinstance(value, StoredTensor) or not value.numel or value.storage is None:
        return name
    return path, value.storage.key, value.dtype, value.storage_offset, tuple(value.shape), tuple(value.strides)


def make_shape_error(model: ModelStates, name: str, value: StoredTensor, shape: Shape) -> MalformedError:
    """The error for a parameter with one shape in ``module`` and another in ``param_shapes``."""
    return MalformedError(
        f"its shape is {list(value.shape)} in module and {list(shape)} in param_shapes",
        path=model.find_value_file(name).path,
        key=name,
    )


def is_round_robin(model: ModelStates) -> bool:
    """Whether the config sets ``round_robin_gradients``, which only stage_1_and_2.py supports."""
    return bool(get_zero_option(model, "round_robin_gradients"))


def get_zero_option(model: ModelStates, name: str) -> Value:
    """An option of ``zero_optimization`` in the run's config; None if it has no such option."""
    return as_dict(as_dict(model.file.content.get("ds_config")).get("zero_optimization")).get(name)
