"""The files of experts that AutoEP distributed, as tensors that have a row for each expert.

Stages 0, 1 and 2 have a file for each expert. Stage 3 has the experts in the partitions alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates
from ckpt_tools.formats.deepspeed.common.fused_experts import AutoEPLayer, AutoEPLayers
from ckpt_tools.formats.deepspeed.names import expert_file_name
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import ExpertFiles
from ckpt_tools.stores.source import Source


def read_expert_weights(
    source: Source, ep_layers: AutoEPLayers, model: ModelStates, files: ExpertFiles, expert_rank: int | None = None
) -> dict[str, ShardTable]:
    """The shards of the tensors of experts by name: of all experts' rows, or of those of ``expert_rank``. Raises
    FormatError if a file is missing or is not of its expert."""
    shapes = {**model.trainable, **model.frozen_shapes}
    names = ep_layers.list_expert_tensors(model)
    tables: dict[str, ShardTable] = {}
    expected_experts = {(layer.moe_number, number) for layer in ep_layers.layers for number in range(layer.num_experts)}
    if missing_experts := expected_experts - files.weight_paths.keys():
        path = files.prefix + expert_file_name(*min(missing_experts))
        raise IncompleteError("the file of this expert is missing", path=path)
    if unexpected_experts := files.weight_paths.keys() - expected_experts:
        raise MalformedError(
            "there is no such expert; this file is perhaps from an earlier save",
            path=files.weight_paths[min(unexpected_experts)],
        )
    # Row i of a tensor is in the file of expert i, or with ``expert_rank`` in that of the rank's i-th expert.
    for layer in ep_layers.layers:
        layer_names = [name for name in names if ep_layers.find_layer(name) is layer]
        numbers, num_local = range(layer.num_experts), layer.num_local_experts
        if expert_rank is not None:
            numbers = numbers[expert_rank * num_local : (expert_rank + 1) * num_local]
        expert_files = [DeepSpeedFile.open(source, files.weight_paths[layer.moe_number, number]) for number in numbers]
        numbered_files = zip(numbers, expert_files, strict=True)
        parts = [_read_expert(file, number, layer, layer_names) for number, file in numbered_files]
        for name in layer_names:
            shape = (len(numbers), *shapes[name][1:])
            tables[name] = _stack_experts(shape, [each[name] for each in parts], expert_files, name)
    return tables


def _read_expert(file: DeepSpeedFile, number: int, layer: AutoEPLayer, names: Sequence[str]) -> dict[str, StoredTensor]:
    """The tensors of expert ``number`` by the names in the model: ``experts.w1`` for ``experts.w1.3`` in the file."""
    value_by_name = {f"{name}.{number}": file.content.get(f"{name}.{number}") for name in names}
    parts = {name.rpartition(".")[0]: value for name, value in value_by_name.items() if isinstance(value, StoredTensor)}
    if file.content.keys() != value_by_name.keys() or len(parts) < len(names):
        raise MalformedError(f"it does not hold expert {number} of {layer.module_name} alone", path=file.path)
    return parts


def _stack_experts(
    shape: tuple[int, ...], parts: Sequence[StoredTensor], files: Sequence[DeepSpeedFile], name: str
) -> ShardTable:
    """The shards of a tensor of ``shape`` whose row i is ``parts[i]`` in ``files[i]``."""
    shards = []
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        if tuple(part.shape) != shape[1:] or part.dtype is not parts[0].dtype or not part.is_contiguous:
            raise MalformedError(f"its {name} is not as param_shapes states", path=file.path)
        start = file.find_start_byte(part)
        box = Box((number, *(0,) * (len(shape) - 1)), (number + 1, *shape[1:]))
        shards.append(Shard(box, ByteRange(file.path, start, start + part.numel * part.dtype.item_bytes)))
    return ShardTable.build(shape, parts[0].dtype, shards)
