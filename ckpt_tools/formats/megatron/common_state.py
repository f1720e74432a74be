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
from ckpt_tools.formats.foreign import classes_in
from ckpt_tools.formats.megatron.names import is_expert, num_dims

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained parameter: its name, how many dims it is stored in, and its optimizer's number, where that is known."""

    name: str
    stored_dims: int
    chain: int | None

    def decays(self, *, also_norms: bool) -> bool:
        is_norm = also_norms and any(part in self.name for part in ("q_layernorm.", "k_layernorm."))
        return is_norm or (num_dims(self.name, self.stored_dims) != 1 and not self.name.endswith(".bias"))


@dataclass(frozen=True, slots=True)
class Group:
    """A group as it is stored, of the optimizer number ``chain``."""

    chain: int
    options: Options

    @property
    def decays(self) -> bool:
        return bool(self._said("wd_mult", 1.0) != 0)

    @property
    def is_expert(self) -> bool:
        return self._said("is_expert_parallel", False) is True

    @property
    def is_plain(self) -> bool:
        """Whether it has no learning rate of its own: there is no rule for the parameters of such groups."""
        return self._said("lr_mult", 1.0) == 1 and self._said("is_decoupled_lr", False) is False

    def _said(self, name: str, default: Any) -> Any:
        return self.options.get(name, self.options.get(f"pre_{name}", default))


def by_rule(
    groups: Sequence[Group], parameters: Sequence[Parameter], *, decays_norms: bool = False
) -> list[list[str]] | None:
    """The members of each group by Megatron's rule; None where the groups are not those that the rule makes."""
    if len(groups) == 1:
        return [[each.name for each in parameters]]
    if not all(group.is_plain for group in groups):
        return None
    by_decay, by_expert = len({group.decays for group in groups}) > 1, len({group.is_expert for group in groups}) > 1
    members: list[list[str]] = [[] for _ in groups]
    for each in parameters:
        fitting = [
            number
            for number, group in enumerate(groups)
            if each.chain in (None, group.chain)
            and (not by_decay or group.decays == each.decays(also_norms=decays_norms))
            and (not by_expert or group.is_expert == is_expert(each.name))
        ]
        if len(fitting) != 1:
            return None
        members[fitting[0]].append(each.name)
    return members


NAMESPACE = GlobalRef("argparse", "Namespace")

FULLY_RESHARDABLE = "fully_reshardable"
SHARDING = "param_state_sharding_type"
CONTENT = "content_metadata"


@dataclass(frozen=True, slots=True)
class CommonState:
    """The value of ``common.pt``, or of the item that took its place. ``where`` names it in messages."""

    values: Mapping[Any, Value]
    where: str

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
    def chains(self) -> list[tuple[int, dict[Any, Value]]]:
        """The tree of each optimizer, by number. Raises MalformedError."""
        found = self.values.get("optimizer")
        if found is None:
            return []
        numbered = dict(enumerate(found)) if isinstance(found, list) else found
        if not isinstance(numbered, dict) or not numbered:
            raise self._wrong("its optimizer", found)
        trees = numbered if all(type(key) is int for key in numbered) else {0: numbered}
        for tree in trees.values():
            if not isinstance(tree, dict):
                raise self._wrong("one of its optimizers", tree)
        return sorted(trees.items())

    @property
    def sharding(self) -> str | None:
        """Sharding type of the distributed optimizer, megatron-core's own term; None if it is not recorded."""
        found = [tree.get(SHARDING) for _, tree in self.chains]
        return next((each for each in found if isinstance(each, str)), None)

    @property
    def groups(self) -> list[Group]:
        """Every group of every optimizer, in order. Raises MalformedError."""
        return [Group(number, options) for number, tree in self.chains for options in self._groups(tree)]

    def _groups(self, tree: Mapping[Any, Value]) -> list[dict[Any, Value]]:
        found = inner_tree(tree).get("param_groups", [])
        if not isinstance(found, list) or not all(isinstance(group, dict) for group in found):
            raise self._wrong("its param_groups", found)
        return found

    def step(self, group: Group) -> Value:
        """The step of a group's parameters: a number, a ``TensorRef``, or None."""
        inner = inner_tree(dict(self.chains)[group.chain])
        state = inner.get("state")
        found = group.options.get("step", state.get("common_step") if isinstance(state, dict) else None)
        if isinstance(found, TensorRef) or (type(found) in (int, float) and abs(found) < 1 << 53):
            return found
        return None

    @property
    def rest(self) -> dict[Any, Value]:
        """The entries that have no place in a manifest; in the trees of optimizers the number of groups stands for the
        groups."""
        known = ("iteration", "checkpoint_version")
        found = {name: value for name, value in self.values.items() if name not in known}
        if "optimizer" in found:
            found["optimizer"] = {
                number: with_groups(tree, lambda groups: len(groups) if isinstance(groups, list) else 0)
                for number, tree in self.chains
            }
        return found

    def _wrong(self, what: str, found: Value) -> MalformedError:
        return MalformedError(
            f"{what} is {format_brief(found)}, which is not that of a Megatron optimizer", path=self.where
        )


def inner_tree(tree: Mapping[Any, Value]) -> Mapping[Any, Value]:
    """The state dict of torch's optimizer inside that of Megatron's."""
    found = tree.get("optimizer")
    return found if "param_groups" not in tree and isinstance(found, dict) else tree


def with_groups(tree: Mapping[Any, Value], make: Callable[[Value], Value]) -> dict[Any, Value]:
    """``tree`` with ``make(param_groups)`` in place of ``param_groups``."""
    inner = inner_tree(tree)
    made = {**inner, "param_groups": make(inner.get("param_groups"))}
    return made if inner is tree else {**tree, "optimizer": made}


_NAMES: Mapping[str, str] = {
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

_KNOWN = frozenset(GlobalRef(module, name) for module, names in _NAMES.items() for name in names.split())


def is_loadable(value: Value) -> bool:
    return all(ref.dtype is not None or ref in _KNOWN for ref in classes_in(value))


def loadable(values: Mapping[Any, Value]) -> tuple[dict[Any, Value], list[str]]:
    """``values`` without what is not loadable, and the names of that; of ``args`` each argument is looked at."""
    found, lost = dict(values), []
    for name, value in values.items():
        if isinstance(value, Opaque) and value.ref == NAMESPACE:
            kept = {each: item for each, item in value.attributes.items() if is_loadable(item)}
            lost += [f"{name}.{each}" for each in value.attributes if each not in kept]
            found[name] = Opaque(NAMESPACE, form="new", state=kept)
        elif not is_loadable(value):
            lost.append(str(name))
            del found[name]
    return found, lost
