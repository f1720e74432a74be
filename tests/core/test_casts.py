"""Casts against torch itself, bit for bit, on every kind of number there is."""

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ckpt_tools.core.casts import CASTABLE, cast_into, check_cast
from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import UnsupportedError

pytestmark = pytest.mark.quick

F64, F32, F16, BF16 = DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16

UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16}
TORCH_INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16}

PAIRS = list(permutations((F64, F32, F16, BF16), 2))
TORCH_DISAGREES_ON_NANS = {(F32, BF16), (F64, BF16), (F16, F32)}


def unsigned(dtype: DType) -> Any:
    return UNSIGNED[dtype.item_bytes]


def torch_cast(bits: NDArray[Any], source: DType, target: DType) -> NDArray[Any]:
    tensor = torch.from_numpy(bits.copy()).view(getattr(torch, source.value))
    cast = tensor.to(getattr(torch, target.value)).view(TORCH_INTS[target.item_bytes])
    return cast.numpy().view(unsigned(target))


def our_cast(bits: NDArray[Any], source: DType, target: DType) -> NDArray[Any]:
    out = bytearray(len(bits) * target.item_bytes)
    cast_into(bits.view(np.uint8), source, memoryview(out), target)
    return np.frombuffer(out, unsigned(target))


def is_nan(bits: NDArray[Any], dtype: DType) -> NDArray[np.bool_]:
    tensor = torch.from_numpy(bits.copy()).view(getattr(torch, dtype.value))
    return torch.isnan(tensor).numpy()


def single_patterns() -> NDArray[np.uint32]:
    """float32: all upper halves, each with lower halves around every point where a rounding changes its mind."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    near_half = [0x8000, 0x1000, 0x3000, 0x5000]
    lower = [0, 1, 0xFFFF, *(h + d for h in near_half for d in (-1, 0, 1))]
    uniform = np.random.default_rng(1).integers(0, 1 << 32, 1 << 19, dtype=np.uint32)
    return np.concatenate([uniform, *(upper | np.uint32(low) for low in lower)])


def double_patterns() -> NDArray[np.uint64]:
    """float64: random ones, NaNs, and every float32 pattern with its two neighbours."""
    uniform = np.random.default_rng(2).integers(0, 1 << 64, 1 << 18, dtype=np.uint64)
    nans = uniform[: 1 << 14] | np.uint64(0x7FF << 52)
    with np.errstate(invalid="ignore"):
        single = single_patterns().view(np.float32).astype(np.float64).view(np.uint64)
    return np.concatenate([uniform, nans, single, single + np.uint64(1), single - np.uint64(1)])


@pytest.fixture(scope="module")
def patterns():
    """Bit patterns to cast: all of the 16-bit types, millions of the others."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    return {F16: halves, BF16: halves, F32: single_patterns(), F64: double_patterns()}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_numbers_become_what_torch_makes_of_them_and_nans_where_it_agrees_with_itself(patterns, source, target):
    bits = patterns[source]
    are_nans = is_nan(bits, source)
    numbers, nans = bits[~are_nans], bits[are_nans]
    assert len(numbers) > 60_000 and len(nans) > 200
    assert np.array_equal(our_cast(numbers, source, target), torch_cast(numbers, source, target))
    ours = our_cast(nans, source, target)
    assert is_nan(ours, target).all()
    agrees = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
    if agrees and (source, target) not in TORCH_DISAGREES_ON_NANS:
        assert np.array_equal(ours, torch_cast(nans, source, target))


@pytest.mark.parametrize(
    ("source", "target", "value", "expected"),
    [
        (F32, BF16, 0x7FC0_0000, 0x7FC0),
        (F32, BF16, 0xFFC1_2345, 0x7FC0),
        (F32, BF16, 0x7F80_0001, 0x7FC0),
        (F64, BF16, 0xFFF8 << 48, 0x7FC0),
        (F16, F32, 0xFC01, 0xFFC0_2000),
        (F16, F32, 0x7E00, 0x7FC0_0000),
        (F32, F16, 0xFF80_0001, 0xFE00),
        (F32, F16, 0x7FFF_FFFF, 0x7FFF),
        (F64, F32, 0x7FF0_0000_0000_0001, 0x7FC0_0000),
        (BF16, F16, 0x7F81, 0x7E08),
        (F16, BF16, 0xFE00, 0x7FC0),
        (BF16, F32, 0xFFC1, 0xFFC1_0000),
    ],
    ids=lambda value: f"{value:#x}" if isinstance(value, int) else str(value.value),
)
def test_a_nan_also_where_torch_does_not_agree_with_itself(source, target, value, expected):
    assert our_cast(np.array([0, value, 0], unsigned(source)), source, target).tolist() == [0, expected, 0]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_places_of_any_alignment_and_length(source, target):
    numbers = np.random.default_rng(3).standard_normal(1003)
    bits = our_cast(numbers.view(np.uint64), F64, source) if source is not F64 else numbers.view(np.uint64)
    for offset, count in product((0, 1, 2), (0, 1, 7, 1003)):
        out = bytearray(offset + count * target.item_bytes + 1)
        room = memoryview(out)[offset : offset + count * target.item_bytes]
        cast_into(bits[:count].view(np.uint8), source, room, target)
        assert out == bytes(offset) + torch_cast(bits[:count], source, target).tobytes() + b"\0"


def test_only_plain_floats_are_cast():
    for dtype in DType:
        check_cast(dtype, dtype)
    for source, target in permutations(DType, 2):
        if {source, target} <= CASTABLE:
            check_cast(source, target)
        else:
            with pytest.raises(UnsupportedError, match=f"casting {source.value} to {target.value} is not supported"):
                check_cast(source, target)
