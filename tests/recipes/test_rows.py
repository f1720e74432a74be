"""Rows left out and rows of zeros, on tensors in any sharding; the judge is numpy on the whole array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.recipes.apply import MAX_ITEM_BYTES, ZEROS
from ckpt_tools.recipes.rows import has_same_elements, with_rows
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.wrappers import Overlay
from ckpt_tools.testing.stored import StoredTensor, stored_tensors
from tests.support.manifests import read_bytes

pytestmark = pytest.mark.quick


def has_rows(tensor: StoredTensor) -> bool:
    return bool(tensor.elements.shape) and tensor.elements.size > 0


@given(stored_tensors().filter(has_rows), st.integers(1, 12))
def test_rows_are_those_of_the_array(tensor, rows):
    wanted = np.zeros((rows, *tensor.elements.shape[1:]), tensor.elements.dtype)
    kept = min(rows, len(tensor.elements))
    wanted[:kept] = tensor.elements[:kept]
    store = Overlay(
        MemoryStore({file: bytearray(data) for file, data in tensor.files.items()}), {ZEROS: bytes(MAX_ITEM_BYTES)}
    )
    made = with_rows(tensor.entry, rows)
    assert made.shape == wanted.shape
    assert read_bytes(store, made) == wanted.tobytes()


@given(stored_tensors().filter(has_rows))
def test_the_same_rows_are_the_same_elements_and_others_are_not(tensor):
    rows = len(tensor.elements)
    assert has_same_elements(with_rows(tensor.entry, rows).shards, with_rows(tensor.entry, rows).shards)
    assert not has_same_elements(with_rows(tensor.entry, rows + 1).shards, tensor.entry.shards)
