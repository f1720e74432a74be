"""Statistics are those that numpy gives of the whole tensor, whatever the dtype, the blocks and the layout."""

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.errors import MemoryBudgetError
from ckpt_tools.verification import statistics
from ckpt_tools.verification.statistics import StatisticsPlan

RNG = np.random.default_rng(7)
NUMBERS = torch.from_numpy(RNG.standard_normal(70_001) * 3)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def stats_of(tensor: torch.Tensor, folder: Path, **how: Any) -> ckpt_tools.TensorStats:
    save_file({"w": tensor}, folder / "m.safetensors")
    found = ckpt_tools.inspect(folder / "m.safetensors", stats=True, **how).stats
    assert found is not None
    return found[0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(dtype, tmp_path):
    tensor = NUMBERS.clone()
    tensor[[0, 5, 17_000]] = 0.0
    tensor[5] = -0.0
    tensor[[9, 69_999]] = math.nan
    if dtype is not torch.float8_e4m3fn:
        tensor[[11, 40_000, 40_001]] = torch.tensor([math.inf, -math.inf, math.inf], dtype=torch.float64)
    tensor = tensor.to(dtype).reshape(-1, 1)
    name = str(dtype).removeprefix("torch.")
    bits = tensor.view(torch.uint8).numpy().reshape(-1)
    whole = bits.view(np.dtype(getattr(ml_dtypes, name, name))).astype(np.float64)
    finite = whole[np.isfinite(whole)]
    found = stats_of(tensor, tmp_path)
    assert (found.num_read, found.num_zeros) == (whole.size, np.count_nonzero(whole == 0))
    assert (found.num_nan, found.num_inf) == (np.isnan(whole).sum(), np.isinf(whole).sum())
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(math.fsum(finite) / finite.size, abs=1e-14)
    assert found.norm == pytest.approx(math.sqrt(math.fsum(finite**2)), rel=1e-14)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_are_exact(dtype, tmp_path):
    limits = torch.iinfo(dtype)
    whole = RNG.integers(limits.min, limits.max, 40_000, np.dtype(str(dtype)[6:]), endpoint=True)
    whole[:3] = limits.min, limits.max, 0
    found = stats_of(torch.from_numpy(whole), tmp_path)
    exact = whole.astype(object)
    assert (found.min, found.max, found.num_zeros) == (limits.min, limits.max, int((whole == 0).sum()))
    assert found.mean == int(exact.sum()) / whole.size
    assert found.norm == pytest.approx(math.sqrt(int((exact * exact).sum())), rel=1e-14)
    assert (found.num_nan, found.num_inf) == (0, 0)


def test_bool_complex_and_nothing(tmp_path):
    flags = stats_of(torch.tensor([True, False, True, True]), tmp_path)
    assert (flags.min, flags.max, flags.mean, flags.num_zeros, flags.norm) == (0, 1, 0.75, 1, math.sqrt(3))
    both = stats_of(torch.tensor([3 + 4j, 0, complex(math.nan, 1)]), tmp_path)
    assert (both.min, both.mean, both.norm, both.num_zeros, both.num_nan) == (None, None, 5.0, 1, 1)
    empty = stats_of(torch.ones(0, 3), tmp_path)
    assert (empty.num_read, empty.min, empty.mean, empty.norm, empty.num_zeros) == (0, None, None, 0.0, 0)
    others = stats_of(torch.tensor([math.nan, math.inf]), tmp_path)
    assert (others.min, others.mean, others.num_nan, others.num_inf) == (None, None, 1, 1)


@pytest.mark.parametrize("value", [1e300, 1e-300, 1.7e308])
def test_squares_and_sums_stay_in_range(value, tmp_path):
    found = stats_of(torch.full((10_000,), value, dtype=torch.float64), tmp_path)
    assert found.mean == pytest.approx(value, rel=1e-14)
    expected = math.inf if value > 1e307 else value * 100
    assert found.norm == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("block_bytes", [1 << 20, 64 << 10])
def test_blocks_and_layouts_make_no_difference(block_bytes, checkpoint, monkeypatch):
    monkeypatch.setattr(statistics, "MAX_BLOCK_BYTES", block_bytes)
    for layout in ("fsdp2", "zero3-fp32"):
        source = checkpoint(layout, "awkward", 2).checkpoint
        summary, opened = ckpt_tools.inspect(source, stats=True), ckpt_tools.open(source)
        assert summary.stats is not None
        assert [(each.name, each.slot) for each in summary.stats] == [(t.name, t.slot) for t in summary.tensors]
        for each in summary.stats:
            whole = np.asarray(opened.state(each.name, each.slot).numpy(), np.float64)
            finite = whole[np.isfinite(whole)]
            if finite.size:
                assert (each.min, each.max, each.num_zeros) == (finite.min(), finite.max(), (whole == 0).sum())


def test_a_sample_says_how_much_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "MAX_BLOCK_BYTES", 64 << 10)
    tensor = torch.arange(2_000_000, dtype=torch.float32)
    found = stats_of(tensor, tmp_path, sample=True)
    assert found.num_read < tensor.numel() // 4
    assert (found.min, found.max) == (0, 1_999_999)
    assert stats_of(tensor[:1000].clone(), tmp_path, sample=True).num_read == 1000


def test_the_budget_decides_blocks_and_threads():
    def within(memory: int, *, is_limit: bool = True) -> StatisticsPlan:
        return StatisticsPlan.fit_to_memory(
            memory, Manifest("test", {}), num_workers=4, is_limit=is_limit, sample=False
        )

    assert within(512 << 20) == StatisticsPlan(1 << 20, 4)
    assert within(50_000_000).block_bytes == 64 << 10 and within(50_000_000).num_workers < 4
    with pytest.raises(MemoryBudgetError, match=r"need at least 49\.\d\d MB of memory, and the budget is 10\.00 MB"):
        within(10_000_000)
    assert within(10_000_000, is_limit=False).num_workers == 1
