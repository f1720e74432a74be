"""Recipes of random operations on random manifests, against numpy on whole arrays.

The oracle numbers every position of a record by walking its copies in order. It shares nothing with the engine, which
computes with strides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.recipes.apply import apply_recipe
from ckpt_tools.recipes.reading import parse_recipe
from ckpt_tools.recipes.recipe import Recipe
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.testing import strategies
from ckpt_tools.testing.stored import opaque, stored_tensors
from ckpt_tools.transfer.tensor_reader import TensorReader

pytestmark = pytest.mark.extended

SLOTS = ("weight", "exp_avg")

Position = tuple[str, int]
"""A field and the number of an element of it."""


@dataclass(frozen=True)
class Axis:
    """An axis as a recipe writes it, and the position in a field at each of its places."""

    text: str
    places: tuple[Position, ...]


def loop(count: int, inner: Axis) -> Axis:
    """Copies of an axis: the elements of each field go on from copy to copy."""
    sizes: dict[str, int] = {}
    for field, number in inner.places:
        sizes[field] = max(sizes.get(field, 0), number + 1)
    places = [(field, copy * sizes[field] + number) for copy in range(count) for field, number in inner.places]
    return Axis(f"{count}*{inner.text}" if inner.text.startswith("(") else f"{count}*({inner.text})", tuple(places))


def group(*parts: Axis) -> Axis:
    return Axis(f"({' '.join(part.text for part in parts)})", tuple(place for part in parts for place in part.places))


def field(name: str, size: int) -> Axis:
    return Axis(f"{name}:{size}", tuple((name, number) for number in range(size)))


@st.composite
def records(draw: st.DrawFn, names: Sequence[str], outer: int, inner: int, runs: Sequence[int]) -> Axis:
    """One of the ways to lay out fields of ``outer * inner * run`` elements in one axis."""
    form = draw(st.integers(0, 4))
    order = draw(st.permutations(list(zip(names, runs, strict=True))))
    if form == 0:
        return group(*(field(name, outer * inner * run) for name, run in order))
    if form == 1:
        return loop(outer, group(*(field(name, inner * run) for name, run in order)))
    if form == 2:
        return loop(outer, loop(inner, group(*(field(name, run) for name, run in order))))
    if form == 3:
        return loop(outer, group(*(loop(inner, field(name, run)) for name, run in order)))
    return group(*(loop(outer * inner, field(name, run)) for name, run in order))


@dataclass(frozen=True)
class Tensor:
    """A tensor of one side: its name without the index, and its axes."""

    name: str
    axes: tuple[Axis, ...]

    @property
    def text(self) -> str:
        return f'"{self.name}" = "{" ".join(axis.text for axis in self.axes)}"'

    def keys(self, index: str | None) -> NDArray[Any]:
        """What each element is: its positions in fields, whatever the order of axes."""
        shape = tuple(len(axis.places) for axis in self.axes)
        found = np.empty(shape, object)
        for at in np.ndindex(shape):
            places = {axis.places[i] for axis, i in zip(self.axes, at, strict=True)}
            found[at] = frozenset(places if index is None else {*places, ("expert", int(index))})
        return found


@dataclass(frozen=True)
class Case:
    """A recipe with the tensors of both sides by name, each with what its elements are."""

    recipe: Recipe
    left: Mapping[str, NDArray[Any]]
    right: Mapping[str, NDArray[Any]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    number = draw(st.integers(1, 3))
    names = ["q", "k", "v"][:number]
    outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    runs = [draw(st.integers(1, 2)) for _ in names]
    plain = [field(name, draw(st.integers(1, 3))) for name in ("H", "K")[: draw(st.integers(0, 2))]]
    experts = draw(st.integers(2, 3)) if draw(st.booleans()) else None
    sides = []
    for side in ("l", "r"):
        is_split = draw(st.booleans())
        fields = [(name, outer * inner * run) for name, run in zip(names, runs, strict=True)]
        layouts = [field(*each) for each in fields] if is_split else [draw(records(names, outer, inner, runs))]
        in_name = experts is not None and draw(st.booleans())
        tensors = []
        for part, layout in enumerate(layouts):
            axes = [*plain, layout]
            if experts is not None and not in_name:
                axes.append(Axis("{expert}", tuple(("expert", n) for n in range(experts))))
            name = f"{side}.{part}" + (".{expert}" if in_name else "")
            tensors.append(Tensor(name, tuple(draw(st.permutations(axes)))))
        sides.append((tensors, in_name))
    # An index in the names of both sides is not an axis: both sides are groups of their own.
    (left, left_named), (right, right_named) = sides
    text = "[[map]]\n" + "".join(
        f"{side} = {{ {', '.join(tensor.text for tensor in tensors)} }}\n"
        for side, tensors in (("left", left), ("right", right))
    )
    recipe = parse_recipe(text, "random", "random.toml")
    return Case(recipe, _named(left, left_named, experts), _named(right, right_named, experts))


def _named(tensors: Sequence[Tensor], in_name: bool, experts: int | None) -> Mapping[str, NDArray[Any]]:
    indices = [str(n) for n in range(experts or 0)] if in_name else [None]
    return {tensor.name.replace("{expert}", index or ""): tensor.keys(index) for tensor in tensors for index in indices}


@st.composite
def manifests(
    draw: st.DrawFn, keys: Mapping[str, NDArray[Any]]
) -> tuple[Manifest, dict[str, bytes], dict[StateKey, Any]]:
    """Tensors with those elements in any sharding: their weights and moments, and a step for all."""
    dtype = draw(strategies.dtypes().filter(lambda dtype: dtype.item_bytes > 1))
    tensors, files, elements = dict[StateKey, TensorEntry](), dict[str, bytes](), dict[StateKey, Any]()
    for number, (name, slot) in enumerate(product(keys, SLOTS)):
        made = draw(stored_tensors(prefix=f"{number}/", shape=keys[name].shape, dtype=dtype))
        kind = Kind.PARAMETER if slot == "weight" else Kind.STATE
        tensors[StateKey(name, slot)] = replace(made.entry, kind=kind)
        elements[StateKey(name, slot)] = made.elements
        files |= made.files
    return Manifest("test", tensors, groups=(ParamGroup(tuple(keys), {}),)), files, elements


def stored(files: Mapping[str, bytes]) -> MemoryStore:
    return MemoryStore({name: bytearray(data) for name, data in files.items()})


def read(entry: TensorEntry, store: MemoryStore) -> NDArray[Any]:
    data = bytearray(entry.num_bytes)
    flat = (entry.numel,)
    TensorReader(store, 1 << 12).read(entry, Box.whole(flat), flat, 0, entry.numel, memoryview(data))
    return np.frombuffer(bytes(data), opaque(entry.dtype)).reshape(entry.shape)


def expected(
    keys: Mapping[str, NDArray[Any]], source: Mapping[str, NDArray[Any]], elements: Mapping[StateKey, Any], dtype: DType
) -> dict[StateKey, NDArray[Any]]:
    found = {}
    for slot in SLOTS:
        value = {
            key: element
            for name, each in source.items()
            for key, element in zip(each.ravel(), elements[StateKey(name, slot)].ravel(), strict=True)
        }
        for name, each in keys.items():
            data = b"".join(value[key].tobytes() for key in each.ravel())
            found[StateKey(name, slot)] = np.frombuffer(data, opaque(dtype)).reshape(each.shape)
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_element_is_where_numpy_has_it_and_the_inverse_brings_it_back(data):
    case = data.draw(cases())
    manifest, files, elements = data.draw(manifests(case.left))
    made, _ = apply_recipe(manifest, case.recipe, None)
    store = stored(files)
    wanted = expected(case.right, case.left, elements, next(iter(manifest.tensors.values())).dtype)
    assert made.tensors.keys() == wanted.keys()
    for key, entry in made.tensors.items():
        assert read(entry, store).tobytes() == wanted[key].tobytes(), str(key)
        box = data.draw(strategies.boxes(entry.shape))
        start, stop = data.draw(strategies.intervals(box.numel))
        out = bytearray((stop - start) * entry.dtype.item_bytes)
        TensorReader(store, 1 << 12).read(entry, box, entry.shape, start, stop, memoryview(out))
        part = wanted[key][tuple(map(slice, box.start, box.stop))].reshape(-1)[start:stop]
        assert bytes(out) == part.tobytes(), f"{key} {box} {start} {stop}"
    assert set(made.groups[0].params) == set(case.right)
    back = _stored_whole(made, store)
    again, _ = apply_recipe(back[0], case.recipe.inverse(), None)
    assert again.tensors.keys() == manifest.tensors.keys()
    assert all(prod(entry.shape) == entry.numel for entry in again.tensors.values())
    for key, entry in again.tensors.items():
        assert entry.shape == manifest.tensors[key].shape
        assert read(entry, back[1]).tobytes() == elements[key].tobytes(), str(key)


def _stored_whole(manifest: Manifest, store: MemoryStore) -> tuple[Manifest, MemoryStore]:
    content = {str(key): read(entry, store).tobytes() for key, entry in manifest.tensors.items()}
    tensors = {
        key: replace(entry, shards=ShardTable.whole(entry.shape, entry.dtype, ByteRange(str(key), 0, entry.num_bytes)))
        for key, entry in manifest.tensors.items()
    }
    return replace(manifest, tensors=tensors), stored(content)
