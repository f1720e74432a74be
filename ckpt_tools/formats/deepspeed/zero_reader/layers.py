"""The files of a pipeline's layers as the model of each stage.

``PipelineModule`` writes ``layer_03-model_states.pt``, a bare state dict, for each layer that is a module
(runtime/pipe/module.py ``save_state_dict``). Its parameters are called ``3.weight``. Tied layers share one module,
``tied_modules.<key>``, which every stage that uses it has for itself. The file has the number of a layer and not the
key. So a file that no parameter's name fits is compared with the tied modules: by its names and shapes, and by the
first elements of the masters, because a frozen layer could have the same names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.casts import CASTABLE, cast_into
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.values import StoredTensor, Value, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates
from ckpt_tools.stores.source import Source

TIED = "tied_modules."

SAMPLE = 1024
"""Elements of a tied parameter that are compared with its masters."""


@dataclass(frozen=True, slots=True)
class Known:
    """The shapes of a stage's parameters by its files, and the masters of the tied ones.

    A shape is None where only the number of elements is known, ``numels``.
    """

    model: ModelStates
    shapes: Mapping[str, Shape | None]
    numels: Mapping[str, int]
    masters: Mapping[str, ShardTable]

    @property
    def names(self) -> set[str]:
        return {*self.shapes, *self.model.buffers}

    def tied(self) -> dict[str, set[str]]:
        """The names of each tied module of the stage, by its prefix."""
        found: dict[str, set[str]] = {}
        for name in self.names:
            if name.startswith(TIED):
                found.setdefault(TIED + name.removeprefix(TIED).split(".")[0] + ".", set()).add(name)
        return found


@dataclass
class Layers:
    """The files of all layers, by number, and what the stages know of them."""

    source: Source
    files: Mapping[int, File]
    stages: Sequence[Known]
    tied: dict[str, File] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)

    def models(self) -> list[ModelStates]:
        """Each stage's model with the tensors of its layers. Raises FormatError where they do not fit the stages."""
        stage = 0
        for number in sorted(self.files):
            own = self._stage_of(number)
            prefix = None if own is not None else self._tied_prefix(self.files[number])
            stage = stage if own is None else own
            if prefix is None:
                self.owners[number] = stage
            else:
                self.tied.setdefault(prefix, self.files[number])
        return [self._model(stage, known) for stage, known in enumerate(self.stages)]

    def unnamed(self) -> Iterator[File]:
        """The files of layers that could be tied ones: they have only frozen parameters, which nothing names."""
        for number in self.owners:
            values = self.files[number].content.values()
            if self._stage_of(number) is None and any(isinstance(value, StoredTensor) for value in values):
                yield self.files[number]

    def _stage_of(self, number: int) -> int | None:
        """The stage that has a name of the layer."""
        stages = [stage for stage, known in enumerate(self.stages) if any(_number(n) == number for n in known.names)]
        if len(stages) > 1:
            raise MalformedError(
                f"stages {stages[0]} and {stages[1]} of the pipeline both have this layer", path=self.files[number].path
            )
        return stages[0] if stages else None

    def _tied_prefix(self, file: File) -> str | None:
        """The tied module whose state dict ``file`` is, if it is one's."""
        for known in self.stages:
            for prefix, names in known.tied().items():
                if all(self._fits(known, name, file.content.get(name.removeprefix(prefix)), file) for name in names):
                    return prefix
        return None

    def _fits(self, known: Known, name: str, value: Value, file: File) -> bool:
        if not isinstance(value, StoredTensor):
            return False
        if name not in known.shapes:
            return True
        shape = known.shapes[name]
        if value.numel != known.numels[name] or shape not in (None, tuple(value.shape)):
            return False
        return name not in known.masters or not value.numel or self._is_of(file.table(value), known.masters[name])

    def _is_of(self, weight: ShardTable, master: ShardTable) -> bool:
        """Whether the first elements of a weight are those of its masters, in its dtype."""
        if weight.dtype not in CASTABLE or master.dtype not in CASTABLE or weight.strides is not None:
            return True
        one, other = head(self.source, weight), head(self.source, master)
        numel = min(len(one) // weight.dtype.item_bytes, len(other) // master.dtype.item_bytes)
        cast = bytearray(numel * weight.dtype.item_bytes)
        elements = np.frombuffer(other[: numel * master.dtype.item_bytes], np.uint8)
        cast_into(elements, master.dtype, memoryview(cast), weight.dtype)
        return bytes(one[: len(cast)]) == bytes(cast)

    # The model of a stage

    def _model(self, stage: int, known: Known) -> ModelStates:
        values = list(self._values(stage, known))
        module = {name: value for name, value, _ in values}
        homes = {name: file for name, _, file in values}
        missing = known.names - module.keys()
        if missing:
            raise IncompleteError("no file of a layer contains it", path=known.model.file.path, key=min(missing))
        stored = {name: tuple(value.shape) for name, value in module.items() if isinstance(value, StoredTensor)}
        shapes = tuple(
            {name: stored.get(name, ()) if known.shapes[name] is None else shape for name, shape in group.items()}
            for group in known.model.param_shapes
        )
        return replace(known.model, module=module, homes=homes, param_shapes=shapes)

    def _values(self, stage: int, known: Known) -> Iterator[tuple[str, Value, File]]:
        """Tied modules come first, as ``PipelineModule`` registers them."""
        for prefix, file in self.tied.items():
            if prefix in known.tied():
                yield from ((prefix + _text(key, file), value, file) for key, value in file.content.items())
        for number, file in self.files.items():
            if self.owners.get(number) == stage:
                yield from ((f"{number}.{_text(key, file)}", value, file) for key, value in file.content.items())


def head(source: Source, table: ShardTable) -> bytes:
    """The first elements, or those of its first part."""
    first = int(np.argmin(table.starts[:, 0])) if len(table) > 1 else 0
    start, stop = int(table.byte_starts[first]), int(table.byte_stops[first])
    stop = min(stop, start + SAMPLE * table.dtype.item_bytes)
    return source.read(table.files[int(table.file_ids[first])], start, stop)


def _text(key: Value, file: File) -> str:
    if not isinstance(key, str):
        raise MalformedError(f"the state dict of a layer has the key {format_brief(key)}", path=file.path)
    return key


def _number(name: str) -> int | None:
    """The layer of a parameter."""
    first = name.partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() and len(first) < 10 else None
