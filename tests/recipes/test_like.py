"""A manifest becomes like a reference: its names in its order, its shapes, its ties and dtypes, bit for bit; and what
does not fit is one sentence with the names. The judge is numpy on whole arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tools.core import renaming, transforms
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.recipes.like import UNCHANGED_NAMES, NameMapping, Reference, ReferenceMatcher, ReferenceTensor
from ckpt_tools.recipes.search import iter_mappings
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.wrappers import overlay_literals
from tests.support.manifests import elements
from tests.support.refusals import refusal_test

pytestmark = pytest.mark.quick

V, H = 6, 4
"""Tokens and hidden size of the reference."""

EMBED, HEAD, NORM, BIAS = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias",
)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Held:
    """Arrays as the tensors of a checkpoint, each in a file of its own."""

    manifest: Manifest
    store: MemoryStore

    @classmethod
    def of(cls, arrays: Mapping[Any, np.ndarray], **more: Any) -> Held:
        entries, files = {}, {}
        for name, array in arrays.items():
            key = StateKey(name) if isinstance(name, str) else StateKey(*name)
            dtype = DType(str(array.dtype))
            files[str(key)] = bytearray(array.tobytes())
            table = ShardTable.whole(array.shape, dtype, ByteRange(str(key), 0, array.nbytes))
            kind = Kind.PARAMETER if key.slot == "weight" else Kind.STATE
            entries[key] = TensorEntry(array.shape, dtype, kind, table)
        return cls(Manifest("a test's", entries, **more), MemoryStore(files))

    def read(self, manifest: Manifest) -> dict[StateKey, np.ndarray]:
        store = overlay_literals(self.store, manifest.literals)
        return {key: elements(store, entry) for key, entry in manifest.tensors.items()}


def reference(tensors: Mapping[str, Sequence[int]], dtype: DType = DType.FLOAT32, **config: Any) -> Reference:
    wanted = {name: ReferenceTensor(tuple(shape), dtype) for name, shape in tensors.items()}
    return Reference("ref", wanted, config={"vocab_size": V, **config})


def like(ref: Reference, *tried: NameMapping) -> ReferenceMatcher:
    return ReferenceMatcher(ref, lambda manifest: [tried or (UNCHANGED_NAMES,)])


def model(rows: int = V, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {HEAD: numbers(rows, H, seed=1), NORM: numbers(H), EMBED: numbers(rows, H), **more}


UNTIED = {EMBED: (V, H), NORM: (H,), HEAD: (V, H)}
TIED = {EMBED: (V, H), NORM: (H,)}


def same(found: Mapping[StateKey, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert [key.fqn for key in found if key.slot == "weight"] == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[StateKey(name)], array, strict=True)


def test_each_weight_takes_the_dtype_of_the_reference_and_state_keeps_its_own():
    held = Held.of({**model(), BIAS: numbers(8), (NORM, "exp_avg"): numbers(H, seed=5)})
    ref = reference({**UNTIED, BIAS: (8,)}, DType.BFLOAT16)
    ref = replace(ref, tensors={**ref.tensors, BIAS: ReferenceTensor((8,), DType.FLOAT32)})
    made, _ = like(ref).match_dtypes(like(ref).match_names(held.manifest)[0])
    assert {(key.fqn, key.slot): entry.dtype for key, entry in made.tensors.items()} == {
        **{(name, "weight"): DType.BFLOAT16 for name in (EMBED, NORM, HEAD)},
        (BIAS, "weight"): DType.FLOAT32,
        (NORM, "exp_avg"): DType.FLOAT32,
    }
    np.testing.assert_array_equal(held.read(made)[StateKey(BIAS)], numbers(8))
    for name in ("dtype", "torch_dtype"):
        made, _ = like(Reference("ref", config={name: "bfloat16"})).match_dtypes(Held.of({NORM: numbers(H)}).manifest)
        assert made.tensors[StateKey(NORM)].dtype is DType.BFLOAT16


@pytest.mark.parametrize("before", [V + 2, V + 64, V - 1, 1])
def test_rows_of_a_padded_vocabulary_are_left_out_or_added(before):
    arrays: dict[Any, np.ndarray] = dict(model(before))
    arrays[EMBED, "exp_avg"] = numbers(before, H, seed=3)
    arrays[EMBED, "step"] = np.float32(7).reshape(())
    held = Held.of(arrays, groups=(ParamGroup((HEAD, NORM, EMBED), {"lr": 0.1}),))
    made, notes = like(reference(UNTIED)).match_names(held.manifest)
    found = held.read(made)

    def resized(array: np.ndarray) -> np.ndarray:
        rows = np.zeros((V, H), np.float32)
        rows[: min(before, V)] = array[:V]
        return rows

    same(found, {EMBED: resized(arrays[EMBED]), NORM: arrays[NORM], HEAD: resized(arrays[HEAD])})
    np.testing.assert_array_equal(found[StateKey(EMBED, "exp_avg")], resized(arrays[EMBED, "exp_avg"]))
    assert found[StateKey(EMBED, "step")].shape == ()
    wanted = Outcome.DROPPED if before > V else Outcome.DEFAULTED
    assert [(note.outcome, note.count) for note in notes] == [(wanted, abs(before - V))] * 2
    assert f"rows {min(before, V)} to {max(before, V) - 1}" in notes[0].what


def test_a_tie_that_the_source_knows_is_left_out():
    held = Held.of({EMBED: numbers(V, H), NORM: numbers(H)}, aliases={HEAD: EMBED})
    made, notes = like(reference(TIED)).match_names(held.manifest)
    same(held.read(made), {EMBED: numbers(V, H), NORM: numbers(H)})
    assert not made.aliases and not made.must_equal
    assert [(note.outcome, note.what, note.is_loss) for note in notes] == [(Outcome.DROPPED, HEAD, False)]


def test_the_name_that_the_reference_holds_owns_the_tie_with_its_state():
    arrays: dict[Any, np.ndarray] = {HEAD: numbers(V, H), NORM: numbers(H), (HEAD, "exp_avg"): numbers(V, H, seed=2)}
    held = Held.of(arrays, aliases={EMBED: HEAD}, groups=(ParamGroup((HEAD, NORM), {}),))
    made, _ = like(reference(TIED)).match_names(held.manifest)
    same(held.read(made), {EMBED: arrays[HEAD], NORM: arrays[NORM]})
    np.testing.assert_array_equal(held.read(made)[StateKey(EMBED, "exp_avg")], arrays[HEAD, "exp_avg"])
    assert made.groups[0].params == (EMBED, NORM)


def test_a_tie_that_two_tensors_hold_is_left_out_if_their_bits_are_equal():
    arrays: dict[Any, np.ndarray] = {EMBED: numbers(V, H), HEAD: numbers(V, H), NORM: numbers(H)}
    arrays[HEAD, "exp_avg"] = numbers(V, H, seed=9)
    held = Held.of(arrays, groups=(ParamGroup((HEAD, NORM), {}),))
    made, _ = like(reference(TIED, tie_word_embeddings=True)).match_names(held.manifest)
    (equal,) = made.must_equal
    assert HEAD in equal.what and EMBED in equal.what
    entries = [held.manifest.tensors[StateKey(name)] for name in (HEAD, EMBED)]
    assert [equal.first.shards, equal.second.shards] == [each.shards for each in entries]
    assert [*made.tensors] == [StateKey(EMBED), StateKey(NORM), StateKey(EMBED, "exp_avg")]
    assert made.groups[0].params == (EMBED, NORM)
    padded, _ = like(reference(TIED)).match_names(Held.of(model(V + 2)).manifest)
    assert {each.shape for pair in padded.must_equal for each in (pair.first, pair.second)} == {(V, H)}


@pytest.mark.parametrize("has_alias", [True, False])
def test_a_tie_that_the_reference_holds_twice_is_given(has_alias):
    held = Held.of({EMBED: numbers(V + 1, H), NORM: numbers(H)}, aliases={HEAD: EMBED} if has_alias else {})
    config = {} if has_alias else {"text_config": {"tie_word_embeddings": True}}
    made, notes = like(reference(UNTIED, **config)).match_names(held.manifest)
    rows = numbers(V + 1, H)[:V]
    same(held.read(made), {EMBED: rows, NORM: numbers(H), HEAD: rows})
    assert (Outcome.DEFAULTED, HEAD) in [(note.outcome, note.what) for note in notes]


@pytest.mark.parametrize("form", ["alias", "tensor", "none"])
def test_a_name_that_the_reference_gives_to_another_tensor_is_one_here_too(form):
    more = {HEAD: numbers(V, H)} if form == "tensor" else {}
    held = Held.of({EMBED: numbers(V, H), NORM: numbers(H), **more}, aliases={HEAD: EMBED} if form == "alias" else {})
    ref = replace(reference(TIED, tie_word_embeddings=False), aliases={HEAD: EMBED})
    made, notes = like(ref).match_names(held.manifest)
    assert (made.aliases, len(made.must_equal)) == ({HEAD: EMBED}, form == "tensor")
    same(held.read(made), {EMBED: numbers(V, H), NORM: numbers(H)})
    assert not notes


def double(manifest: Manifest) -> transforms.TransformResult:
    return renaming.rename_tensors(manifest, lambda name: name.replace("a.", "b."))


def test_the_only_way_that_leads_to_the_names_is_taken_and_noted():
    held = Held.of({"a.x": numbers(2), "a.y": numbers(3)})
    ref = reference({"b.y": (3,), "b.x": (2,)})
    made, notes = like(ref, UNCHANGED_NAMES, NameMapping("recipe double", double)).match_names(held.manifest)
    same(held.read(made), {"b.y": numbers(3), "b.x": numbers(2)})
    assert [note.what for note in notes] == ["recipe double"]


def swapped(manifest: Manifest) -> transforms.TransformResult:
    return renaming.rename_tensors(manifest, lambda name: {"a.x": "b.y", "a.y": "b.x"}[name])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "model.", "model._orig_mod."])
def test_prefixes_of_wrappers_are_taken_off(prefix):
    held = Held.of({prefix + name: array for name, array in model().items()})
    ref = reference(UNTIED)
    made, _ = ReferenceMatcher(ref, lambda each: iter_mappings(each, ref, has_recipe=False)).match_names(held.manifest)
    same(held.read(made), {name: model()[name] for name in UNTIED})


MISFITS: dict[str, tuple[dict[str, np.ndarray], Reference, str]] = {
    "missing": ({EMBED: numbers(V, H), NORM: numbers(H)}, reference(UNTIED), "the source lacks lm_head.weight"),
    "untied head that the reference lacks": (model(), reference(TIED, tie_word_embeddings=False),
        "the reference lacks lm_head.weight; exclude= leaves out what is not to be written"),
    "multi-token prediction": (model(**{f"model.layers.4.{name}.weight": numbers(H) for name in ("enorm", "hnorm",
        "eh_proj")}), reference(UNTIED),
        "the reference lacks model.layers.4.enorm.weight, model.layers.4.hnorm.weight, model.layers.4.eh_proj.weight;"),
    "vision tower": (model(), reference({**UNTIED,
        **{f"visual.blocks.{n}.{m}.weight": (H,) for n in range(9) for m in "abcdefg"}}),
        "the source lacks 63 tensors such as visual.blocks.0.a.weight"),
    "shape": (model(**{"mlp.weight": numbers(3, H)}), reference({**UNTIED, "mlp.weight": (5, H)}),
        r"mlp.weight is \[3, 4\] in the source and \[5, 4\] in the reference"),
    "rows of no vocabulary": (model(V + 1), replace(reference(UNTIED), config={}),
        r"model.embed_tokens.weight is \[7, 4\] in the source and \[6, 4\] in the reference, lm_head.weight is"),
    "integers": ({**model(), NORM: np.arange(H)}, reference(UNTIED),
        "model.norm.weight is int64 in the source and float32 in the reference"),
    "8 bits": (model(), reference(UNTIED, DType.FLOAT8_E4M3FN, quantization_config={"quant_method": "fp8"}),
        "is float32 in the source and float8_e4m3fn in the reference, .* and 1 more; the reference is quantized: name"),
    "several embeddings": (model(other=numbers(V, H, seed=7)), reference({**TIED, "other": (V, H)},
        tie_word_embeddings=True), "the reference lacks lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "ref", "said"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_one_sentence(arrays, ref, said):
    with pytest.raises(UsageError, match=said) as caught:
        like(ref).match_names(Held.of(arrays).manifest)
    assert str(caught.value).startswith("like='ref' does not fit: ")
    assert len(str(caught.value)) < 600


def of_config(content: dict[str, Any], held: Held) -> Manifest:
    """By a reference that is only a ``config.json``."""
    made, _ = like(Reference("ref", config=content)).match_names(held.manifest)
    return made


def test_a_configuration_alone_says_vocabulary_and_ties():
    held = Held.of({**model(V + 2), HEAD: numbers(V + 2, H)})
    made = of_config({"text_config": {"vocab_size": V}, "tie_word_embeddings": True}, held)
    same(held.read(made), {NORM: numbers(H), EMBED: numbers(V + 2, H)[:V]})
    assert len(made.must_equal) == 1
    tied = Held.of({EMBED: numbers(V, H)}, aliases={HEAD: EMBED})
    made = of_config({"vocab_size": V, "tie_word_embeddings": False}, tied)
    same(tied.read(made), {EMBED: numbers(V, H), HEAD: numbers(V, H)})


def several_ways(_: Path) -> None:
    held = Held.of({"a.x": numbers(2), "a.y": numbers(2, seed=1)})
    tried = (NameMapping("recipe one", double), NameMapping("recipe two", swapped))
    like(reference({"b.x": (2,), "b.y": (2,)}), *tried).match_names(held.manifest)


def nearest(_: Path) -> None:
    held = Held.of({"a.x": numbers(2), "a.y": numbers(3), "a.z": numbers(1)})
    ref = reference({"b.x": (2,), "b.y": (3,)})
    like(ref, UNCHANGED_NAMES, NameMapping("recipe double", double)).match_names(held.manifest)


def factored_state(_: Path) -> None:
    held = Held.of({**model(V + 2), (EMBED, "exp_avg_sq_row"): numbers(V + 2)})
    like(reference(UNTIED)).match_names(held.manifest)


def states_of_a_tie(_: Path) -> None:
    held = Held.of({**model(), **{(name, "exp_avg"): numbers(V, H) for name in (HEAD, EMBED)}})
    like(reference(TIED)).match_names(held.manifest)


def more_experts(_: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    held = Held.of({f"{experts}.gate_up_proj": numbers(2, 6, H), f"{experts}.down_proj": numbers(2, H, 3)})
    ref = Reference("ref", config={"model_type": "qwen3_moe", "num_experts": 4})
    ReferenceMatcher(ref, lambda manifest: iter_mappings(manifest, ref, has_recipe=False)).match_names(held.manifest)


test_what_cannot_be_chosen_or_follow_is_refused = refusal_test(
    ("several ways", several_ways, UsageError,
        r"fits in several ways \(recipe one, recipe two\); choose one with recipe="),
    ("the nearest way", nearest, UsageError, r"does not fit: after recipe double; the reference lacks b\.z"),
    ("factored state", factored_state, UnsupportedError, r"exp_avg_sq_row of model\.embed_tokens\.weight has the shape "
        r"\[8\], and the weight \[8, 4\]: it cannot follow"),
    ("states of a tie", states_of_a_tie, UsageError,
        r"lm_head.weight has optimizer state of its own, so that it is not tied to"),
    ("another vocabulary", lambda _: of_config({"vocab_size": 50_000}, Held.of({"conv.weight": numbers(3, 3)})),
        UsageError, "has a vocabulary of 50,000 tokens, and no tensor of the source has so many"),
    ("more experts", more_experts, UsageError, r"after recipe='qwen2_moe': .* has the shape \[2, ."),
)  # fmt: skip
