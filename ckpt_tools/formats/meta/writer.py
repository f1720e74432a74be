"""A model as Meta's files, one for each rank of model parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tools.core.boxes import Box, Shape, contiguous_strides
from ckpt_tools.core.layout import FileLayout, Layout, Literal, Payload, Segment
from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.core.values import OrderedDict, StorageRef, StoredTensor
from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.flat_names import weights_by_name
from ckpt_tools.formats.meta.names import EMBEDDING, PARAMS, axis_of, file_name
from ckpt_tools.formats.meta.params import params_json
from ckpt_tools.serialization.torch_zip import get_archive_root, make_archive_segments

_FIRST_OF_LLAMA_3 = 100_000
"""Llama 1 and 2 and Code Llama have 32,000 or 32,016 tokens, and Llama 3 has 128,256."""


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    names, notes = weights_by_name(manifest, "Meta's format")
    ranks = options.world_size
    axes = {name: _axis(name, manifest.tensors[key].shape, ranks) for name, key in names.items()}
    files = [_file(manifest, names, axes, rank, ranks) for rank in range(ranks)]
    params = params_json(options.model_config)
    if params is None:
        why = "it is made of config.json, and none with all sizes was found"
        return Layout(tuple(files), (*notes, Note(Outcome.MISSING, PARAMS, why)))
    return Layout((FileLayout(PARAMS, (Literal(params),)), *files), notes)


def _axis(name: str, shape: Shape, ranks: int) -> int | None:
    """The axis along which ``ranks`` ranks cut a tensor of ``shape``. Raises UnsupportedError."""
    if ranks == 1:
        return None
    axis = axis_of(name, shape, None) if name != EMBEDDING else int(shape[0] < _FIRST_OF_LLAMA_3)
    if axis is not None and shape[axis] % ranks:
        size = format_count(shape[axis], "row" if axis == 0 else "column")
        raise UnsupportedError(f"its {size} cannot be cut evenly for {ranks} ranks", key=name)
    return axis


def _file(
    manifest: Manifest, names: Mapping[str, StateKey], axes: Mapping[str, int | None], rank: int, ranks: int
) -> FileLayout:
    value, segments = dict[str, Any](), dict[str, list[Segment]]()
    for name, box in _boxes(manifest, names, axes, rank, ranks):
        entry, number = manifest.tensors[names[name]], str(len(segments))
        storage = StorageRef.of_elements(number, entry.dtype, box.numel)
        value[name] = StoredTensor(storage, entry.dtype, 0, box.shape, contiguous_strides(box.shape))
        segments[number] = [Payload(names[name], box, entry.shape, entry.dtype)]
    path = file_name(rank)
    return FileLayout(path, tuple(make_archive_segments(OrderedDict(value), segments, root=get_archive_root(path))))


def _boxes(
    manifest: Manifest, names: Mapping[str, StateKey], axes: Mapping[str, int | None], rank: int, ranks: int
) -> Iterator[tuple[str, Box]]:
    """The part of each tensor that a rank has."""
    for name, key in names.items():
        shape, axis = manifest.tensors[key].shape, axes[name]
        if axis is None:
            yield name, Box.whole(shape)
            continue
        step = shape[axis] // ranks
        start = tuple(rank * step if each == axis else 0 for each in range(len(shape)))
        stop = tuple((rank + 1) * step if each == axis else size for each, size in enumerate(shape))
        yield name, Box(start, stop)
