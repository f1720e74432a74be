"""Tests of every checkpoint of ``fixtures.CORE``: of one of each kind in ``make test``, of the sample in
``make test-all``, of all in ``make soak``."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from fixtures import CORE, SAMPLE, Fixture

_BASIC = {f.kind: f for f in sorted(CORE, key=lambda f: (f.world_size == 2, f.case == "awkward"))}.values()
"""One checkpoint of each kind, by two ranks where there is one, and of the case with most that is peculiar."""


def swept(wanted: Iterable[Fixture]) -> list[Any]:
    """Parameters of a test, of which those outside of the sample are marked for the soak."""
    return [pytest.param(each, id=name_of(each), marks=marks_of(each)) for each in wanted]


def tiered(cases: Iterable[Any], test: Collection[str], extended: Collection[str] = ()) -> list[Any]:
    """Parameters of a test with many cases: those named in ``test`` run in ``make test``, those in ``extended`` in
    ``make test-all``, the others in ``make soak``. They are chosen to differ in kind. The name of a tuple, which is
    several parameters, is that of its parts with ``-`` between them."""
    named = {"-".join(map(_name, case)) if isinstance(case, tuple) else _name(case): case for case in cases}
    assert not (unknown := {*test, *extended} - {*named}), f"no such cases: {unknown}"
    marks = {**dict.fromkeys(extended, pytest.mark.extended), **dict.fromkeys(test, ())}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name, marks=marks.get(name, pytest.mark.soak))
        for name, case in named.items()
    ]


def spread(values: Sequence[Any], number: int | None) -> list[Any]:
    """``number`` of the values, evenly spread from first to last; all of them for None."""
    if number is None or number >= len(values):
        return list(values)
    return [values[index * (len(values) - 1) // max(number - 1, 1)] for index in range(number)]


def _name(case: Any) -> str:
    return case if isinstance(case, str) else str(getattr(case, "name", case))


def extended(*cases: Any) -> list[Any]:
    """Parameters that run in ``make test-all``; a tuple has the values of several."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.extended) for case in cases]


def name_of(fixture: Fixture) -> str:
    return f"{fixture.kind}-{fixture.case}-{fixture.world_size}"


def marks_of(fixture: Fixture) -> Any:
    if fixture in _BASIC or fixture not in CORE:
        return ()
    return pytest.mark.extended if fixture in SAMPLE else pytest.mark.soak
