"""The order in which options take effect: a recipe comes before all options that name tensors."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools.core.apply_options import Applied, apply_options
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.core.transforms import Transformed, rename
from ckpt_tools.errors import UsageError
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.stores.urls import open_source

pytestmark = pytest.mark.quick

KEPT = Note(Outcome.KEPT, "module.a.w", "as stored")
MADE = Note(Outcome.DROPPED, "a.b", "by the recipe")


@pytest.fixture
def manifest(tmp_path):
    names = ("module.a.w", "module.a.b", "module.c.w")
    save_file({name: np.ones(2, np.float32) for name in names}, tmp_path / "m.safetensors")
    return read_source(open_source(tmp_path / "m.safetensors"), ReadOptions())[1]


def upper(manifest: Manifest) -> Transformed:
    """A recipe that puts names in capital letters."""
    return rename(manifest, str.upper)[0], (MADE,)


def applied(manifest: Manifest, *, whole: bool = False, **options: object) -> Applied:
    chosen = ConvertOptions(**options)  # type: ignore[arg-type]
    return apply_options(manifest, chosen, whole=whole, holds_masters=False, recipe=upper)


def names(made: Applied) -> list[str]:
    return sorted(key.fqn for key in made.manifest.tensors)


def test_a_recipe_sees_the_names_of_the_bare_model(manifest):
    assert names(applied(manifest)) == ["A.B", "A.W", "C.W"]
    assert names(applied(manifest, whole=True)) == ["MODULE.A.B", "MODULE.A.W", "MODULE.C.W"]


def test_options_name_what_a_recipe_makes(manifest):
    made = applied(manifest, include=["A.*"], buffers=["A.B"], rename=["^A=x"], dtype="bfloat16")
    assert made.renamed == {"A.W": "x.W", "A.B": "x.B"}
    entries = made.manifest.tensors
    assert {key.fqn: (entry.kind, entry.dtype) for key, entry in entries.items()} == {
        "x.W": (Kind.PARAMETER, DType.BFLOAT16),
        "x.B": (Kind.BUFFER, DType.FLOAT32),
    }
    assert made.uncast.tensors[StateKey("x.W")].dtype is DType.FLOAT32


@pytest.mark.parametrize("options", [{"include": ["a.*"]}, {"rename": ["^a=x"]}, {"buffers": ["a.b"]}])
def test_options_do_not_name_what_a_recipe_took(options, manifest):
    with pytest.raises(UsageError, match=r"matches no tensor; the nearest"):
        applied(manifest, **options)


def test_notes_are_those_of_the_source_and_of_the_recipe(manifest):
    manifest = Manifest(manifest.format, manifest.tensors, notes=(KEPT,))
    assert applied(manifest, whole=True).manifest.notes == (KEPT, MADE)


def test_with_a_recipe_a_reader_gets_no_globs():
    assert ConvertOptions(include=["a"], exclude=["b"]).reading.include == ("a",)
    reading = ConvertOptions(include=["a"], exclude=["b"], recipe="r").reading
    assert (reading.include, reading.exclude) == ((), ())


def test_inverse_needs_a_recipe():
    with pytest.raises(UsageError, match=r"^inverse=True is for a recipe; name it with recipe=$"):
        ConvertOptions(inverse=True)
    assert ConvertOptions(inverse=True, recipe="r").inverse
