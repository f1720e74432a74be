"""Options in the order in which they take effect, a recipe before all that name tensors; and the notes about what was
lost."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools.core.apply_options import AppliedOptions, apply_options
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.notes import Note, Outcome, drop_stale_notes, merge_notes
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.core.renaming import rename_tensors, strip_wrappers
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.transforms import TransformResult, select_tensors
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


def upper(manifest: Manifest) -> TransformResult:
    """A recipe that puts names in capital letters."""
    return rename_tensors(manifest, str.upper)[0], (MADE,)


def applied(manifest: Manifest, *, whole: bool = False, **options: object) -> AppliedOptions:
    chosen = ConvertOptions(**options)  # type: ignore[arg-type]
    return apply_options(manifest, chosen, writes_all_state=whole, holds_masters=False, recipe=upper)


def names(made: AppliedOptions) -> list[str]:
    return sorted(key.fqn for key in made.manifest.tensors)


def test_a_recipe_sees_the_names_of_the_bare_model(manifest):
    assert names(applied(manifest)) == ["A.B", "A.W", "C.W"]
    assert names(applied(manifest, whole=True)) == ["MODULE.A.B", "MODULE.A.W", "MODULE.C.W"]


def test_options_name_what_a_recipe_makes(manifest):
    made = applied(manifest, include=["A.*"], buffers=["A.B"], rename=["^A=x"], dtype="bfloat16")
    assert made.new_name_by_old == {"A.W": "x.W", "A.B": "x.B"}
    entries = made.manifest.tensors
    assert {key.fqn: (entry.kind, entry.dtype) for key, entry in entries.items()} == {
        "x.W": (Kind.PARAMETER, DType.BFLOAT16),
        "x.B": (Kind.BUFFER, DType.FLOAT32),
    }
    assert made.uncast_manifest.tensors[StateKey("x.W")].dtype is DType.FLOAT32


@pytest.mark.parametrize("options", [{"include": ["a.*"]}, {"rename": ["^a=x"]}, {"buffers": ["a.b"]}])
def test_options_do_not_name_what_a_recipe_took(options, manifest):
    with pytest.raises(UsageError, match=r"matches no tensor; the nearest"):
        applied(manifest, **options)


def test_names_in_a_group_are_renamed_where_its_parameters_are(manifest):
    own, new = {"param_names": ["of its own"]}, {"param_names": ["MODULE.A.W"]}
    groups = (ParamGroup(("module.a.w",), {"param_names": ["module.a.w"], "lr": 1}), ParamGroup((), own))
    made, _ = upper(Manifest(manifest.format, manifest.tensors, groups=groups))
    assert [group.options for group in made.groups] == [{**new, "lr": 1}, own]


def test_notes_are_those_of_the_source_and_of_the_recipe(manifest):
    manifest = Manifest(manifest.format, manifest.tensors, notes=(KEPT,))
    assert applied(manifest, whole=True).manifest.notes == (KEPT, MADE)


def test_with_a_recipe_a_reader_gets_no_globs():
    assert ConvertOptions(include=["a"], exclude=["b"]).read_options.include == ("a",)
    reading = ConvertOptions(include=["a"], exclude=["b"], recipe="r").read_options
    assert (reading.include, reading.exclude) == ((), ())


def test_inverse_needs_a_recipe():
    with pytest.raises(UsageError, match=r"^inverse=True is for a recipe; name it with recipe=$"):
        ConvertOptions(inverse=True)
    assert ConvertOptions(inverse=True, recipe="r").inverse


def test_the_last_step_decides():
    kept, dropped = Note(Outcome.KEPT, "entry", "a"), Note(Outcome.DROPPED, "entry", "b")
    assert merge_notes([kept, Note(Outcome.KEPT, "other", "c"), dropped]) == (dropped, Note(Outcome.KEPT, "other", "c"))


def test_a_loss_that_was_not_asked_for_stays_a_loss():
    dropped, made = Note(Outcome.DROPPED, "entry", "b"), Note(Outcome.DEFAULTED, "entry", "c")
    assert merge_notes([dropped, made]) == (dropped,)
    assert merge_notes([Note(Outcome.DROPPED, "entry", "b", asked=True), made]) == (made,)


def test_two_reasons_for_one_outcome_are_one_note():
    notes = [Note(Outcome.DROPPED, "entry", "a", asked=True), Note(Outcome.DROPPED, "entry", "b")]
    assert merge_notes(notes) == (Note(Outcome.DROPPED, "entry", "a; b"),)
    assert merge_notes([notes[0], notes[0]]) == (notes[0],)


def test_what_is_gone_was_not_kept():
    notes = (Note(Outcome.KEPT, "gone", "a"), Note(Outcome.KEPT, "here", "a"), Note(Outcome.KEPT, "the tree", "a"))
    assert drop_stale_notes(notes, {"gone", "here"}, {"here"}) == notes[1:]


def test_a_loader_that_does_not_restore_it_is_a_loss():
    assert [outcome for outcome in Outcome if Note(outcome, "x", "y").is_loss] == [Outcome.DROPPED, Outcome.NOT_LOADED]
    assert not Note(Outcome.DROPPED, "x", "y", asked=True).is_loss


def test_tensors_of_the_users_own_entries_are_no_part_of_the_model():
    """Its names may be chosen and changed without them, and a prefix of all is found beside them."""
    table = ShardTable.build((2,), DType.FLOAT32, [Shard(Box.whole((2,)), ByteRange("data", 0, 8))])
    rng = StateKey("rng", "extra")
    tensors = {
        StateKey("module.a"): TensorEntry((2,), DType.FLOAT32, Kind.PARAMETER, table),
        StateKey("module.b"): TensorEntry((2,), DType.FLOAT32, Kind.PARAMETER, table),
        rng: TensorEntry((2,), DType.FLOAT32, Kind.EXTRA, table),
    }
    made = Manifest("dcp", tensors, extra={"rng": (TensorRef(rng),)})
    for (found, *_), left in (
        (select_tensors(made, include=("module.a",), exclude=()), ["module.a"]),
        (rename_tensors(made, lambda name: name.replace("module.", "net.")), ["net.a", "net.b"]),
        (strip_wrappers(made), ["a", "b"]),
    ):
        assert set(found.tensors) == {rng, *map(StateKey, left)}
