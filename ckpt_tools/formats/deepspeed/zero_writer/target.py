"""What is to be written: the training state, its extras, and its parameters as they are flattened at one stage on so
many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.values import Value
from ckpt_tools.formats.deepspeed.common.partition import GroupCut, ParamCut, round_robin_order, sub_groups
from ckpt_tools.formats.deepspeed.common.training_state import Group, TrainingState
from ckpt_tools.formats.deepspeed.common.written_extras import Extras, Settings, adapted


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters in the order in which they are flattened, how they are shared out, and the number of their param
    group."""

    group: Group
    cut: GroupCut | ParamCut
    number: int


@dataclass(frozen=True, slots=True)
class Target:
    """``flat_groups`` are a rank's vectors: one a param group, or in stage 3 one a sub-group. ``has_whole_momentum``
    says that Muon's are of whole parameters."""

    state: TrainingState
    extras: Extras
    flat_groups: tuple[FlatGroup, ...]
    stage: int
    world_size: int
    has_whole_momentum: bool = False

    @classmethod
    def of(cls, manifest: Manifest, stage: int, world_size: int) -> Target:
        """Raises FormatError as ``TrainingState.of`` says."""
        state = TrainingState.of(manifest)
        extras = Extras.of(manifest, state.dtype)
        settings = Settings.of(extras.config, stage, state.dtype)
        cut = _cut_params if stage == 3 else _cut_groups
        flat_groups = tuple(cut(state.groups, settings, world_size))
        return cls(state, extras, flat_groups, stage, world_size, settings.has_whole_momentum)

    @property
    def config(self) -> dict[str, Value]:
        """The DeepSpeed config to record."""
        return adapted(self.extras.config, self.stage, self.state.dtype)


def _cut_groups(groups: Sequence[Group], settings: Settings, world_size: int) -> list[FlatGroup]:
    if settings.is_round_robin:
        groups = [group.picked(round_robin_order(len(group.params), world_size)) for group in groups]
    return [FlatGroup(group, GroupCut.of(group.numels, world_size), n) for n, group in enumerate(groups)]


def _cut_params(groups: Sequence[Group], settings: Settings, world_size: int) -> list[FlatGroup]:
    found = []
    for number, group in enumerate(groups):
        shares = ParamCut.of(group.numels, world_size).shares.tolist()
        parts = [group.picked(positions) for positions in sub_groups(shares, settings.sub_group_size)]
        found += [FlatGroup(part, ParamCut.of(part.numels, world_size), number) for part in parts]
    return found
