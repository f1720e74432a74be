"""Whether the files of a pipeline's layers are all there, as far as the stages' optimizers show it without ZeRO.

No file names the layers of the model or their parameters. But a stage has consecutive layers, and its optimizer has
states or masters of the shapes of their parameters. So the layers are cut into stages such that each has a tensor for
each parameter of its optimizer; if no cut does it, a file is missing. A tied parameter may lie in the layer of another
stage. It is known by its moments or masters, which are the same in every stage that uses it.

A missing layer does not show if all its parameters are frozen, or if the same stage has frozen ones of their shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.core.wording import format_count, join_names
from ckpt_tools.errors import IncompleteError
from ckpt_tools.formats.deepspeed.common.files import File
from ckpt_tools.formats.deepspeed.zero_reader.layers import head
from ckpt_tools.formats.deepspeed.zero_reader.stage0 import Saved
from ckpt_tools.stores.source import Source

ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum")
"""State that has an element for each one of its parameter, in torch's and DeepSpeed's optimizers."""


UNTOLD = "layers without a file, if the run has any"
"""The subject of the note of :func:`untold`."""

Identity = tuple[Shape | None, bytes]


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors in the file of a layer that may be parameters. ``stage`` is the one that names a buffer of it."""

    number: int
    shapes: Counter[Shape]
    stage: int | None

    @classmethod
    def of(cls, number: int, file: File, buffers: Sequence[frozenset[str]]) -> Layer:
        """``buffers`` are the names of each stage."""
        prefix = f"{number}."
        stages = [stage for stage, names in enumerate(buffers) if any(name.startswith(prefix) for name in names)]
        known = frozenset[str]().union(*buffers)
        values = {name: value for name, value in file.content.items() if f"{prefix}{name}" not in known}
        shapes = Counter(tuple(value.shape) for value in values.values() if isinstance(value, StoredTensor))
        return cls(number, shapes, stages[0] if stages else None)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an optimizer, or a flat group of them: what is known of it. ``head`` are its first elements."""

    shape: Shape | None
    numel: int
    head: bytes

    @property
    def identity(self) -> Identity:
        return self.shape, self.head


def parameters(source: Source, saved: Saved) -> list[Parameter]:
    """All parameters of a stage's optimizer, by number."""
    return [_parameter(source, saved, number) for group in saved.groups for number in group["params"]]


def _parameter(source: Source, saved: Saved, number: int) -> Parameter:
    value = saved.masters.get(number)
    if value is None:
        slots = saved.states.get(number, {})
        found = (slots.get(slot) for slot in ELEMENTWISE)
        value = next((each for each in found if isinstance(each, StoredTensor)), None)
    if value is None:
        return Parameter(None, 0, b"")
    shape = None if saved.is_flat else tuple(value.shape)
    return Parameter(shape, value.numel, head(source, saved.file.table(value)))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tensors that the layers of a stage must hold: those of ``shapes``, ``unknown`` others, and so many elements.

    What is ``tied`` may be in a layer of another stage.
    """

    path: str
    shapes: Counter[Shape]
    unknown: int
    numel: int
    tied: Counter[Shape]
    has_tied_group: bool

    @classmethod
    def of(cls, path: str, own: Sequence[Parameter], shared: Collection[Identity]) -> Wanted:
        shapes = Counter(each.shape for each in own if each.shape is not None)
        tied = Counter(each.shape for each in own if each.shape is not None and each.identity in shared)
        flat = [each for each in own if each.shape is None and each.numel]
        unknown = len(own) - shapes.total() - len(flat)
        return cls(path, shapes, unknown, sum(f.numel for f in flat), tied, any(f.identity in shared for f in flat))

    def lacking(self, own: Counter[Shape], others: Counter[Shape]) -> str | None:
        """The tensors that are missing in its own layers and not tied to those of ``others``; None if there are
        none."""
        missing = self.shapes - own - Counter({shape: min(n, others[shape]) for shape, n in self.tied.items()})
        if missing:
            shape, number = min(missing.items())
            return f"{format_count(number, 'parameter')} of shape {list(shape)}"
        elsewhere = (self.shapes - own).total()
        spare = own.total() - (self.shapes.total() - elsewhere)
        if spare < self.unknown:
            return format_count(self.unknown - spare, "parameter")
        numel = self.numel - _numel(own) - (_numel(others) if self.has_tied_group else 0)
        return format_count(numel, "element") if numel > 0 else None


def _numel(shapes: Counter[Shape]) -> int:
    return sum(number * prod(shape) for shape, number in shapes.items())


def check(layers: Sequence[Layer], stages: Sequence[tuple[str, Sequence[Parameter]]]) -> None:
    """Checks ``layers``, in order of number, against each stage's model file and its optimizer's parameters.

    Every stage takes the fewest layers that will do, which leaves most for those after it. Raises IncompleteError if in
    no cut of the layers into stages has every stage the tensors that its optimizer needs.
    """
    shared = _shared([own for _, own in stages])
    every = sum((layer.shapes for layer in layers), Counter[Shape]())
    stop = 0
    for stage, (path, own) in enumerate(stages):
        wanted, start = Wanted.of(path, own, shared), stop
        stop = max(start, *(at + 1 for at, layer in enumerate(layers) if layer.stage == stage), 0)
        taken = sum((layer.shapes for layer in layers[start:stop]), Counter[Shape]())
        while (lacking := wanted.lacking(taken, every - taken)) is not None:
            if stop == len(layers) or layers[stop].stage not in (None, stage):
                raise _missing(path, lacking, layers, stop)
            taken += layers[stop].shapes
            stop += 1
    path = stages[-1][0]
    lacking = Wanted.of(path, _once([own for _, own in stages]), frozenset()).lacking(every, Counter())
    if lacking is not None:
        raise _missing(path, lacking, layers, len(layers))


def _shared(stages: Sequence[Sequence[Parameter]]) -> frozenset[Identity]:
    """Parameters of more than one stage: tied ones, and flat groups that begin with one."""
    counts = Counter(identity for own in stages for identity in {each.identity for each in own if each.head})
    return frozenset(identity for identity, number in counts.items() if number > 1)


def _once(stages: Sequence[Sequence[Parameter]]) -> list[Parameter]:
    """All parameters, those of several stages once; of flat groups that begin alike, the largest."""
    every = sorted((each for own in stages for each in own), key=lambda each: each.numel)
    largest = {each.identity: each for each in every}
    known = reduce(or_, (Counter(each.identity for each in own if each.head) for own in stages))
    return [*(largest[identity] for identity in known.elements()), *(each for each in every if not each.head)]


def _missing(path: str, lacking: str, layers: Sequence[Layer], stop: int) -> IncompleteError:
    """The layer is one before that at ``stop``, or after the last."""
    numbers = {layer.number for layer in layers}
    is_last = stop == len(layers)
    end = layers[-1].number if is_last else layers[stop].number
    absent = [str(number) for number in range(end) if number not in numbers]
    places = [*([f"of layer {join_names(absent)}"] if absent else []), *([f"after layer {end}"] if is_last else [])]
    where = f"there is none {' and '.join(places)}" if places else "or one of them lacks tensors"
    return IncompleteError(
        f"the optimizer has {lacking} more than the files of layers hold, so that the file of a layer is missing; "
        f"{where}",
        path=path,
    )


def untold(numbers: Collection[int], *, is_numbered: bool) -> Note:
    """A note that no file lists the layers. ``is_numbered``: the optimizer has numbers for its parameters."""
    have = join_names([str(number) for number in numbers], len(numbers))
    shows = "its parameters are frozen, or frozen ones have their shapes" if is_numbered else "it has only frozen ones"
    why = (
        f"nothing in the checkpoint tells which layers the model has, and there are files of layers {have}; the "
        f"loss of another one does not show if {shows}"
    )
    return Note(Outcome.MISSING, UNTOLD, why)
