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
from ckpt_tools.serialization.pickle.load import dumps
from ckpt_tools.serialization.torch_zip import make_archive_segments

_ANY = StateKey("")


@dataclass(frozen=True, slots=True)
class Item:
    """Segments of an item as if its file began with it."""

    segments: tuple[Segment, ...]
    num_bytes: int
    checksums: tuple[int, ...]
    """Positions of the checksums among the segments."""
    payload: int | None
    """Position of the first payload."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Item:
        segments = tuple(merge_literals(segments))
        payloads = [position for position, segment in enumerate(segments) if isinstance(segment, Payload)]
        return cls(
            segments,
            sum(segment.num_bytes for segment in segments),
            tuple(position for position, segment in enumerate(segments) if isinstance(segment, Crc32)),
            payloads[0] if payloads else None,
        )

    def at(self, base: int) -> list[Segment]:
        """The segments where the item starts at byte ``base``."""
        found = list(self.segments)
        for position in self.checksums:
            crc = found[position]
            assert isinstance(crc, Crc32)
            found[position] = Crc32(base + crc.start, base + crc.stop)
        return found

    def holding(self, payload: Payload, base: int) -> list[Segment]:
        """The segments at ``base``, with ``payload`` in the place of the only one in them; an empty tensor has none."""
        found = self.at(base)
        if self.payload is not None:
            found[self.payload] = payload
        return found


@dataclass(slots=True)
class Items:
    """Makes items of the tensors of a manifest, and of objects; equal ones are the same."""

    tensors: Mapping[StateKey, TensorEntry]
    _templates: dict[tuple[Shape, DType], Item] = field(default_factory=dict)
    _objects: dict[bytes, Item] = field(default_factory=dict)

    def tensor(self, shape: Shape, dtype: DType) -> Item:
        """The template of a chunk."""
        found = self._templates.get((shape, dtype))
        if found is None:
            chunk = [Payload(_ANY, Box.whole(shape), shape, dtype)]
            found = Item.of(make_archive_segments(_stored("0", shape, dtype), {"0": chunk}))
            self._templates[shape, dtype] = found
        return found

    def object(self, value: Any) -> Item:
        """The item of an object; tensors inside it are stored with it."""
        storages: dict[str, list[Segment]] = {}

        def stored(ref: TensorRef) -> StoredTensor:
            entry = self.tensors[ref.key]
            key = str(len(storages))
            storages[key] = [Payload(ref.key, Box.whole(entry.shape), entry.shape, entry.dtype)]
            return _stored(key, entry.shape, entry.dtype)

        value = replace_tensor_refs(value, stored)
        if storages:
            return Item.of(make_archive_segments(value, storages))
        pickle = dumps(value)
        if pickle not in self._objects:
            self._objects[pickle] = Item.of(make_archive_segments(value, {}))
        return self._objects[pickle]


def _stored(key: str, shape: Shape, dtype: DType) -> StoredTensor:
    numel = Box.whole(shape).numel
    return StoredTensor(StorageRef.of_elements(key, dtype, numel), dtype, 0, shape, contiguous_strides(shape))
