"""Plain numbers as literal files, and back in their Python types."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import is_number, literal_number, number_table
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry

pytestmark = pytest.mark.quick


@given(st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)))
def test_a_number_comes_back_in_its_type(number):
    assert is_number(number)
    table, files = number_table(number, "step")
    entry = TensorEntry((), table.dtype, Kind.STATE, table)
    manifest = Manifest("test", {StateKey("w", "step"): entry}, literals=files)
    found = literal_number(manifest, entry)
    assert (found, type(found)) == (number, type(number))
    assert literal_number(replace(manifest, literals={}), entry) is None
    assert literal_number(manifest, entry.cast(DType.FLOAT32)) is None


@pytest.mark.parametrize("value", [None, "1", 2**63, -(2**63) - 1, 1j, [1]])
def test_what_is_not_a_number_of_64_bits(value):
    assert not is_number(value)
