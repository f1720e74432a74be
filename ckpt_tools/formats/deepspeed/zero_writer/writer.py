"""A manifest as a native ZeRO checkpoint for any number of ranks.

The files of a rank are made on demand: a thousand ranks of a thousand parameters are millions of intervals, and a
conversion works through the files one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileLayoutCache, FileSpec, Layout, LazyFile, Literal
from ckpt_tools.core.limits import check_ranks_by_elements
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.formats.deepspeed.common.tags import validate_tag
from ckpt_tools.formats.deepspeed.names import (
    LATEST,
    model_file_name,
    optim_file_name,
    rank_model_file_name,
    split_expert_name,
)
from ckpt_tools.formats.deepspeed.zero_writer.files import (
    GroupOptimWriter,
    ParamOptimWriter,
    PartitionedModelWriter,
    WholeModelWriter,
    ZeroTarget,
)
from ckpt_tools.state_tree.frozen_or_buffer import note_guesses


def layout(manifest: Manifest, options: WriteOptions, stage: int) -> Layout:
    """Raises UnsupportedError if the weights have no dtype that DeepSpeed trains in; UsageError for a tag that cannot
    name a folder, or for too many ranks."""
    check_ranks_by_elements(manifest, options.world_size)
    target = ZeroTarget.of(manifest, stage, options.world_size)
    tag = validate_tag(options.tag or target.extras.tag, latest_file=LATEST)
    state = target.state
    notes = [*state.notes, *target.extras.notes]
    if stage == 3:  # Only this stage stores frozen parameters and buffers in different ways.
        notes += note_guesses(state.guessed_names, state.frozen, state.buffers)
    if any(split_expert_name(key.fqn) for key in manifest.tensors):
        why = (
            "they are in the model's file, and a job with deepspeed.moe stops without files of experts; load it in a "
            "model of the same names without deepspeed.moe, or convert to universal"
        )
        notes.append(Note(Outcome.KEPT, "experts", why))
    return Layout(ZeroFiles.of(tag, target).list_files(), tuple(notes), uncast_buffers=state.buffers.keys())


@dataclass(frozen=True, slots=True)
class ZeroFiles:
    """The files of a checkpoint by number: first the model's, then the optimizer's of each rank. ``latest``, which
    makes the checkpoint valid, is the last file and has no number."""

    tag: str
    target: ZeroTarget
    model_writer: WholeModelWriter | PartitionedModelWriter
    optim_writer: GroupOptimWriter | ParamOptimWriter

    @classmethod
    def of(cls, tag: str, target: ZeroTarget) -> ZeroFiles:
        if target.stage == 3:
            return cls(tag, target, PartitionedModelWriter(target), ParamOptimWriter(target))
        return cls(tag, target, WholeModelWriter(target), GroupOptimWriter(target))

    def list_files(self) -> list[FileSpec]:
        """All files in order; those of ranks are made on demand."""
        cache = FileLayoutCache(self.build_file)
        numbers = range(self.num_model_files + self.target.world_size)
        rank_files = [
            LazyFile(self._make_path(n), cache.get_layout(self._find_same_size_file(n)).size_bytes, n, cache)
            for n in numbers
        ]
        return [*rank_files, FileLayout(LATEST, (Literal(self.tag.encode()),))]

    def build_file(self, number: int) -> FileLayout:
        path = self._make_path(number)
        if number >= self.num_model_files:
            return self.optim_writer.build_file(path, number - self.num_model_files)
        return self.model_writer.build_file(path, number)

    @property
    def num_model_files(self) -> int:
        return self.target.world_size if isinstance(self.model_writer, PartitionedModelWriter) else 1

    def _find_same_size_file(self, number: int) -> int:
        """The number of a file of the same size, which is built in place of this one to know its size.

        In stage 3 the files of ranks differ in their elements, and in size only by the number of digits of the rank in
        their names, which the zip repeats, and in that rank 0 names the ties. So rank 0, 1, 10, 100 ... are built.
        """
        if self.target.stage < 3:
            return number
        first = self.num_model_files if number >= self.num_model_files else 0
        rank = number - first
        return first + (10 ** (len(str(rank)) - 1) if rank else 0)

    def _make_path(self, number: int) -> str:
        rank = number - self.num_model_files
        if rank >= 0:  # engine.py _get_zero_ckpt_prefix
            prefix = "bf16_" if self.target.state.dtype is DType.BFLOAT16 else ""
            return f"{self.tag}/{prefix}{optim_file_name(rank)}"
        is_partitioned = isinstance(self.model_writer, PartitionedModelWriter)
        return f"{self.tag}/{rank_model_file_name(number) if is_partitioned else model_file_name()}"
