"""The experts of a run with ``deepspeed.moe`` layers: their files, and their names among all experts of a layer.

Every rank of an expert-parallel group has other experts, under the same names: a rank numbers its own from 0. The files
of experts have the numbers among all (engine.py ``_save_moe_checkpoint``), and so has the model that one rank would
hold alone. Rank 0 states parameters and buffers in its own numbers. Expert-parallel rank e has the numbers ``e * n`` to
``e * n + n - 1`` of a layer, if each rank has n of its experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ckpt_tools.core.values import StoredTensor, Value, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates
from ckpt_tools.formats.deepspeed.names import INFIX, expert_name, split_expert
from ckpt_tools.formats.deepspeed.zero_reader.locate import ExpertFiles
from ckpt_tools.stores.source import Source

MAX_EXPERTS = 1 << 20
"""Most experts of one layer, so that a number of a damaged file does not make a list of that length."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts of one layer: ``prefix`` is what their names start with, ``files`` are in the order of numbers."""

    prefix: str
    files: tuple[File, ...]

    @property
    def rests(self) -> list[str]:
        """The ends of the names of each expert's tensors."""
        return [name.removeprefix(f"{self.prefix}0.") for name in map(str, self.files[0].content)]

    def values(self) -> Iterator[tuple[str, Value, File]]:
        for file in self.files:
            yield from ((str(name), value, file) for name, value in file.content.items())


@dataclass(frozen=True, slots=True)
class Experts:
    """All layers with experts by their prefix, and how many of each layer's experts a rank has."""

    layers: Mapping[str, Layer]
    num_local: Mapping[str, int]

    def num_ranks(self, prefix: str) -> int:
        """Expert-parallel ranks of a layer."""
        return len(self.layers[prefix].files) // self.num_local[prefix]

    def whole_name(self, name: str, rank: int) -> str:
        """The name among all experts of what expert-parallel rank ``rank`` calls ``name``."""
        found = split_expert(name)
        if found is None:
            return name
        prefix, number, rest = found
        return f"{prefix}{rank * self.num_local[prefix] + number}.{rest}"

    def expanded(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """The name of rank 0 and the whole name of each, in the order of a model that has all experts."""
        found: list[tuple[str, str]] = []
        for prefix, run in groupby(names, _prefix):
            own = list(run)
            ranks = range(1 if prefix is None else self.num_ranks(prefix))
            found += [(name, self.whole_name(name, rank)) for rank in ranks for name in own]
        return found

    def whole(self, model: ModelStates) -> ModelStates:
        """The model of rank 0 with the experts of all ranks. Raises FormatError where names do not fit."""
        values = list(self._values(model))
        module = {name: value for name, value, _ in values}
        buffers = self._buffers(model, module)
        return replace(
            model,
            module=module,
            homes={name: file for name, _, file in values},
            buffers=buffers,
            param_shapes=tuple(
                {whole: shapes[name] for name, whole in self.expanded(shapes)} for shapes in model.param_shapes
            ),
            frozen_shapes={whole: model.frozen_shapes[name] for name, whole in self.expanded(model.frozen_shapes)},
            ties={alias: owner for pair in model.ties.items() for alias, owner in self._tie(pair, model.file.path)},
        )

    def _values(self, model: ModelStates) -> Iterator[tuple[str, Value, File]]:
        """Values in the order of the model: experts come after the gate of their layer."""
        last = {_layer_of(name, self.layers): name for name in model.module}
        after = {name: prefix for prefix, name in last.items() if prefix is not None}
        for prefix, layer in self.layers.items():
            if prefix not in last:
                yield from layer.values()
        for name, value in model.module.items():
            yield name, value, model.file
            if name in after:
                yield from self.layers[after[name]].values()

    def _buffers(self, model: ModelStates, module: Mapping[str, Value]) -> frozenset[str]:
        rests = {(found[0], found[2]) for name in model.buffers if (found := split_expert(name))}
        of_experts = {
            f"{prefix}{number}.{rest}" for prefix, rest in rests for number in range(len(self.layers[prefix].files))
        }
        buffers = frozenset(name for name in model.buffers if split_expert(name) is None) | of_experts
        if missing := buffers - module.keys():
            raise IncompleteError("no file contains this buffer", path=model.file.path, key=min(missing))
        return buffers

    def _tie(self, tie: tuple[str, str], path: str) -> Iterator[tuple[str, str]]:
        """The same tie on every expert-parallel rank."""
        prefixes = [_prefix(name) for name in tie]
        ranks = {1 if prefix is None else self.num_ranks(prefix) for prefix in prefixes}
        if prefixes[0] is None and max(ranks) > 1:
            raise UnsupportedError(
                "it is tied to a tensor of an expert, which differs from rank to rank", path=path, key=tie[0]
            )
        for rank in range(max(ranks)):
            yield self.whole_name(tie[0], rank), self.whole_name(tie[1], rank)


def _prefix(name: str) -> str | None:
    found = split_expert(name)
    return found[0] if found else None


def _layer_of(name: str, layers: Mapping[str, Layer]) -> str | None:
    """The layer of experts that the gate's weight ``name`` belongs to."""
    head, infix, _ = name.rpartition(".deepspeed_moe.")
    prefix = head + INFIX
    return prefix if infix and prefix in layers else None


def open_layers(source: Source, model: ModelStates, files: ExpertFiles) -> dict[str, Layer]:
    """The files of all experts, by the prefix of their names. Raises FormatError if one is missing or damaged, or is
    not of its layer or number."""
    counts = _counts(model)
    wanted = {(layer, number) for layer, count in enumerate(counts) for number in range(count)}
    if missing := wanted - files.weights.keys():
        layer, number = min(missing)
        raise IncompleteError(
            f"the file of this expert is missing; layer {layer} has {counts[layer]}",
            path=files.prefix + expert_name(layer, number),
        )
    if more := files.weights.keys() - wanted:
        layer, number = min(more)
        has = f"layer {layer} has {counts[layer]} experts" if layer < len(counts) else f"there are {len(counts)} layers"
        raise MalformedError(f"{has}; this file is perhaps from an earlier save", path=files.weights[layer, number])
    found: dict[str, Layer] = {}
    for layer, count in enumerate(counts):
        opened = _layer([File.open(source, files.weights[layer, number]) for number in range(count)])
        if opened.prefix in found:
            raise MalformedError("two layers have experts of this name", path=opened.files[0].path, key=opened.prefix)
        found[opened.prefix] = opened
    return found


def _counts(model: ModelStates) -> list[int]:
    """``num_experts``: of each layer the experts of all ranks."""
    found = model.file.content.get("num_experts")
    if not isinstance(found, list) or not all(type(count) is int and 0 < count <= MAX_EXPERTS for count in found):
        raise UnsupportedError(
            f"its num_experts is {format_brief(found)}, but DeepSpeed 0.6 and later list the experts of each layer; "
            "load the run in such a version and save it",
            path=model.file.path,
            key="num_experts",
        )
    return found


def _layer(files: Sequence[File]) -> Layer:
    """Raises MalformedError where a file has other names or shapes than that of the first expert."""
    first = _described(files[0], 0)
    prefix = next(iter(first), ("", ""))[0]
    for number, file in enumerate(files):
        found = _described(file, number)
        if {name for name, _ in found} != {prefix} or not prefix:
            raise MalformedError("it does not hold one expert of one layer", path=file.path)
        if found != first:
            _, rest = min(found.items() ^ first.items())[0]
            raise MalformedError(f"its {rest} is not as that of {files[0].path}", path=file.path)
    return Layer(prefix, tuple(files))


def _described(file: File, number: int) -> dict[tuple[str, str], str]:
    """The shape and dtype of each tensor. Raises MalformedError where it is of an expert of another number."""
    found: dict[tuple[str, str], str] = {}
    for name, value in file.content.items():
        parts = split_expert(name) if isinstance(name, str) else None
        if parts is None or INFIX in parts[0].removesuffix(INFIX) or parts[1] != number:
            raise MalformedError(f"it is the file of expert {number}, but has {format_brief(name)}", path=file.path)
        is_tensor = isinstance(value, StoredTensor)
        found[parts[0], parts[2]] = f"{tuple(value.shape)} {value.dtype.value}" if is_tensor else "a value"
    return found


def local_counts(layers: Mapping[str, Layer], model: ModelStates, num_ranks: Mapping[str, int]) -> dict[str, int]:
    """The number of rank 0's experts of each layer; ``num_ranks`` has the number of ranks of the experts of layers that
    train. Raises FormatError if rank 0 has the names of another number."""
    seen: dict[str, set[int]] = {prefix: set() for prefix in layers}
    names = (*model.trainable, *model.frozen_shapes, *model.buffers, *model.ties, *model.ties.values())
    for prefix, number, _ in filter(None, map(split_expert, names)):
        if prefix not in seen:
            message = "no file of an expert (layer_0_expert_0_...) is of this layer"
            raise IncompleteError(message, path=model.file.path, key=prefix)
        seen[prefix].add(number)
    return {prefix: _local(prefix, seen[prefix], len(layers[prefix].files), num_ranks, model) for prefix in layers}


def _local(prefix: str, seen: set[int], total: int, num_ranks: Mapping[str, int], model: ModelStates) -> int:
    """A layer that rank 0 does not mention has nothing to be renamed."""
    ranks = num_ranks.get(prefix)
    count = (len(seen) or total) if ranks is None else total // ranks
    if not count or total % count or (ranks is not None and count * ranks != total) or seen - set(range(count)):
        raise MalformedError(
            f"rank 0 has the experts {format_brief(sorted(seen))} of {total}, which are spread over {ranks} ranks",
            path=model.file.path,
            key=prefix,
        )
    return count
