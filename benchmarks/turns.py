"""Contestants in turns, and tables of what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Taken = TypeVar("Taken")


def take_turns(contestants: Mapping[str, Callable[[], Taken]], rounds: int) -> dict[str, list[Taken]]:
    """What each returns, by name, in rounds that alternate their order: a machine that is slow for a while is slow for
    all. One round before the first fills caches, and does not count."""
    found: dict[str, list[Taken]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            taken = contestants[name]()
            found[name] += [taken] if number else []
    return found


def markdown(header: str, rows: Iterable[Iterable[str]], *, texts: int = 1) -> list[str]:
    """The lines of a table. ``" | "`` separates the columns of ``header``; those after ``texts`` hold numbers."""
    num_columns = len(header.split(" | "))
    marks = "|".join(["---"] * texts + ["--:"] * (num_columns - texts))
    return [f"| {header} |", f"|{marks}|", *(f"| {' | '.join(row)} |" for row in rows)]
