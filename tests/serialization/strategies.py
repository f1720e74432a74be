"""Hypothesis strategies for what a pickle can hold, as Python objects."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from hypothesis import strategies as st

scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 300), 1 << 300),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.builds(bytearray, st.binary()),
)

keys: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), 1 << 63),
    st.text(),
    st.binary(),
    st.tuples(st.text(), st.integers(0, 9)),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(keys, inner).map(OrderedDict),
        st.sets(keys),
        st.frozensets(keys),
    )


values: st.SearchStrategy[Any] = st.recursive(scalars, _containers, max_leaves=30)
