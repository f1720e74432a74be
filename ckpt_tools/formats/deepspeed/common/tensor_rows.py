"""The tensors of one file: their records in the pickle, and the segments that are their bytes.

In stage 3 the files of all ranks have the same pickle and differ in elements and in their names alone. Such a file is
made once as a ``FileTemplate`` with holes, and a rank's copy is that form with its holes filled: for a thousand ranks
of a thousand parameters writing the pickles would take longer than everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckpt_tools.core.boxes import Box, Shape, contiguous_strides
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, Padding, Payload, Segment
from ckpt_tools.core.literals import read_literal_number
from ckpt_tools.core.manifest import Manifest, StateKey, TensorEntry
from ckpt_tools.core.value_refs import replace_tensor_refs
from ckpt_tools.core.values import StorageRef, StoredTensor, Value
from ckpt_tools.formats.deepspeed.common.partition import VectorLayout
from ckpt_tools.formats.deepspeed.common.pickled_objects import DS_VERSION
from ckpt_tools.formats.deepspeed.common.training_state import PartitionedSlot, TrainingGroup
from ckpt_tools.formats.deepspeed.common.written_extras import DeepSpeedExtras
from ckpt_tools.serialization.torch_zip import TorchFileContent, get_archive_root, make_archive_segments


@dataclass(slots=True)
class TorchFileBuilder:
    """Builds one file. The ``add_`` methods make storages, in the order of the calls, and return tensors on them, of
    which the caller makes the value that is pickled."""

    manifest: Manifest
    _storages: dict[str, list[Segment]] = field(default_factory=dict)
    _holes: list[str] = field(default_factory=list)

    def build_file(self, path: str, value: Value) -> FileLayout:
        return FileLayout(path, tuple(make_archive_segments(value, self._storages, root=get_archive_root(path))))

    def build_template(self, value: Value) -> FileTemplate:
        """The file of ``value`` with the holes of ``add_hole``."""
        return FileTemplate(TorchFileContent.of(value, self._storages), self._storages, tuple(self._holes))

    def add_tensor(self, segments: Sequence[Segment], dtype: DType, shape: Shape) -> StoredTensor:
        key = str(len(self._storages))
        self._storages[key] = list(segments)
        return StoredTensor(StorageRef.of_elements(key, dtype, prod(shape)), dtype, 0, shape, contiguous_strides(shape))

    def add_whole_tensor(self, key: StateKey, entry: TensorEntry) -> StoredTensor:
        payload = Payload(key, Box.whole(entry.shape), entry.shape, entry.dtype)
        return self.add_tensor([payload], entry.dtype, entry.shape)

    def add_vector(self, vector_layout: VectorLayout, group: TrainingGroup, slot: PartitionedSlot) -> StoredTensor:
        segments = build_vector_segments(list_vector_rows(vector_layout), group, slot)
        return self.add_tensor(segments, slot.dtype, (vector_layout.numel,))

    def add_hole(self, dtype: DType, numel: int) -> StoredTensor:
        """Adds a vector whose elements differ from rank to rank and are filled in for each."""
        self._holes.append(str(len(self._storages)))
        return self.add_tensor([Padding(numel * dtype.item_bytes)], dtype, (numel,))

    def add_scalar(self, key: StateKey) -> Value:
        """Adds a 0-d tensor, unless the source has a plain number, which is then returned."""
        entry = self.manifest.tensors[key]
        number = read_literal_number(self.manifest, entry)
        return self.add_whole_tensor(key, entry) if number is None else number

    def add_referenced_tensors(self, value: Value) -> Value:
        """``value`` with a tensor in the place of each reference to one."""
        tensors = self.manifest.tensors
        return replace_tensor_refs(value, lambda ref: self.add_whole_tensor(ref.key, tensors[ref.key]))


def make_counters(
    extras: DeepSpeedExtras, builder: TorchFileBuilder, world_size: int, config: Mapping[str, Value]
) -> dict[str, Value]:
    """DeepSpeed's counters and sizes in a model file.

    ``global_samples``, ``data_sampler`` and ``random_ltd`` are absent where the source does not have them: DeepSpeed
    then takes steps times its batch size, and a run with a data sampler or random-LTD resets these. With None it fails.
    """
    entries = {
        "lr_scheduler": extras.lr_scheduler,
        "skipped_steps": 0,
        "global_steps": extras.global_steps,
        **extras.counters,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": dict(config),
        "ds_version": DS_VERSION,
    }
    return {name: builder.add_referenced_tensors(value) for name, value in entries.items()}


@dataclass(frozen=True, slots=True)
class FileTemplate:
    """A file with ``holes``: keys of ``storages`` that each rank replaces by its own segments, of the same number of
    bytes."""

    content: TorchFileContent
    storages: Mapping[str, Sequence[Segment]]
    holes: tuple[str, ...]

    def fill_holes(self, path: str, hole_contents: Sequence[Sequence[Segment]]) -> FileLayout:
        """The file with ``hole_contents`` in its holes, in their order."""
        storages = {**self.storages, **dict(zip(self.holes, hole_contents, strict=True))}
        return FileLayout(path, tuple(self.content.make_segments(storages, root=get_archive_root(path))))


VectorRow = tuple[int, Box, int]
"""A row of a vector: the parameter's position in its group, its elements, the zeros after them."""


def list_vector_rows(vector_layout: VectorLayout) -> list[VectorRow]:
    """The rows of a vector as Python values. All slots share them: a thousand ranks have millions."""
    columns = (vector_layout.params, vector_layout.starts, vector_layout.stops, vector_layout.paddings)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(param, Box((start,), (stop,)), padding) for param, start, stop, padding in rows]


def build_vector_segments(rows: Sequence[VectorRow], group: TrainingGroup, slot: PartitionedSlot) -> list[Segment]:
    """The bytes of a vector of ``slot``: the elements of each row, or zeros for a parameter without state, and then the
    row's padding."""
    segments: list[Segment] = []
    item_bytes = slot.dtype.item_bytes
    for param, box, padding in rows:
        key, numel = slot.keys[param], box.stop[0] - box.start[0]
        if key is not None and numel:
            segments.append(Payload(key, box, (group.numels[param],), slot.dtype))
        zero_elements = padding + (0 if key is not None else numel)
        if zero_elements:
            segments.append(Padding(zero_elements * item_bytes))
    return segments
