"""``cat``: parts of tensors as numpy gives and prints them, and no more is read than they need."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_tools
from ckpt_tools.core.indexing import parse_index
from ckpt_tools.errors import UsageError
from tests.support.commands import printed

WHOLE = np.random.default_rng(3).standard_normal((40, 30, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("cat") / "m.pt"
    special = torch.tensor([float("nan"), float("inf"), -0.0, 0.1])
    other = {"odd[1]": torch.arange(3), "half": torch.ones(3).bfloat16() / 3, "c": torch.tensor([1 + 2j])}
    state = {"w": torch.from_numpy(WHOLE), "special": special, "flag": torch.tensor(True), **other}
    torch.save({"model": state, "rng": torch.arange(4, dtype=torch.uint8)}, path)
    return path


@pytest.mark.parametrize(
    "index", ["0:2, :", "...", "-1", "3, ..., 2", "::-1, 5:1:-2", "5:5", "10:30, 2:28, :", " 1 , : "]
)
def test_a_part_is_that_of_numpy(index, source):
    expected = eval(f"WHOLE[{index}]")
    found = ckpt_tools.cat(source, f"w[{index}]")
    assert found.shape == expected.shape
    assert np.array_equal(found.numpy(), expected)
    assert str(found) == np.array2string(expected, threshold=1000)
    assert found.text(all=True) == np.array2string(expected, threshold=10**9)
    assert found.to_json()["values"] == expected.astype(np.float64).tolist()


SIZES = st.none() | st.integers(-50, 50)
PARTS = st.one_of(
    st.builds(slice, SIZES, SIZES, SIZES.filter(lambda step: step != 0)), st.integers(-50, 50), st.just(...)
)


def written(part: Any) -> str:
    if isinstance(part, slice):
        return ":".join("" if each is None else str(each) for each in (part.start, part.stop, part.step))
    return "..." if part is ... else str(part)


@settings(deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=5))
def test_what_is_written_is_what_is_read(parts):
    assert parse_index(", ".join(map(written, parts))) == tuple(parts)


@pytest.mark.parametrize("index", ["", "x", "1.5", "1:2:3:4", "::0", "0,,1", "__import__('os')", "1e3", "٣"])
def test_what_is_no_index_is_refused(index, source):
    with pytest.raises(UsageError, match=r"is not an integer|step of a slice"):
        ckpt_tools.cat(source, f"w[{index}]")


@pytest.mark.parametrize(
    ("name", "slot", "said"),
    [
        ("w[40]", None, r"w has shape \[40, 30, 5\]: index 40 is out of bounds"),
        ("w[0, 0, 0, 0]", None, "too many indices"),
        ("v", None, "there is no weight 'v'; did you mean"),
        ("w", "exp_avg", "there is no 'exp_avg' of 'w'; it has weight"),
    ],
)
def test_what_is_not_there_is_refused(name, slot, said, source):
    with pytest.raises(UsageError, match=said):
        ckpt_tools.cat(source, name, slot=slot)


def test_names_with_brackets_other_tensors_and_all_dtypes(source):
    assert ckpt_tools.cat(source, "odd[1]").numpy().tolist() == [0, 1, 2]
    assert ckpt_tools.cat(source, "odd[1][1:]").numpy().tolist() == [1, 2]
    assert (ckpt_tools.cat(source, "rng").slot, ckpt_tools.cat(source, "rng[2]").values) == ("extra", 2)
    assert ckpt_tools.cat(source, "flag").values is True
    assert str(ckpt_tools.cat(source, "half[:2]")) == "[0.333984 0.333984]"
    assert ckpt_tools.cat(source, "c").values == [[1.0, 2.0]]
    assert json.loads(printed("cat", source, "special", "--json")) == {
        "name": "special", "slot": "weight", "shape": [4], "dtype": "float32",
        "values": ["nan", "inf", -0.0, float(np.float32(0.1))],
    }  # fmt: skip


def test_slots(checkpoint):
    source = checkpoint("zero3-fp32", "awkward", 2).checkpoint
    opened = ckpt_tools.open(source)
    name = next(iter(opened))
    for slot in ("weight", "exp_avg"):
        assert np.array_equal(ckpt_tools.cat(source, name, slot=slot).numpy(), opened.state(name, slot).numpy())


def test_only_what_is_shown_is_read(source):
    found = ckpt_tools.cat(source, "w")
    reader = found._tensor._reader
    str(found)
    # Six of forty, six of thirty, all five, and gaps between them.
    assert 0 < reader.bytes_read < WHOLE.nbytes // 4
    part = ckpt_tools.cat(source, "w[7]")
    assert printed("cat", source, "w[7]") == f"{np.array2string(WHOLE[7], threshold=1000)}\n"
    part.numpy()
    assert part._tensor._reader.bytes_read == WHOLE[7].nbytes
