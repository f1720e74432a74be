"""The experts of a run with ``deepspeed.moe`` layers: their files, and their names among all experts of a layer.

Every rank of an expert-parallel group has other experts, under the same names: a rank numbers its own from 0. The files
of experts have the numbers among all (engine.py ``_save_moe_checkpoint``), and so has the model that one rank would
hold alone. Rank 0 states parameters and buffers in its own numbers. Expert-parallel rank e has the numbers ``e * n`` to
``e * n + n - 1`` of a layer, if each rank has n of its experts.

AutoEP has tensors with a row for each expert instead, under one name. In stages 0, 1 and 2 each expert has a file too,
with its row of each; in stage 3 the experts are in the partitions alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.values import StoredTensor, Value, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates
from ckpt_tools.formats.deepspeed.common.fused_experts import AutoEPLayer, AutoEPLayers
from ckpt_tools.formats.deepspeed.names import EXPERT_INFIX, MAX_EXPERTS, expert_file_name, split_expert_name
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import ExpertFiles
from ckpt_tools.stores.source import Source

# deepspeed.moe

LayerFiles = Mapping[str, tuple[DeepSpeedFile, ...]]
"""The files of each layer's experts, in the order of their numbers, by the start of the names of their tensors."""


@dataclass(frozen=True, slots=True)
class MoEExperts:
    """The files of all experts, and the number of each layer's experts that a rank has, by the prefix of the layer."""

    files: LayerFiles
    num_local_experts: Mapping[str, int]

    def count_expert_ranks(self, prefix: str) -> int:
        """Number of expert-parallel ranks of a layer."""
        return len(self.files[prefix]) // self.num_local_experts[prefix]

    def list_names(self, rank: int | None = None) -> frozenset[str]:
        """Names of the tensors of all experts, or of those of expert-parallel rank ``rank``."""
        names: set[str] = set()
        for prefix, files in self.files.items():
            count = self.num_local_experts[prefix]
            own_files = files if rank is None else files[rank * count : (rank + 1) * count]
            names.update(str(name) for file in own_files for name in file.content)
        return frozenset(names)

    def make_whole_name(self, name: str, rank: int) -> str:
        """The name, with the number among all experts, of the tensor that expert-parallel rank ``rank`` calls
        ``name``."""
        name_parts = split_expert_name(name)
        if name_parts is None:
            return name
        prefix, number, suffix = name_parts
        return f"{prefix}{rank * self.num_local_experts[prefix] + number}.{suffix}"

    def expand_names(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Pairs of the local name and the whole name of every tensor of all ranks, in the order of a model that has all
        experts; ``names`` are the local ones of rank 0."""
        name_pairs: list[tuple[str, str]] = []
        for prefix, run in groupby(names, _find_expert_prefix):
            local_names = list(run)
            ranks = range(1 if prefix is None else self.count_expert_ranks(prefix))
            name_pairs += [(name, self.make_whole_name(name, rank)) for rank in ranks for name in local_names]
        return name_pairs

    def add_all_experts(self, model: ModelStates) -> ModelStates:
        """``model``, that of rank 0, with the experts of all ranks. Raises FormatError if a buffer is in no file, or if
        a tie joins an expert to a tensor that is not one."""
        values = list(self._list_values(model))
        module = {name: value for name, value, _ in values}
        buffers = self._expand_buffers(model, module)
        return replace(
            model,
            module=module,
            value_files={name: file for name, _, file in values},
            buffers=buffers,
            param_shapes=tuple(
                {whole: shapes[name] for name, whole in self.expand_names(shapes)} for shapes in model.param_shapes
            ),
            frozen_shapes={whole: model.frozen_shapes[name] for name, whole in self.expand_names(model.frozen_shapes)},
            ties={
                alias: owner for pair in model.ties.items() for alias, owner in self._expand_tie(pair, model.file.path)
            },
        )

    def _list_values(self, model: ModelStates) -> Iterator[tuple[str, Value, DeepSpeedFile]]:
        """Name, value and file of everything in the whole model, in its order: the experts of a layer follow its gate.
        Those of layers without a gate come first."""
        last_name_by_prefix = {_find_layer_of_gate(name, self.files): name for name in model.module}
        prefix_after_name = {name: prefix for prefix, name in last_name_by_prefix.items() if prefix is not None}
        values_by_prefix = {
            prefix: [(str(name), value, file) for file in files for name, value in file.content.items()]
            for prefix, files in self.files.items()
        }
        for prefix, values in values_by_prefix.items():
            if prefix not in last_name_by_prefix:
                yield from values
        for name, value in model.module.items():
            yield name, value, model.file
            if name in prefix_after_name:
                yield from values_by_prefix[prefix_after_name[name]]

    def _expand_buffers(self, model: ModelStates, module: Mapping[str, Value]) -> frozenset[str]:
        buffers = {name for name in model.buffers if split_expert_name(name) is None}
        for prefix, rest in {(parts[0], parts[2]) for name in model.buffers if (parts := split_expert_name(name))}:
            buffers.update(f"{prefix}{number}.{rest}" for number in range(len(self.files[prefix])))
        if missing := buffers - module.keys():
            raise IncompleteError("no file contains this buffer", path=model.file.path, key=min(missing))
        return frozenset(buffers)

    def _expand_tie(self, tie: tuple[str, str], path: str) -> Iterator[tuple[str, str]]:
        """The same tie on every expert-parallel rank."""
        prefixes = [_find_expert_prefix(name) for name in tie]
        ranks = {1 if prefix is None else self.count_expert_ranks(prefix) for prefix in prefixes}
        if prefixes[0] is None and max(ranks) > 1:
            why = "it is tied to a tensor of an expert, which differs from rank to rank"
            raise UnsupportedError(why, path=path, key=tie[0])
        for rank in range(max(ranks)):
            yield self.make_whole_name(tie[0], rank), self.make_whole_name(tie[1], rank)


def _find_expert_prefix(name: str) -> str | None:
    name_parts = split_expert_name(name)
    return name_parts[0] if name_parts else None


def _find_layer_of_gate(name: str, prefixes: Container[str]) -> str | None:
    """The prefix of the experts whose layer has the value ``name`` beside them, as a gate's weight; None for others."""
    head, infix, _ = name.rpartition(".deepspeed_moe.")
    prefix = head + EXPERT_INFIX
    return prefix if infix and prefix in prefixes else None


def open_expert_layers(source: Source, model: ModelStates, files: ExpertFiles) -> LayerFiles:
    """The files of all experts, by the prefix of their names. Raises FormatError if one is missing or damaged, or is
    not of its layer or number."""
    expert_counts = _read_expert_counts(model)
    expected_experts = {(layer, number) for layer, count in enumerate(expert_counts) for number in range(count)}
    if missing_experts := expected_experts - files.weight_paths.keys():
        layer, number = min(missing_experts)
        raise IncompleteError(
            f"the file of this expert is missing; layer {layer} has {expert_counts[layer]}",
            path=files.prefix + expert_file_name(layer, number),
        )
    if unexpected_experts := files.weight_paths.keys() - expected_experts:
        layer, number = min(unexpected_experts)
        path, num_layers = files.weight_paths[layer, number], len(expert_counts)
        is_layer = layer < num_layers
        has = f"layer {layer} has {expert_counts[layer]} experts" if is_layer else f"there are {num_layers} layers"
        raise MalformedError(f"{has}; this file is perhaps from an earlier save", path=path)
    files_by_prefix: dict[str, tuple[DeepSpeedFile, ...]] = {}
    experts = [(layer, number) for layer, count in enumerate(expert_counts) for number in range(count)]
    opened_files = source.map_files(DeepSpeedFile.open, [files.weight_paths[each] for each in experts])
    for count in expert_counts:
        own_files = tuple(islice(opened_files, count))
        prefix = _find_prefix(own_files)
        if prefix in files_by_prefix:
            raise MalformedError("two layers have experts of this name", path=own_files[0].path, key=prefix)
        files_by_prefix[prefix] = own_files
    return files_by_prefix


def _read_expert_counts(model: ModelStates) -> list[int]:
    """``num_experts``: for each layer the number of experts of all ranks. Raises UnsupportedError if it is not a
    list."""
    counts = model.file.content.get("num_experts")
    if not isinstance(counts, list) or not all(type(count) is int and 0 < count <= MAX_EXPERTS for count in counts):
        raise UnsupportedError(
            f"its num_experts is {format_brief(counts)}, but DeepSpeed 0.6 and later list the experts of each "
            "layer; load the run in such a version and save it",
            path=model.file.path,
            key="num_experts",
        )
    return counts


def _find_prefix(files: Sequence[DeepSpeedFile]) -> str:
    """The prefix of the layer whose experts are in ``files``. Raises MalformedError if a file has other names or shapes
    than that of the first expert."""
    first_description = _describe_expert(files[0], 0)
    prefix = next(iter(first_description), ("", ""))[0]
    for number, file in enumerate(files):
        description = _describe_expert(file, number)
        if {name for name, _ in description} != {prefix} or not prefix:
            raise MalformedError("it does not hold one expert of one layer", path=file.path)
        if description != first_description:
            _, rest = min(description.items() ^ first_description.items())[0]
            raise MalformedError(f"its {rest} is not as that of {files[0].path}", path=file.path)
    return prefix


def _describe_expert(file: DeepSpeedFile, number: int) -> dict[tuple[str, str], str]:
    """Shape and dtype of each tensor, as text, by the prefix of its layer and the end of its name. Raises
    MalformedError if one is of an expert of another number than ``number``."""
    description: dict[tuple[str, str], str] = {}
    for name, value in file.content.items():
        parts = split_expert_name(name) if isinstance(name, str) else None
        if parts is None or EXPERT_INFIX in parts[0].removesuffix(EXPERT_INFIX) or parts[1] != number:
            raise MalformedError(f"it is the file of expert {number}, but has {format_brief(name)}", path=file.path)
        is_tensor = isinstance(value, StoredTensor)
        description[parts[0], parts[2]] = f"{tuple(value.shape)} {value.dtype.value}" if is_tensor else "a value"
    return description


def count_local_experts(layers: LayerFiles, model: ModelStates, num_ranks: Mapping[str, int]) -> dict[str, int]:
    """The number of rank 0's experts by layer. ``num_ranks`` has the number of expert-parallel ranks of layers that
    train. Raises FormatError if the names of rank 0 are not those of its experts."""
    numbers_by_prefix: dict[str, set[int]] = {prefix: set() for prefix in layers}
    names = (*model.trainable, *model.frozen_shapes, *model.buffers, *model.ties, *model.ties.values())
    for prefix, number, _ in filter(None, map(split_expert_name, names)):
        if prefix not in numbers_by_prefix:
            message = "no file of an expert (layer_0_expert_0_...) is of this layer"
            raise IncompleteError(message, path=model.file.path, key=prefix)
        numbers_by_prefix[prefix].add(number)
    counts: dict[str, int] = {}
    for prefix, expert_numbers in numbers_by_prefix.items():
        num_experts, ranks = len(layers[prefix]), num_ranks.get(prefix)
        # If no name of rank 0 has the layer, any number will do: there is nothing to rename.
        count = (len(expert_numbers) or num_experts) if ranks is None else num_experts // ranks
        if (
            not count
            or num_experts % count
            or (ranks is not None and count * ranks != num_experts)
            or expert_numbers - set(range(count))
        ):
            raise MalformedError(
                f"rank 0 has the experts {format_brief(sorted(expert_numbers))} of {num_experts}, which are spread "
                f"over {ranks} ranks",
                path=model.file.path,
                key=prefix,
            )
        counts[prefix] = count
    return counts


# AutoEP


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
        paths = [files.weight_paths[layer.moe_number, number] for number in numbers]
        expert_files = list(source.map_files(DeepSpeedFile.open, paths))
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
