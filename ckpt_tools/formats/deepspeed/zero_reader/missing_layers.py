"""Checks by the optimizers of the stages, without ZeRO, that the files of a pipeline's layers are all there.

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
from ckpt_tools.errors import IncompleteError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile
from ckpt_tools.formats.deepspeed.zero_reader.stage0 import SavedOptimizer
from ckpt_tools.formats.deepspeed.zero_reader.stages import read_first_elements
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.stores.source import Source

ELEMENTWISE_SLOTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum")
"""Slots that have as many elements as their parameter, in torch's and DeepSpeed's optimizers."""


UNLISTED_LAYERS = "layers without a file, if the run has any"
"""The subject of the note of ``note_unlisted_layers``."""

ParameterIdentity = tuple[Shape | None, bytes]


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """The shapes of the tensors in the file of a layer that may be parameters. ``stage`` is the stage that names a
    buffer of the layer, None if there is none."""

    number: int
    shapes: Counter[Shape]
    stage: int | None

    @classmethod
    def of(cls, number: int, file: DeepSpeedFile, buffers: Sequence[frozenset[str]]) -> LayerShapes:
        """``buffers`` are the names of the buffers of each stage."""
        prefix = f"{number}."
        stages = [stage for stage, names in enumerate(buffers) if any(name.startswith(prefix) for name in names)]
        known_buffers = frozenset[str]().union(*buffers)
        values = {name: value for name, value in file.content.items() if f"{prefix}{name}" not in known_buffers}
        shapes = Counter(tuple(value.shape) for value in values.values() if isinstance(value, StoredTensor))
        return cls(number, shapes, stages[0] if stages else None)


@dataclass(frozen=True, slots=True)
class OptimizedParameter:
    """A parameter of an optimizer, or a flat group of parameters. ``shape`` is None for a group, and for a parameter
    without state, which has no ``first_elements`` either: bytes of its first masters or moments."""

    shape: Shape | None
    numel: int
    first_elements: bytes

    @property
    def identity(self) -> ParameterIdentity:
        return self.shape, self.first_elements


def list_parameters(source: Source, saved: SavedOptimizer) -> list[OptimizedParameter]:
    """All parameters of a stage's optimizer, by number."""
    return [_read_parameter(source, saved, number) for group in saved.groups for number in group["params"]]


def _read_parameter(source: Source, saved: SavedOptimizer, number: int) -> OptimizedParameter:
    value = saved.masters.get(number)
    if value is None:
        slots = saved.states.get(number, {})
        slot_values = (slots.get(slot) for slot in ELEMENTWISE_SLOTS)
        value = next((each for each in slot_values if isinstance(each, StoredTensor)), None)
    if value is None:
        return OptimizedParameter(None, 0, b"")
    shape = None if saved.is_flat else tuple(value.shape)
    return OptimizedParameter(shape, value.numel, read_first_elements(source, saved.file.build_shard_table(value)))


@dataclass(frozen=True, slots=True)
class RequiredTensors:
    """The tensors that the layers of a stage must hold: tensors of ``shapes``, ``num_unknown`` of any shape, and
    ``numel`` elements in flat groups.

    Those of ``tied_shapes``, and with ``has_tied_group`` elements of flat groups, may be in a layer of another stage.
    """

    shapes: Counter[Shape]
    num_unknown: int
    numel: int
    tied_shapes: Counter[Shape]
    has_tied_group: bool

    @classmethod
    def of(cls, parameters: Sequence[OptimizedParameter], shared: Collection[ParameterIdentity]) -> RequiredTensors:
        """Those of a stage's optimizer; ``shared`` are the parameters that are in several stages."""
        shapes = Counter(each.shape for each in parameters if each.shape is not None)
        tied_shapes = Counter(each.shape for each in parameters if each.shape is not None and each.identity in shared)
        flat_groups = [each for each in parameters if each.shape is None and each.numel]
        num_unknown = len(parameters) - shapes.total() - len(flat_groups)
        numel, has_tied = sum(f.numel for f in flat_groups), any(f.identity in shared for f in flat_groups)
        return cls(shapes, num_unknown, numel, tied_shapes, has_tied)

    def describe_missing(self, own_shapes: Counter[Shape], other_shapes: Counter[Shape]) -> str | None:
        """Text on the tensors that are missing in the stage's own layers and not tied to those in layers of other
        stages; None if there are none."""
        tied_elsewhere = Counter({shape: min(n, other_shapes[shape]) for shape, n in self.tied_shapes.items()})
        if missing := self.shapes - own_shapes - tied_elsewhere:
            shape, number = min(missing.items())
            return f"{format_count(number, 'parameter')} of shape {list(shape)}"
        # Parameters without state may be any tensors that are left.
        num_elsewhere = (self.shapes - own_shapes).total()
        num_spare = own_shapes.total() - (self.shapes.total() - num_elsewhere)
        if num_spare < self.num_unknown:
            return format_count(self.num_unknown - num_spare, "parameter")
        numel = self.numel - _count_elements(own_shapes) - (_count_elements(other_shapes) if self.has_tied_group else 0)
        return format_count(numel, "element") if numel > 0 else None


def _count_elements(shapes: Counter[Shape]) -> int:
    return sum(number * prod(shape) for shape, number in shapes.items())


def check_no_layer_missing(
    layers: Sequence[LayerShapes], stages: Sequence[tuple[str, Sequence[OptimizedParameter]]]
) -> None:
    """Checks ``layers``, in order of number, against each stage's model file and its optimizer's parameters.

    Every stage takes the fewest layers that will do. That leaves most layers for those after it, so if one of them then
    lacks tensors, it lacks them in every cut. Raises IncompleteError if in no cut of the layers into stages every stage
    has the tensors that its optimizer needs.
    """
    # Parameters of more than one stage: tied ones, and flat groups that begin with one.
    known = [{each.identity for each in own if each.first_elements} for _, own in stages]
    counts = Counter(identity for identities in known for identity in identities)
    shared_identities = frozenset(identity for identity, number in counts.items() if number > 1)
    all_shapes = sum((layer.shapes for layer in layers), Counter[Shape]())
    stop = 0
    for stage, (path, parameters) in enumerate(stages):
        required, start = RequiredTensors.of(parameters, shared_identities), stop
        # The layers whose buffers the stage names are its own.
        stop = max(start, *(at + 1 for at, layer in enumerate(layers) if layer.stage == stage), 0)
        shapes = sum((layer.shapes for layer in layers[start:stop]), Counter[Shape]())
        while (missing := required.describe_missing(shapes, all_shapes - shapes)) is not None:
            if stop == len(layers) or layers[stop].stage not in (None, stage):
                raise _make_missing_layer_error(path, missing, layers, stop)
            shapes += layers[stop].shapes
            stop += 1
    # All layers together must have what all stages need, where tied parameters count once.
    required = RequiredTensors.of(_count_shared_once([own for _, own in stages]), frozenset())
    if (missing := required.describe_missing(all_shapes, Counter())) is not None:
        raise _make_missing_layer_error(stages[-1][0], missing, layers, len(layers))


def _count_shared_once(stages: Sequence[Sequence[OptimizedParameter]]) -> list[OptimizedParameter]:
    """The parameters of all stages, those of several stages once; of flat groups that begin alike, the largest one."""
    all_parameters = sorted((each for own in stages for each in own), key=lambda each: each.numel)
    largest_by_identity = {each.identity: each for each in all_parameters}
    identity_counts = reduce(or_, (Counter(each.identity for each in own if each.first_elements) for own in stages))
    return [
        *(largest_by_identity[identity] for identity in identity_counts.elements()),
        *(each for each in all_parameters if not each.first_elements),
    ]


def _make_missing_layer_error(path: str, missing: str, layers: Sequence[LayerShapes], stop: int) -> IncompleteError:
    """The error for a missing layer: it is one before ``layers[stop]``, or after the last layer."""
    numbers = {layer.number for layer in layers}
    is_last = stop == len(layers)
    last_number = layers[-1].number if is_last else layers[stop].number
    missing_numbers = [str(number) for number in range(last_number) if number not in numbers]
    places = [
        *([f"of layer {join_names(missing_numbers)}"] if missing_numbers else []),
        *([f"after layer {last_number}"] if is_last else []),
    ]
    location = f"there is none {' and '.join(places)}" if places else "or one of them lacks tensors"
    return IncompleteError(
        f"the optimizer has {missing} more than the files of layers hold, so that the file of a layer is "
        f"missing; {location}",
        path=path,
    )


def note_unlisted_layers(numbers: Collection[int], *, is_numbered: bool) -> Note:
    """A note that no file lists the layers. ``is_numbered``: the optimizer has numbers for its parameters."""
    layers_text = join_names([str(number) for number in numbers], len(numbers))
    frozen_text = "its parameters are frozen, or frozen ones have their shapes"
    condition = frozen_text if is_numbered else "it has only frozen ones"
    why = (
        f"nothing in the checkpoint tells which layers the model has, and there are files of layers {layers_text}; the "
        f"loss of another one does not show if {condition}"
    )
    return Note(Outcome.MISSING, UNLISTED_LAYERS, why)
