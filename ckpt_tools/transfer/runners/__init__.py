"""Ways to run tasks, each once, in any order: threads here, or processes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class TaskRunner(Protocol):
    """Applies ``work`` to every item."""

    def run(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        """Results as they come, in any order; work waits for results to be taken, so that they do not pile up.

        The first error ends the run: no further item is started, those under way are waited for, and it is raised.
        Closing the generator ends it in the same way.
        """
