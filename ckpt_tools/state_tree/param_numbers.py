"""Names of the parameters that an optimizer knows by number. Pure.

``Optimizer.state_dict`` numbers parameters through its groups, in the order in which they were given (torch 2.15.0,
optim/optimizer.py), and names them only if it was made from named ones (``param_names``). Recipes give a group's
parameters in the order of the model. On that ground the numbers of a group are proven to be certain parameters if its
states have the shapes of these, in the model's order, and of no other choice. Frozen parameters and buffers are among
the choices, so that one of them in the place of a trained one is never taken for it. A group in another order whose
shapes are the same could not be told apart, so a note says that the order is assumed, where several have one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.names import map_to_bare_names
from ckpt_tools.core.notes import ASSUMED_ORDER_ITEM, Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import find_nearest, format_count

if TYPE_CHECKING:
    from ckpt_tools.core.name_files import ParamOrder

BUFFER_NAMES = ("running_mean", "running_var")
"""torch's own floating-point buffers, of every normalization by batch: as many of one shape as there are layers."""

PER_RANK_BUFFERS = (*BUFFER_NAMES, "num_batches_tracked")
"""Buffers that each rank computes by itself: those of rank 0 are taken. Other tensors must be the same on all ranks."""


@dataclass(frozen=True, slots=True)
class NumberedGroup:
    """A group of an optimizer by numbers; ``names`` are those of its parameters where it says them."""

    numbers: tuple[int, ...]
    names: tuple[str, ...] | None = None


def match_numbers(
    groups: Sequence[NumberedGroup],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
    *,
    is_ordered: bool = True,
) -> dict[int, str] | None:
    """The parameter that each number means, or None where that cannot be proven.

    ``shapes`` are those of the states by number, without the numbers that have none; ``parameters`` are the model's
    tensors, the buffers that could be taken for parameters included: in the model's order if ``is_ordered``. In any
    other order, only a shape that no other parameter has proves anything.
    """
    candidate_names = [name for name in parameters if name.rpartition(".")[2] not in BUFFER_NAMES]
    groups = _use_model_names(groups, parameters)
    if not is_ordered:
        return _match_by_shape(groups, shapes, parameters)
    names_by_number: dict[int, str] = {}
    for group in groups:
        names = group.names or _find_only_choice(
            group.numbers, candidate_names, lambda n, name: shapes.get(n) in (None, parameters[name])
        )
        if names is None or len(names) != len(group.numbers):
            return None
        names_by_number.update(zip(group.numbers, names, strict=True))
    return names_by_number if _is_valid_match(names_by_number, groups, shapes, parameters) else None


def _use_model_names(groups: Sequence[NumberedGroup], parameters: Mapping[str, Shape]) -> Sequence[NumberedGroup]:
    """``groups`` with their names written as the model's are, with the same wrappers."""
    stated_names = [name for group in groups for name in group.names or ()]
    if parameters.keys() >= {*stated_names}:
        return groups
    bare_by_name = map_to_bare_names(stated_names)
    name_by_bare = {bare: name for name, bare in map_to_bare_names(parameters).items()}
    return [
        replace(each, names=each.names and tuple(name_by_bare.get(bare_by_name[n], n) for n in each.names))
        for each in groups
    ]


def note_assumed_order(
    groups: Sequence[NumberedGroup], shapes: Mapping[int, Shape], parameters: Mapping[str, Shape]
) -> tuple[Note, ...]:
    """The note that ``match_numbers`` took the model's order, where parameters could be exchanged: the optimizer does
    not name them, and others have their shapes."""
    shape_counts = Counter(parameters.values())
    numbers = [n for group in groups if group.names is None for n in group.numbers if n in shapes]
    num_ambiguous = sum(shape_counts[shapes[number]] > 1 for number in numbers)
    why = (
        f"it numbers them, and {format_count(num_ambiguous, 'parameter')} have the shape of another; they are taken to "
        f"be in the model's order, as in an optimizer made of model.parameters(); {format_option('param_order')} says "
        "another"
    )
    return (Note(Outcome.KEPT, ASSUMED_ORDER_ITEM, why, num_ambiguous),) if num_ambiguous else ()


def why_unnamed(
    groups: Sequence[NumberedGroup], shapes: Mapping[int, Shape], parameters: Mapping[str, Shape]
) -> str | None:
    """Reason why no order of names fits the numbers; None if one can: each state needs a parameter of its shape."""
    if Counter(shapes.values()) <= Counter(parameters.values()):
        return None
    numbers = sum(len(group.numbers) for group in groups)
    return (
        f"it numbers {format_count(numbers, 'parameter')}, and the {format_count(len(parameters), 'tensor')} of the "
        "model have other shapes, as when transformers 5 splits fused experts on saving; the two cannot be joined yet, "
        f"so convert with {format_option('state', 'model')} for the weights alone"
    )


def _match_by_shape(
    groups: Sequence[NumberedGroup], shapes: Mapping[int, Shape], parameters: Mapping[str, Shape]
) -> dict[int, str] | None:
    """The name of each number, without regard to order: by the names in the groups, and by shapes that are unique."""
    names_by_shape: dict[Shape, list[str]] = {}
    for name, shape in parameters.items():
        names_by_shape.setdefault(shape, []).append(name)
    names_by_number: dict[int, str] = {}
    for group in groups:
        for position, number in enumerate(group.numbers):
            names = names_by_shape.get(shapes[number], []) if number in shapes else []
            if group.names is not None:
                names = list(group.names[position : position + 1])
            if len(names) != 1:
                return None
            names_by_number[number] = names[0]
    return names_by_number if _is_valid_match(names_by_number, groups, shapes, parameters) else None


def apply_param_order(
    order: ParamOrder, groups: Sequence[NumberedGroup], shapes: Mapping[int, Shape], parameters: Mapping[str, Shape]
) -> dict[int, str]:
    """The parameter that each number means, as the user says it; ``parameters`` has tied names too.

    The names are the optimizer's in its order if they are as many as its numbers and have the shapes of its states.
    They are the model's in the model's order if that identifies each number. Both can be so if both mean the same.

    Raises:
        UsageError: a name is unknown, the shapes do not fit, or it can be read in two ways.
    """
    unknown_name = next((name for name in order.names if name not in parameters), None)
    if unknown_name is not None:
        nearest_names = ", ".join(find_nearest(unknown_name, list(parameters)))
        raise UsageError(
            f"{format_option('param_order')} names {unknown_name!r}, which the checkpoint does not hold; nearest are "
            f"{nearest_names}"
        )
    numbers = [number for group in groups for number in group.numbers]
    if order.groups is not None:
        stated_sizes, group_sizes = [len(group) for group in order.groups], [len(group.numbers) for group in groups]
        if stated_sizes != group_sizes:
            raise UsageError(
                f"{format_option('param_order')} has groups of {stated_sizes} names; those of the optimizer have "
                f"{group_sizes}"
            )
        return _check_order_fits(dict(zip(numbers, order.names, strict=True)), groups, shapes, parameters)
    model_order_names = match_numbers(groups, shapes, {name: parameters[name] for name in order.names})
    if len(numbers) != len(order.names):
        if model_order_names is None:
            raise UsageError(
                f"{format_option('param_order')} has {len(order.names)} names, and they do not identify the "
                f"{len(numbers)} parameters of the optimizer; list exactly these, in the optimizer's order"
            )
        return model_order_names
    optimizer_order_names = dict(zip(numbers, order.names, strict=True))
    fits_optimizer_order = _is_valid_match(optimizer_order_names, groups, shapes, parameters)
    if model_order_names is not None and fits_optimizer_order and model_order_names != optimizer_order_names:
        raise UsageError(
            f"{format_option('param_order')} fits both as the optimizer's order and as the model's, which differ; "
            "write it as a JSON list with one list of names for each parameter group of the optimizer"
        )
    if model_order_names is not None and not fits_optimizer_order:
        return model_order_names
    return _check_order_fits(optimizer_order_names, groups, shapes, parameters)


def _check_order_fits(
    names_by_number: dict[int, str],
    groups: Sequence[NumberedGroup],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
) -> dict[int, str]:
    for number, shape in shapes.items():
        name = names_by_number.get(number)
        if name is not None and parameters[name] != shape:
            raise UsageError(
                f"{format_option('param_order')} does not fit: state {number} of the optimizer has the shape "
                f"{list(shape)}, but {name} has {list(parameters[name])}"
            )
    if not _is_valid_match(names_by_number, groups, shapes, parameters):
        raise UsageError(
            f"{format_option('param_order')} does not fit: the optimizer has states of parameters in no group"
        )
    return names_by_number


def _find_only_choice(
    numbers: Sequence[int], candidate_names: Sequence[str], fits: Callable[[int, str], bool]
) -> tuple[str, ...] | None:
    """The only names in order that fit the numbers: taking the first that fits from the front gives the foremost
    choice, from the back the hindmost, and any other lies between them."""
    # numbers need the shapes A B A, names have A(w0) A(w1) B(w2) A(w3): from the front w0 w2 w3, from the back w1 w2
    # w3. They differ, so nothing is proven.
    foremost = _match_greedily(numbers, candidate_names, fits)
    hindmost = _match_greedily(numbers[::-1], candidate_names[::-1], fits)
    return foremost if foremost is not None and hindmost is not None and foremost == hindmost[::-1] else None


def _match_greedily(
    numbers: Iterable[int], candidate_names: Iterable[str], fits: Callable[[int, str], bool]
) -> tuple[str, ...] | None:
    remaining_names = iter(candidate_names)
    matches = [next((name for name in remaining_names if fits(number, name)), None) for number in numbers]
    chosen = tuple(name for name in matches if name is not None)
    return chosen if len(chosen) == len(matches) else None


def _is_valid_match(
    names_by_number: Mapping[int, str],
    groups: Sequence[NumberedGroup],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
) -> bool:
    """Every number means one parameter, every state belongs to a number, and has the shape of its parameter."""
    names = set(names_by_number.values())
    num_parameters = sum(len(group.numbers) for group in groups)
    if not len(names_by_number) == len(names) == num_parameters or not names <= parameters.keys():
        return False
    return all(number in names_by_number and parameters[names_by_number[number]] == shapes[number] for number in shapes)
