"""The members of the groups of Megatron's optimizer, which are stored without them. Pure.

Megatron makes groups by a rule: no weight decay for biases and for parameters of one dim, and experts apart
(megatron-core 0.16.1, optimizer/__init__.py, ``get_standard_config_overrides``, ``_get_param_groups``). A group says
of itself what it is: ``wd_mult``, ``is_expert_parallel``. NeMo has put ``pre_`` in front of such names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
