"""A manifest as a native ZeRO checkpoint for any number of ranks.

The files of a rank are made on demand: a thousand ranks of a thousand parameters are millions of intervals, and a
conversion works through the files one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileLayoutCache, FileSpec, Layout, LazyFile, Literal
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.core.rank_limits import check_ranks_by_elements
from ckpt_tools.formats.deepspeed.common.tags import written_tag
from ckpt_tools.formats.deepspeed.names import LATEST, model_name, optim_name, rank_model_name, split_expert
from ckpt_tools.formats.deepspeed.zero_writer.files import CutModel, GroupCutOptim, ParamCutOptim, Target, WholeModel
from ckpt_tools.formats.state_dict.frozen_or_buffer import note_guesses


def layout(manifest: Manifest, options: WriteOptions, stage: int) -> Layout:
    """Raises UnsupportedError where the weights have no type that DeepSpeed trains in; UsageError for a tag that
    cannot name a folder, or for too many ranks."""
    check_ranks_by_elements(manifest, options.world_size)
    target = Target.of(manifest, stage, options.world_size)
    tag = written_tag(options.tag or target.extras.tag, latest=LATEST)
    state = target.state
    notes = [*state.notes, *target.extras.notes]
    if stage == 3:  # Only this stage stores frozen parameters and buffers in different ways.
        notes += note_guesses(state.guessed, state.frozen, state.buffers)
    if any(split_expert(key.fqn) for key in manifest.tensors):
        why = (
            "they are in the model's file, and a job with deepspeed.moe stops without files of experts; load it in a "
            "model of the same names without deepspeed.moe, or convert to universal"
        )
        notes.append(Note(Outcome.KEPT, "experts", why))
    return Layout(ZeroFiles.of(tag, target).files(), tuple(notes), uncast_buffers=state.buffers.keys())


@dataclass(frozen=True, slots=True)
class ZeroFiles:
    """The files of a checkpoint by number: the model's, the optimizer's, and ``latest``, which makes it valid."""

    tag: str
    target: Target
    model: WholeModel | CutModel
    optim: GroupCutOptim | ParamCutOptim

    @classmethod
    def of(cls, tag: str, target: Target) -> ZeroFiles:
        if target.stage == 3:
            return cls(tag, target, CutModel(target), ParamCutOptim(target))
        return cls(tag, target, WholeModel(target), GroupCutOptim(target))

    def files(self) -> list[FileSpec]:
        """All files in order; those of ranks are made on demand."""
        cache = FileLayoutCache(self.made)
        numbers = range(self.num_model_files + self.target.world_size)
        ranks = [LazyFile(self._path(n), cache.get_layout(self._like(n)).size_bytes, n, cache) for n in numbers]
        return [*ranks, FileLayout(LATEST, (Literal(self.tag.encode()),))]

    def made(self, number: int) -> FileLayout:
        path = self._path(number)
        if number >= self.num_model_files:
            return self.optim.file(path, number - self.num_model_files)
        return self.model.file(path, number)

    @property
    def num_model_files(self) -> int:
        return self.target.world_size if isinstance(self.model, CutModel) else 1

    def _like(self, number: int) -> int:
        """A file of the same size: in stage 3 ranks differ in their elements and the length of their names alone, and
        rank 0 names the ties."""
        if self.target.stage < 3:
            return number
        first = self.num_model_files if number >= self.num_model_files else 0
        rank = number - first
        return first + (10 ** (len(str(rank)) - 1) if rank else 0)

    def _path(self, number: int) -> str:
        rank = number - self.num_model_files
        if rank >= 0:  # engine.py _get_zero_ckpt_prefix
            prefix = "bf16_" if self.target.state.dtype is DType.BFLOAT16 else ""
            return f"{self.tag}/{prefix}{optim_name(rank)}"
        name = rank_model_name(number) if isinstance(self.model, CutModel) else model_name()
        return f"{self.tag}/{name}"
