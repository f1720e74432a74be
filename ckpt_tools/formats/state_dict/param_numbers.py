"""Which parameter is which where an optimizer knows them by number. Pure.

``Optimizer.state_dict`` numbers parameters through its groups, in the order in which they were handed over (torch
2.15.0, optim/optimizer.py), and names them only if it was made from named ones (``param_names``). Recipes hand a
group's parameters over in the order of the model. On that ground the numbers of a group are proven to be certain
parameters if its states have the shapes of these, in the model's order, and of no other choice. Frozen parameters and
buffers are among the choices, so that one of them in the place of a trained one is never taken for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.boxes import Shape

BUFFER_NAMES = ("running_mean", "running_var")
"""torch's own floating-point buffers, of every normalization by batch: as many of one shape as there are layers."""


@dataclass(frozen=True, slots=True)
class NumberedGroup:
    """A group of an optimizer by numbers; ``names`` are those of its parameters where it says them."""

    numbers: tuple[int, ...]
    names: tuple[str, ...] | None = None


def match_numbers(
    groups: Sequence[NumberedGroup], shapes: Mapping[int, Shape], parameters: Mapping[str, Shape]
) -> dict[int, str] | None:
    """The parameter that each number means, or None where that cannot be proven.

    ``shapes`` are those of the states by number, without the numbers that have none; ``parameters`` are the model's
    tensors in its order, the buffers that could be taken for parameters included.
    """
    choices = [name for name in parameters if name.rpartition(".")[2] not in BUFFER_NAMES]
    found: dict[int, str] = {}
    for group in groups:
        names = group.names or _only_choice(
            group.numbers, choices, lambda n, name: shapes.get(n) in (None, parameters[name])
        )
        if names is None or len(names) != len(group.numbers):
            return None
        found.update(zip(group.numbers, names, strict=True))
    return found if _is_sound(found, groups, shapes, parameters) else None


def _only_choice(
    numbers: Sequence[int], names: Sequence[str], fits: Callable[[int, str], bool]
) -> tuple[str, ...] | None:
    """The only names in order that fit the numbers: taking the first that fits from the front gives the foremost
    choice, from the back the hindmost, and any other lies between them."""
    foremost = _first_fit(numbers, names, fits)
    hindmost = _first_fit(numbers[::-1], names[::-1], fits)
    return foremost if foremost is not None and hindmost is not None and foremost == hindmost[::-1] else None


def _first_fit(
    numbers: Iterable[int], names: Iterable[str], fits: Callable[[int, str], bool]
) -> tuple[str, ...] | None:
    left = iter(names)
    found = [next((name for name in left if fits(number, name)), None) for number in numbers]
    chosen = tuple(name for name in found if name is not None)
    return chosen if len(chosen) == len(found) else None


def _is_sound(
    found: Mapping[int, str],
    groups: Sequence[NumberedGroup],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
) -> bool:
    """Every number means one parameter, every state belongs to a number, and has the shape of its parameter."""
    count = sum(len(group.numbers) for group in groups)
    return (
        len(found) == count == len(set(found.values()))
        and set(found.values()) <= set(parameters)
        and all(number in found and parameters[found[number]] == shape for number, shape in shapes.items())
    )
