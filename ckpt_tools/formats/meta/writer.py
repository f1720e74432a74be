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
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.flat_names import collect_weights_by_name
from ckpt_tools.formats.meta.names import EMBEDDING, PARAMS_FILE, find_cut_axis, make_file_name
from ckpt_tools.formats.meta.params import build_params_json
from ckpt_tools.messages.loading_code import escape_braces, quote_literal
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.torch_zip import get_archive_root, make_archive_segments

_FIRST_OF_LLAMA_3 = 100_000
"""Llama 1 and 2 and Code Llama have 32,000 or 32,016 tokens, and Llama 3 has 128,256."""


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    keys_by_name, notes = collect_weights_by_name(manifest, "Meta's format")
    num_ranks = options.world_size
    axes = {name: _choose_cut_axis(name, manifest.tensors[key].shape, num_ranks) for name, key in keys_by_name.items()}
    files = [_build_rank_file(manifest, keys_by_name, axes, rank, num_ranks) for rank in range(num_ranks)]
    params = build_params_json(options.model_config)
    if params is None:
        why = "it is made of config.json, and none with all sizes was found"
        return Layout(tuple(files), (*notes, Note(Outcome.MISSING, PARAMS_FILE, why)))
    return Layout((FileLayout(PARAMS_FILE, (Literal(params),)), *files), notes)


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    name, ranks = quote_literal(f"{path}/consolidated.00.pth"), ""
    if options.world_size > 1:
        name = f"f{quote_literal(f'{escape_braces(path)}/consolidated.{{rank:02d}}.pth')}"
        ranks = f"  # rank is 0 to {options.world_size - 1}"
    return f"import torch\nstate_dict = torch.load({name}, weights_only=True){ranks}"


def _choose_cut_axis(name: str, shape: Shape, num_ranks: int) -> int | None:
    """The axis along which ``num_ranks`` ranks cut a tensor of ``shape``. Raises UnsupportedError."""
    if num_ranks == 1:
        return None
    axis = find_cut_axis(name, shape, None) if name != EMBEDDING else int(shape[0] < _FIRST_OF_LLAMA_3)
    if axis is not None and shape[axis] % num_ranks:
        size = format_count(shape[axis], "row" if axis == 0 else "column")
        raise UnsupportedError(f"its {size} cannot be cut evenly for {num_ranks} ranks", key=name)
    return axis


def _build_rank_file(
    manifest: Manifest, keys_by_name: Mapping[str, StateKey], axes: Mapping[str, int | None], rank: int, num_ranks: int
) -> FileLayout:
    state_dict, segments = dict[str, Any](), dict[str, list[Segment]]()
    for name, box in _iter_rank_boxes(manifest, keys_by_name, axes, rank, num_ranks):
        entry, number = manifest.tensors[keys_by_name[name]], str(len(segments))
        storage = StorageRef.of_elements(number, entry.dtype, box.numel)
        state_dict[name] = StoredTensor(storage, entry.dtype, 0, box.shape, contiguous_strides(box.shape))
        segments[number] = [Payload(keys_by_name[name], box, entry.shape, entry.dtype)]
    path = make_file_name(rank)
    return FileLayout(
        path, tuple(make_archive_segments(OrderedDict(state_dict), segments, root=get_archive_root(path)))
    )


def _iter_rank_boxes(
    manifest: Manifest, keys_by_name: Mapping[str, StateKey], axes: Mapping[str, int | None], rank: int, num_ranks: int
) -> Iterator[tuple[str, Box]]:
    """The part of each tensor that a rank has."""
    for name, key in keys_by_name.items():
        shape, axis = manifest.tensors[key].shape, axes[name]
        if axis is None:
            yield name, Box.whole(shape)
            continue
        step = shape[axis] // num_ranks
        start = tuple(rank * step if each == axis else 0 for each in range(len(shape)))
        stop = tuple((rank + 1) * step if each == axis else size for each, size in enumerate(shape))
        yield name, Box(start, stop)
