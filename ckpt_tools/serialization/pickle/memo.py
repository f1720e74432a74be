"""The memo of a pickle: values by index, without room for values that are never fetched."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from sys import maxsize

from ckpt_tools.core.values import Value


class LeftOutError(Exception):
    """A place was asked for whose value a macro left out."""


_NUMBERS = array("Q")
"""Copied: making one anew is an audit event, of which reading a pickle has none."""


class Memo(list[Value]):
    """The values that were put, in order. Places that were left out take no room: ten million of them are 80 MB.

    The first ``dense`` places are those of the list; behind them ``fetch`` knows where a value is.
    """

    __slots__ = ("_firsts", "_num_left_out", "_resumes", "dense")

    def __init__(self) -> None:
        self.dense = maxsize
        self._num_left_out = 0
        # After each gap: the first place that has a value again, and the position of that value in the list.
        self._resumes = _NUMBERS[:]
        self._firsts = _NUMBERS[:]

    @property
    def next_place(self) -> int:
        return len(self) + self._num_left_out

    def leave_out(self, num_places: int) -> None:
        """Skip the next ``num_places``, which are never fetched."""
        if not num_places:
            return
        self._num_left_out += num_places
        if self._firsts and self._firsts[-1] == len(self):
            self._resumes[-1] += num_places
            return
        self.dense = min(self.dense, len(self))
        self._firsts.append(len(self))
        self._resumes.append(self.next_place)

    def fetch(self, place: int) -> Value:
        """The value at ``place``. Raises LeftOutError, and IndexError where nothing was put."""
        gap = bisect_right(self._resumes, place)
        position = place if gap == 0 else self._firsts[gap - 1] + place - self._resumes[gap - 1]
        if gap < len(self._firsts) and position >= self._firsts[gap]:
            raise LeftOutError
        return self[position]

    def place_of(self, position: int) -> int:
        """The place of the value at ``position`` of the list."""
        gap = bisect_right(self._firsts, position)
        return position if gap == 0 else self._resumes[gap - 1] + position - self._firsts[gap - 1]
