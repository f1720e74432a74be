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
from ckpt_tools.format.base import WriteOptions
from ckpt_tools.format.zero_writer.model_states import CutModel, WholeModel
from ckpt_tools.format.zero_writer.optim_states import GroupCutOptim, ParamCutOptim
from ckpt_tools.format.zero_writer.slots import listed
from ckpt_tools.format.zero_writer.state import TrainingState
from ckpt_tools.format.zero_writer.target import Target
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
        target = Target.of(manifest, self.stage, options.world_size)
        tag = _checked_tag(options.tag or target.extras.tag)
        files = ZeroFiles.of(tag, target)
        return Layout(files, (*target.state.notes, *target.extras.notes, *_guess_notes(target.state, self.stage)))


def _checked_tag(tag: str) -> str:
    if tag in ("", ".", "..", "latest") or any(character in tag for character in "/\\\0\n"):
        raise UsageError(f"--tag {tag!r} is no name for the folder of a checkpoint")
    return tag


def _guess_notes(state: TrainingState, stage: int) -> list[Note]:
    """Only stage 3 stores frozen parameters and buffers in different ways."""
    if stage < 3 or not state.guessed:
        return []
    frozen = [name for name in state.guessed if name in state.frozen]
    buffers = [name for name in state.guessed if name in state.buffers]
    why = "the source does not tell frozen parameters from buffers, so their names and places decided"
    return [
        Note(Fate.DEFAULTED, f"{listed(names)} taken for {what}", why, len(names))
        for names, what in ((frozen, "frozen parameters"), (buffers, "buffers"))
        if names
    ]


@dataclass(frozen=True, slots=True)
class ZeroFiles(Sequence[FileLayout]):
    """The files of a checkpoint in order: the model's, the optimizer's, and ``latest``, which makes it valid."""

    tag: str
    target: Target
    model: WholeModel | CutModel
    optim: GroupCutOptim | ParamCutOptim
    _kept: dict[int, FileLayout] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, tag: str, target: Target) -> ZeroFiles:
        if target.stage == 3:
            return cls(tag, target, CutModel(target), ParamCutOptim(target))
        return cls(tag, target, WholeModel(target), GroupCutOptim(target))

    @property
    def num_model_files(self) -> int:
        return self.target.world_size if isinstance(self.model, CutModel) else 1

    def __len__(self) -> int:
        return self.num_model_files + self.target.world_size + 1

    @overload
    def __getitem__(self, index: int) -> FileLayout: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FileLayout]: ...
    def __getitem__(self, index: int | slice) -> FileLayout | Sequence[FileLayout]:
        if isinstance(index, slice):
            return [self._file(number) for number in range(len(self))[index]]
        return self._file(range(len(self))[index])

    def _file(self, number: int) -> FileLayout:
        """Made, or kept from before. Two threads may both make one, and see whole ones only."""
        found = self._kept.get(number)
        if found is None:
            found = self._kept[number] = self._made(number)
            for old in list(self._kept)[:-MAX_FILES_KEPT]:
                self._kept.pop(old, None)
        return found

    def _made(self, number: int) -> FileLayout:
        if number == len(self) - 1:
            return FileLayout("latest", (Literal(self.tag.encode()),))
        if number < self.num_model_files:
            return self._model_file(number)
        rank = number - self.num_model_files
        return self.optim.file(f"{self.tag}/{self._prefix}{_of_rank(rank)}_optim_states.pt", rank)

    def _model_file(self, rank: int) -> FileLayout:
        if isinstance(self.model, CutModel):
            return self.model.file(f"{self.tag}/{_of_rank(rank)}_model_states.pt", rank)
        return self.model.file(f"{self.tag}/mp_rank_00_model_states.pt")

    @property
    def _prefix(self) -> str:
        """engine.py ``_get_zero_ckpt_prefix``: optimizer files of bf16 runs alone have one."""
        return "bf16_" if self.target.state.dtype is DType.BFLOAT16 else ""


def _of_rank(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00"
