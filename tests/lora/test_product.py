"""Products that are added to weights as they are read: any part of them, in pieces of any size, judged by numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, TensorEntry
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.lora.product import Factor, Product, WithProduct
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.transfer import computing
from ckpt_tools.transfer.tensor_reader import TensorReader
from tests.transfer.test_tensor_reader import index, read, wishes


def stored(store: MemoryStore, name: str, array: NDArray[np.float32]) -> TensorEntry:
    store.files[name] = bytearray(array.tobytes())
    table = ShardTable.whole(array.shape, DType.FLOAT32, ByteRange(name, 0, array.nbytes))
    return TensorEntry(array.shape, DType.FLOAT32, Kind.PARAMETER, table)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_interval_of_any_box(data):
    """Numbers are small and whole, so that no order of adding up changes a bit."""
    stack, rows, columns, rank = (data.draw(st.integers(1, 5)) for _ in range(4))
    shape: Shape = (stack, rows, columns) if stack > 1 or data.draw(st.booleans()) else (rows, columns)
    numbers = np.random.default_rng(data.draw(st.integers(0, 99)))
    weight, left, right = (
        numbers.integers(-9, 9, size).astype(np.float32)
        for size in (shape, (rank, stack, rows), (stack, columns, rank))
    )
    scale = data.draw(st.sampled_from([1.0, 0.25, 3.0]))
    store = MemoryStore()
    first, second = stored(store, "left", left), stored(store, "right", right)
    product = Product(Factor(first, left.shape, (1, 2, 0)), Factor(second, right.shape, (0, 2, 1)), scale)
    made = WithProduct.of(stored(store, "weight", weight), product)
    entry = TensorEntry(shape, DType.FLOAT32, Kind.PARAMETER, made.make_table("computed:w"))
    wanted = weight + scale * np.einsum("rso,sir->soi", left, right).reshape(shape)
    geometry, box, start, stop = data.draw(wishes(shape))
    expected = wanted.astype(np.float32).reshape(geometry)[index(box)].reshape(-1)[start:stop].tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_tools.core.manifest.MAX_PIECE", data.draw(st.integers(1, 30)))
        made_files = computing.add_generated_files(store, Manifest("test", {}, computed={"computed:w": made}))
        reader = TensorReader(made_files, scratch_bytes=data.draw(st.integers(16, 200)))
        assert read(reader, entry, box, geometry, start, stop) == expected
        assert read(reader, entry, box, geometry, start, stop) == expected
