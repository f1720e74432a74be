"""Contestants that take turns, and tables of their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

Turn = TypeVar("Turn")

MAX_EXTRA_BYTES = 256_000_000
"""Memory above a model's own while it is loaded, and above that of a process that only imported the libraries."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Wall and processor seconds of one turn (0: not measured), and memory above that of the libraries."""

    wall: float
    cpu: float = 0.0
    extra_bytes: int = 0


def take_turns(
    contestants: Mapping[str, Callable[[], Turn]], rounds: int, *, warm_up: bool = True
) -> dict[str, list[Turn]]:
    """Results by name, of rounds in alternating order: a machine that is slow for a while is slow for all. One more
    round before the first fills caches, and does not count."""
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number in range(0 if warm_up else 1, rounds + 1):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            turn = contestants[name]()
            if number:
                turns[name].append(turn)
    return turns


def compute_ratio(field: str, above: Sequence[object], below: Sequence[object]) -> float:
    """Median over the rounds, whose turns follow one another."""
    return float(median(getattr(a, field) / getattr(b, field) for a, b in zip(above, below, strict=True)))


def compare_with_promises(
    pairs: Mapping[str, tuple[Sequence[Taken], Sequence[Taken]]], promised: Mapping[str, float]
) -> list[str]:
    """The table of works: what ours took, what the other took, and the largest ratio that was promised."""
    header = "work | ours | the other | ours / the other | promised | by processor time | above the model"
    return make_table(header, (_compare_cells(work, *pair, promised[work]) for work, pair in pairs.items()))


def _compare_cells(work: str, ours: Sequence[Taken], other: Sequence[Taken], promised: float) -> Iterator[str]:
    yield work
    yield from (f"{median(each.wall for each in taken):.4f} s" for taken in (ours, other))
    yield f"{compute_ratio('wall', ours, other):.2f}"
    yield f"at most {promised:.3g}"
    yield f"{compute_ratio('cpu', ours, other):.2f}" if ours[0].cpu else ""
    extra = max(each.extra_bytes for each in ours)
    yield f"{extra / 1e6:.0f} MB (at most {MAX_EXTRA_BYTES / 1e6:.0f})" if extra else ""


def format_verdict(kept: bool) -> str:
    return "kept" if kept else "**missed**"


def make_table(header: str, rows: Iterable[Iterable[str]], *, texts: Collection[int] = (0,)) -> list[str]:
    """The lines of a table. ``" | "`` separates the columns of ``header``; those not in ``texts`` hold numbers."""
    marks = "|".join("---" if number in texts else "--:" for number in range(header.count(" | ") + 1))
    return [f"| {header} |", f"|{marks}|", *(f"| {' | '.join(row)} |" for row in rows)]
