"""Collapsed lists of tensors: expanding the lines gives exactly the tensors."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.collapsing import NumberedNames, TensorLine, TensorSummary, collapse_tensors
from ckpt_tools.core.module_tree import summarize_modules

pytestmark = pytest.mark.quick

Item = tuple[str, str, str, tuple[int, ...], str]

PARTS = st.one_of(
    st.integers(0, 12).map(str), st.sampled_from(["layers", "w", "00", "01", "-1", "", "b_3", "x[1]", "٣"])
)
FQNS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
ROLES = st.sampled_from([("weight", "parameter"), ("weight", "buffer"), ("master", "state"), ("step", "state")])


def tensor(name: str, slot: str = "weight", kind: str = "parameter", shape: tuple[int, ...] = (2,)) -> TensorSummary:
    return TensorSummary(name, slot, kind, shape, "float32", 4 * len(shape), 1)


def of_line(line: TensorLine) -> list[Item]:
    return [(name, slot, kind, line.shape, line.dtype) for name in line.names for slot, kind in line.slots]


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.tuples(FQNS, ROLES), st.sampled_from([(), (2,), (2, 3)]), max_size=60))
def test_the_lines_are_the_tensors(shapes):
    unique = {(name, slot): tensor(name, slot, kind, shape) for (name, (slot, kind)), shape in shapes.items()}
    tensors = list(unique.values())
    lines = collapse_tensors(tensors)
    found = Counter(item for line in lines for item in of_line(line))
    assert found == Counter((each.name, each.slot, each.kind, each.shape, each.dtype) for each in tensors)
    assert all(len(line.names) == len(list(line.names)) for line in lines)
    assert sum(line.num_bytes for line in lines) == sum(each.num_bytes for each in tensors)
    assert sum(line.num_shards for line in lines) == len(tensors)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.randoms())
def test_a_complete_grid_is_one_line(sizes, random):
    names = [".x.".join(["a", *map(str, numbers), "b"]) for numbers in product(*map(range, sizes))]
    random.shuffle(names)  # type: ignore[attr-defined]
    (line,) = collapse_tensors(map(tensor, names))
    assert sorted(line.names) == sorted(names)


def test_experts_within_layers():
    names = [f"layers.{n}.experts.{e}.w1" for n in range(3, 32) for e in range(64)]
    dense = [f"layers.{n}.w1" for n in range(3)]
    lines = collapse_tensors(map(tensor, [*dense, *names]))
    assert [(str(line.names), len(line.names)) for line in lines] == [
        ("layers.0-2.w1", 3), ("layers.3-31.experts.0-63.w1", 1856)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["h.07.w", "conv1.w", "layer_6.w", "a-1.w", "9" * 30])
def test_one_name_is_itself(name):
    assert (str(NumberedNames.of(name)), list(NumberedNames.of(name))) == (name, [name])


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(FQNS, st.sampled_from([(), (2,), (2, 3)]), max_size=40))
def test_modules_add_up(shapes):
    tensors = [tensor(name, shape=shape) for name, shape in shapes.items()]
    rows = summarize_modules(tensors)
    assert rows[0].weight_bytes == sum(each.num_bytes for each in tensors)
    for depth in range(1, 4):
        below = sum(row.weight_bytes for row in rows if row.depth == depth)
        assert below == sum(each.num_bytes for each in tensors if each.name.count(".") >= depth)
    assert [row for row in rows if row.depth <= 1] == list(summarize_modules(tensors, 1))
