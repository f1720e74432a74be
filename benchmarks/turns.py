"""Contestants that take turns, and tables of their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Taken:
    """Wall and processor seconds of one turn (0: not measured), and memory above that of the libraries."""

    wall: float
    cpu: float = 0.0
    extra_bytes: int = 0


def take_turns(contestants: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Results by name, of rounds in alternating order: a machine that is slow for a while is slow for all. One more
    round before the first fills caches, and does not count."""
    found: dict[str, list[Result]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            taken = contestants[name]()
            found[name] += [taken] if number else []
    return found


def ratio(field: str, above: Sequence[object], below: Sequence[object]) -> float:
    """Median over the rounds, whose turns follow one another."""
    return float(median(getattr(a, field) / getattr(b, field) for a, b in zip(above, below, strict=True)))


def markdown(header: str, rows: Iterable[Iterable[str]], *, texts: Collection[int] = (0,)) -> list[str]:
    """The lines of a table. ``" | "`` separates the columns of ``header``; those not in ``texts`` hold numbers."""
    marks = "|".join("---" if number in texts else "--:" for number in range(header.count(" | ") + 1))
    return [f"| {header} |", f"|{marks}|", *(f"| {' | '.join(row)} |" for row in rows)]
