"""Tests of every checkpoint of ``fixtures.CORE``: of its sample in ``make test``, of all in ``make soak``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fixtures import CORE, SAMPLE, Fixture


def swept(wanted: Iterable[Fixture]) -> list[Any]:
    """Parameters of a test, of which those outside of the sample are marked for the soak."""
    return [pytest.param(each, id=name_of(each), marks=marks_of(each)) for each in wanted]


def name_of(fixture: Fixture) -> str:
    return f"{fixture.kind}-{fixture.case}-{fixture.world_size}"


def marks_of(fixture: Fixture) -> Any:
    return () if fixture in SAMPLE or fixture not in CORE else pytest.mark.soak
