"""The common state, which is the same on every rank, and the groups of the optimizer in it.

It has ``iteration``, ``args`` (an ``argparse.Namespace``), ``content_metadata`` and ``optimizer``. The optimizer is a
tree of one of three forms, or a dict or list of such trees by number, where several are chained:

- ``{"param_groups", "state": {"common_step"}}``: parameters in fp32;
- ``{"optimizer": {"param_groups", "state": {"common_step"}}, "fp32_from_fp16_params"}``: 16-bit parameters;
- ``{"optimizer": {"param_groups"}, "param_state_sharding_type"}``: the distributed optimizer, whose groups have
  ``step``.

Groups are stored without their members. Megatron makes them by a rule: no weight decay for biases and for parameters of
one dim, and experts apart (megatron-core 0.16.1, optimizer/__init__.py, ``get_standard_config_overrides``,
``_get_param_groups``). A group states what it is: ``wd_mult``, ``is_expert_parallel``. NeMo has put ``pre_`` in front
of such names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.manifest import TensorRef
from ckpt_tools.core.values import GlobalRef, Opaque, Value, format_brief
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.megatron.tensor_names import count_dims, is_expert
from ckpt_tools.state_tree.incomplete_state import iter_global_refs

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A trained parameter: its name, how many dims it is stored in, and its optimizer's number, where that is known."""

    name: str
    stored_dims: int
    optimizer_number: int | None

    def does_decay(self, *, also_norms: bool) -> bool:
        is_norm = also_norms and any(part in self.name for part in ("q_layernorm.", "k_layernorm."))
        return is_norm or (count_dims(self.name, self.stored_dims) != 1 and not self.name.endswith(".bias"))


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as it is stored, of the optimizer number ``optimizer_number``."""

    optimizer_number: int
    options: Options

    @property
    def does_decay(self) -> bool:
        return bool(self._get_option("wd_mult", 1.0) != 0)

    @property
    def is_expert(self) -> bool:
        return self._get_option("is_expert_parallel", False) is True

    @property
    def is_plain(self) -> bool:
        """Whether it has no learning rate of its own: there is no rule for the parameters of such groups."""
        return self._get_option("lr_mult", 1.0) == 1 and self._get_option("is_decoupled_lr", False) is False

    def _get_option(self, name: str, default: Any) -> Any:
        return self.options.get(name, self.options.get(f"pre_{name}", default))


def assign_members_by_rule(
    groups: Sequence[StoredGroup], parameters: Sequence[TrainedParameter], *, decays_norms: bool = False
) -> list[list[str]] | None:
    """The members of each group by Megatron's rule; None where the groups are not those that the rule makes."""
    if len(groups) == 1:
        return [[each.name for each in parameters]]
    if not all(group.is_plain for group in groups):
        return None
    splits_by_decay = len({group.does_decay for group in groups}) > 1
    splits_by_expert = len({group.is_expert for group in groups}) > 1
    members: list[list[str]] = [[] for _ in groups]
    for parameter in parameters:
        fitting_groups = [
            number
            for number, group in enumerate(groups)
            if parameter.optimizer_number in (None, group.optimizer_number)
            and (not splits_by_decay or group.does_decay == parameter.does_decay(also_norms=decays_norms))
            and (not splits_by_expert or group.is_expert == is_expert(parameter.name))
        ]
        if len(fitting_groups) != 1:
            return None
        members[fitting_groups[0]].append(parameter.name)
    return members


NAMESPACE = GlobalRef("argparse", "Namespace")

FULLY_RESHARDABLE = "fully_reshardable"
SHARDING_TYPE_KEY = "param_state_sharding_type"
CONTENT_KEY = "content_metadata"


@dataclass(frozen=True, slots=True)
class CommonState:
    """The value of ``common.pt``, or of the item that took its place. ``label`` names it in messages."""

    values: Mapping[Any, Value]
    label: str

    @classmethod
    def of(cls, value: Value, where: str) -> CommonState:
        if not isinstance(value, dict):
            raise MalformedError("it does not hold the dict of a common state", path=where)
        return cls(value, where)

    @property
    def iteration(self) -> int | None:
        found = self.values.get("iteration")
        return found if type(found) is int and found >= 0 else None

    @property
    def args(self) -> Mapping[str, Value]:
        """The run's arguments by name; none where there are none, or in another form."""
        found = self.values.get("args")
        return found.attributes if isinstance(found, Opaque) and found.ref == NAMESPACE else {}

    @property
    def optimizer_trees(self) -> list[tuple[int, dict[Any, Value]]]:
        """The tree of each optimizer, by number. Raises MalformedError."""
        optimizer = self.values.get("optimizer")
        if optimizer is None:
            return []
        numbered = dict(enumerate(optimizer)) if isinstance(optimizer, list) else optimizer
        if not isinstance(numbered, dict) or not numbered:
            raise self._make_malformed_error("its optimizer", optimizer)
        trees = numbered if all(type(key) is int for key in numbered) else {0: numbered}
        for tree in trees.values():
            if not isinstance(tree, dict):
                raise self._make_malformed_error("one of its optimizers", tree)
        return sorted(trees.items())

    @property
    def sharding_type(self) -> str | None:
        """Sharding type of the distributed optimizer, megatron-core's own term; None if it is not recorded."""
        found = [tree.get(SHARDING_TYPE_KEY) for _, tree in self.optimizer_trees]
        return next((each for each in found if isinstance(each, str)), None)

    @property
    def groups(self) -> list[StoredGroup]:
        """Every group of every optimizer, in order. Raises MalformedError."""
        groups: list[StoredGroup] = []
        for number, tree in self.optimizer_trees:
            stored = get_inner_tree(tree).get("param_groups", [])
            if not isinstance(stored, list) or not all(isinstance(options, dict) for options in stored):
                raise self._make_malformed_error("its param_groups", stored)
            groups += (StoredGroup(number, options) for options in stored)
        return groups

    def get_step(self, group: StoredGroup) -> Value:
        """The step of a group's parameters: a number, a ``TensorRef``, or None."""
        inner = get_inner_tree(dict(self.optimizer_trees)[group.optimizer_number])
        state = inner.get("state")
        step_value = group.options.get("step", state.get("common_step") if isinstance(state, dict) else None)
        if isinstance(step_value, TensorRef) or (type(step_value) in (int, float) and abs(step_value) < 1 << 53):
            return step_value
        return None

    @property
    def unplaced_entries(self) -> dict[Any, Value]:
        """The entries that have no place in a manifest; in the trees of optimizers the number of groups stands for the
        groups."""
        read_names = ("iteration", "checkpoint_version")
        entries = {name: value for name, value in self.values.items() if name not in read_names}
        if "optimizer" in entries:
            entries["optimizer"] = {
                number: replace_groups(tree, lambda groups: len(groups) if isinstance(groups, list) else 0)
                for number, tree in self.optimizer_trees
            }
        return entries

    def _make_malformed_error(self, what: str, found: Value) -> MalformedError:
        return MalformedError(
            f"{what} is {format_brief(found)}, which is not that of a Megatron optimizer", path=self.label
        )


def get_inner_tree(tree: Mapping[Any, Value]) -> Mapping[Any, Value]:
    """The state dict of torch's optimizer inside that of Megatron's."""
    found = tree.get("optimizer")
    return found if "param_groups" not in tree and isinstance(found, dict) else tree


def replace_groups(tree: Mapping[Any, Value], make: Callable[[Value], Value]) -> dict[Any, Value]:
    """``tree`` with ``make(param_groups)`` in place of ``param_groups``."""
    inner = get_inner_tree(tree)
    new_inner = {**inner, "param_groups": make(inner.get("param_groups"))}
    return new_inner if inner is tree else {**tree, "optimizer": new_inner}


_LOADABLE_NAMES: Mapping[str, str] = {
    "types": "SimpleNamespace",
    "pathlib": "PosixPath",
    "numpy.core.multiarray": "_reconstruct",
    "numpy._core.multiarray": "_reconstruct",
    "numpy": "ndarray dtype",
    "numpy.dtypes": "UInt32DType",
    "_codecs": "encode",
    "argparse": "Namespace",
    "megatron.core.enums": "ModelType",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.core.transformer.enums": "AttnBackend CudaGraphScope",
    "_io": "BytesIO",
    "signal": "Signals",
}
"""The classes that Megatron's loader unpickles (megatron-core 0.16.1, ``safe_globals.py``), and those that torch adds
for arrays of numpy. Others would make the output unloadable, and might be a hidden call, so that they are dropped."""

_LOADABLE_GLOBALS = frozenset(
    GlobalRef(module, name) for module, names in _LOADABLE_NAMES.items() for name in names.split()
)


def is_loadable(value: Value) -> bool:
    return all(ref.dtype is not None or ref in _LOADABLE_GLOBALS for ref in iter_global_refs(value))


def drop_unloadable(values: Mapping[Any, Value]) -> tuple[dict[Any, Value], list[str]]:
    """``values`` without what is not loadable, and the names of that; of ``args`` each argument is looked at."""
    loadable_values, dropped_names = dict(values), []
    for name, value in values.items():
        if isinstance(value, Opaque) and value.ref == NAMESPACE:
            kept_arguments = {each: item for each, item in value.attributes.items() if is_loadable(item)}
            dropped_names += [f"{name}.{each}" for each in value.attributes if each not in kept_arguments]
            loadable_values[name] = Opaque(NAMESPACE, form="new", state=kept_arguments)
        elif not is_loadable(value):
            dropped_names.append(str(name))
            del loadable_values[name]
    return loadable_values, dropped_names
