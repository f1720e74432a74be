"""A manifest as a native ZeRO checkpoint for any number of ranks.

The files of a rank are made when they are asked for: a thousand ranks of a thousand parameters are millions of
intervals, and a conversion works through the files one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

from ckpt_tools.dtypes import DType
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.base import WriteOptions
from ckpt_tools.formats.zero_writer.config import Settings
from ckpt_tools.formats.zero_writer.extras import Extras
from ckpt_tools.formats.zero_writer.model_states import ModelFiles
from ckpt_tools.formats.zero_writer.optim_states import FlatGroup, OptimFiles
from ckpt_tools.formats.zero_writer.partition import GroupCut, ParamCut, dealt, sub_groups
from ckpt_tools.formats.zero_writer.state import MAX_NAMES, Group, TrainingState
from ckpt_tools.layout import FileLayout, Layout, Literal
from ckpt_tools.ledger import Fate, Note
from ckpt_tools.manifest import Manifest

MAX_FILES_KEPT = 16
"""Files of the layout kept after they were asked for. Tasks work through them in order, so that as many as there are
workers are in use; one of 1,000 parameters with three vectors takes 1 MB."""


@dataclass(frozen=True, slots=True)
class ZeroWriter:
    """Writes what DeepSpeed's ``load_checkpoint`` resumes in ZeRO ``stage`` 1, 2 or 3 on ``world_size`` ranks."""

    stage: int
    holds_optimizer: bool = field(default=True, init=False)
    holds_masters: bool = field(default=True, init=False)

    @property
    def name(self) -> str:
        return f"zero{self.stage}"

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        """Raises UnsupportedError where the weights have no type that DeepSpeed trains in; UsageError for a tag that
        is no folder's name."""
        state = TrainingState.of(manifest)
        extras = Extras.of(manifest, state.dtype)
        settings = Settings.of(extras.config, self.stage, state.dtype)
        flat_groups = tuple(_flat_groups(state.groups, settings, self.stage, options.world_size))
        groups = tuple(flat.group for flat in flat_groups)
        files = ZeroFiles(
            _checked_tag(options.tag or extras.tag),
            ModelFiles(state, extras, groups, self.stage, options.world_size),
            OptimFiles(state, extras, flat_groups, self.stage, options.world_size),
        )
        return Layout(files, (*state.notes, *extras.notes, *_guess_notes(state, self.stage)))


def _checked_tag(tag: str) -> str:
    if tag in ("", ".", "..", "latest") or any(character in tag for character in "/\\\0\n"):
        raise UsageError(f"--tag {tag!r} is no name for the folder of a checkpoint")
    return tag


def _flat_groups(groups: Sequence[Group], settings: Settings, stage: int, world_size: int) -> list[FlatGroup]:
    """The vectors of a rank: one a param group, or in stage 3 one a sub-group."""
    if stage == 3:
        return [
            flat for number, group in enumerate(groups) for flat in _sub_groups(group, number, settings, world_size)
        ]
    if settings.is_dealt:
        groups = [group.picked(dealt(len(group.params), world_size)) for group in groups]
    return [FlatGroup(group, GroupCut.of(group.numels, world_size), n) for n, group in enumerate(groups)]


def _sub_groups(group: Group, number: int, settings: Settings, world_size: int) -> list[FlatGroup]:
    shares = ParamCut.of(group.numels, world_size).shares.tolist()
    parts = [group.picked(positions) for positions in sub_groups(shares, settings.sub_group_size)]
    return [FlatGroup(part, ParamCut.of(part.numels, world_size), number) for part in parts]


def _guess_notes(state: TrainingState, stage: int) -> list[Note]:
    """Only stage 3 stores frozen parameters and buffers in different ways."""
    if stage < 3 or not state.guessed:
        return []
    frozen = [name for name in state.guessed if name in state.frozen]
    buffers = [name for name in state.guessed if name in state.buffers]
    why = "the source does not tell frozen parameters from buffers, so their names and places decided"
    return [
        Note(Fate.DEFAULTED, f"{', '.join(names[:MAX_NAMES])} taken for {what}", why, len(names))
        for names, what in ((frozen, "frozen parameters"), (buffers, "buffers"))
        if names
    ]


@dataclass(frozen=True, slots=True)
class ZeroFiles(Sequence[FileLayout]):
    """The files of a checkpoint in order: the model's, the optimizer's, and ``latest``, which makes it valid."""

    tag: str
    model: ModelFiles
    optim: OptimFiles
    _kept: dict[int, FileLayout] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_model_files(self) -> int:
        return self.model.world_size if self.model.stage == 3 else 1

    def __len__(self) -> int:
        return self.num_model_files + self.optim.world_size + 1

    @overload
    def __getitem__(self, index: int) -> FileLayout: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FileLayout]: ...
    def __getitem__(self, index: int | slice) -> FileLayout | Sequence[FileLayout]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self._file(number) for number in numbers]
        return self._file(numbers)

    def _file(self, number: int) -> FileLayout:
        """Made, or kept from before. Threads may make one twice, and never see a half of one."""
        found = self._kept.get(number)
        if found is None:
            found = self._kept[number] = self._made(number)
            for old in list(self._kept)[:-MAX_FILES_KEPT]:
                self._kept.pop(old, None)
        return found

    def _made(self, number: int) -> FileLayout:
        if number == len(self) - 1:
            return FileLayout("latest", (Literal(self.tag.encode()),))
        rank = number - self.num_model_files
        if rank >= 0:
            return self.optim.file(f"{self.tag}/{self._prefix}{_rank(rank)}_optim_states.pt", rank)
        name = f"{_rank(number)}_model_states.pt" if self.model.stage == 3 else "mp_rank_00_model_states.pt"
        return self.model.file(f"{self.tag}/{name}", number)

    @property
    def _prefix(self) -> str:
        """engine.py ``_get_zero_ckpt_prefix``: optimizer files of bf16 runs alone have one."""
        return "bf16_" if self.model.state.dtype is DType.BFLOAT16 else ""


def _rank(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00"
