"""Items of a DCP, each a torch zip of its own.

The bytes of a tensor item but for its elements and their checksums follow from shape and dtype, so that the items of a
shape share one template: a checkpoint of a million chunks has a few hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.boxes import Box, Shape, contiguous_strides
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Crc32, Payload, Segment, merge_literals
from ckpt_tools.core.manifest import StateKey, TensorEntry, TensorRef
from ckpt_tools.core.value_refs import replace_tensor_refs
from ckpt_tools.core.values import StorageRef, StoredTensor
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.serialization.torch_zip import make_archive_segments

_PLACEHOLDER_KEY = StateKey("")


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Segments of an item as if its file began with it."""

    segments: tuple[Segment, ...]
    num_bytes: int
    checksum_positions: tuple[int, ...]
    """Positions of the checksums among the segments."""
    payload_position: int | None
    """Position of the first payload."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> DcpItem:
        segments = tuple(merge_literals(segments))
        payloads = [position for position, segment in enumerate(segments) if isinstance(segment, Payload)]
        return cls(
            segments,
            sum(segment.num_bytes for segment in segments),
            tuple(position for position, segment in enumerate(segments) if isinstance(segment, Crc32)),
            payloads[0] if payloads else None,
        )

    def segments_at(self, base: int) -> list[Segment]:
        """The segments where the item starts at byte ``base``."""
        segments = list(self.segments)
        for position in self.checksum_positions:
            crc = segments[position]
            assert isinstance(crc, Crc32)
            segments[position] = Crc32(base + crc.start, base + crc.stop)
        return segments

    def segments_with(self, payload: Payload, base: int) -> list[Segment]:
        """The segments at ``base``, with ``payload`` in the place of the only one in them; an empty tensor has none."""
        segments = self.segments_at(base)
        if self.payload_position is not None:
            segments[self.payload_position] = payload
        return segments


@dataclass(slots=True)
class ItemFactory:
    """Makes items of the tensors of a manifest, and of objects; equal ones are the same."""

    tensors: Mapping[StateKey, TensorEntry]
    _templates: dict[tuple[Shape, DType], DcpItem] = field(default_factory=dict)
    _objects: dict[bytes, DcpItem] = field(default_factory=dict)

    def make_tensor_item(self, shape: Shape, dtype: DType) -> DcpItem:
        """The template of a chunk."""
        template = self._templates.get((shape, dtype))
        if template is None:
            chunk = [Payload(_PLACEHOLDER_KEY, Box.whole(shape), shape, dtype)]
            template = DcpItem.of(make_archive_segments(_make_stored_tensor("0", shape, dtype), {"0": chunk}))
            self._templates[shape, dtype] = template
        return template

    def make_object_item(self, value: Any) -> DcpItem:
        """The item of an object; tensors inside it are stored with it."""
        storages: dict[str, list[Segment]] = {}

        def store_tensor(ref: TensorRef) -> StoredTensor:
            entry = self.tensors[ref.key]
            key = str(len(storages))
            storages[key] = [Payload(ref.key, Box.whole(entry.shape), entry.shape, entry.dtype)]
            return _make_stored_tensor(key, entry.shape, entry.dtype)

        value = replace_tensor_refs(value, store_tensor)
        if storages:
            return DcpItem.of(make_archive_segments(value, storages))
        pickle = dumps(value)
        if pickle not in self._objects:
            self._objects[pickle] = DcpItem.of(make_archive_segments(value, {}))
        return self._objects[pickle]


def _make_stored_tensor(key: str, shape: Shape, dtype: DType) -> StoredTensor:
    numel = Box.whole(shape).numel
    return StoredTensor(StorageRef.of_elements(key, dtype, numel), dtype, 0, shape, contiguous_strides(shape))
