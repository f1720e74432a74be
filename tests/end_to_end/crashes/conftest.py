"""A process that runs the command line, and a conversion to every format, made once."""

from functools import cache

import pytest

from tests.end_to_end.crashes.cases import Case, make_case, make_sources
from tests.end_to_end.crashes.runs import Runs


@pytest.fixture(scope="session")
def crash_folder(tmp_path_factory):
    """Where all of it is."""
    return tmp_path_factory.mktemp("crashes")


@pytest.fixture(scope="session")
def runs(crash_folder):
    found = Runs(crash_folder / "runs")
    yield found
    found.close()


@pytest.fixture(scope="session")
def made_case(crash_folder, runs):
    """``made_case(name)``: the conversion of that name, with nothing at its destination."""
    sources = crash_folder / "sources"
    sources.mkdir()
    make_sources(sources)
    made = cache(lambda name: make_case(name, sources, crash_folder / name, runs))

    def cleared(name: str) -> Case:
        case = made(name)
        case.clear()
        return case

    return cleared


@pytest.fixture(scope="session")
def soak(pytestconfig):
    """Whether all points are wanted, and not a sample of them."""
    return bool(pytestconfig.getoption("--soak"))
