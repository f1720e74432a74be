"""What stands while Python's collector leaves the libraries alone, and afterwards."""

from __future__ import annotations

import gc

import pytest

from inference.common.garbage import libraries_left_alone


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_was_there_is_left_alone_until_the_block_ends():
    threshold = gc.get_threshold()
    with libraries_left_alone():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] > threshold[0]
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, threshold)


def test_what_somebody_else_arranged_stays():
    gc.freeze()
    threshold = gc.get_threshold()
    with libraries_left_alone():
        assert gc.get_threshold() == threshold
    assert gc.get_freeze_count() > 1000


def test_an_error_ends_it_too():
    with pytest.raises(ValueError, match="x"), libraries_left_alone():
        raise ValueError("x")
    assert gc.get_freeze_count() == 0
