"""Runs of DeepSpeed's ``PipelineModule``: files that do not fit each other, and runs that go on without a pipeline."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.zero_reader.missing_layers import LayerShapes, OptimizedParameter
from ckpt_tools.formats.deepspeed.zero_reader.missing_layers import check_no_layer_missing as check_layers
from fixtures import launch, universal
from fixtures.corpus import deepspeed_pipeline, deepspeed_pipeline_cut, make
from tests.layouts.contents import contents
from tests.support.damage import TAG, Harm, changed, copied_run, damage_test, rename, save, swap, unlink, updated
from tests.support.ranks import for_ranks
from tests.support.refusals import refusal_test
from tests.support.resumed import assert_goes_on

NATIVE = "deepspeed-pipeline-zero1-bf16"
"""A run with ZeRO-1 of 2 stages, whose first and last layer are files of one tied module."""
MODEL, OPTIM = "mp_rank_0{}_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_0{}_optim_states.pt"
LAYER = "layer_0{}-model_states.pt"
MISSING, WRONG, OTHER = IncompleteError, MalformedError, UnsupportedError
TIED = r"tied_modules\.embed\.weight"
ONES = {"weight": torch.ones(8), "bias": torch.ones(8)}
FROZEN = {"weight": torch.ones(16, 7, dtype=torch.bfloat16)}


def several(*harms: Harm) -> Harm:
    return lambda tag: [harm(tag) for harm in harms]


def shift(content: Any) -> None:
    content["optimizer_state_dict"]["param_slice_mappings"][0]["tied_modules.embed.weight"].start += 1


test_files_that_do_not_fit_are_an_error = damage_test(
    NATIVE,
    ("a layer is missing", unlink(LAYER.format(1)), MISSING, r"1\.\S+: no file of a layer"),
    ("both tied layers are missing", unlink(LAYER.format(0), LAYER.format(6)), MISSING, f"{TIED}: no file of a layer"),
    ("tied, beside a frozen one", several(save(LAYER.format(2), FROZEN), unlink(LAYER.format("[06]"))), MISSING, TIED),
    ("all layers are missing", unlink("layer_*"), OTHER, "there are no files of layers"),
    ("a layer has another's name", rename(LAYER.format(1), LAYER.format(8)), WRONG, "it was saved as layer_01"),
    ("a layer has no number", rename(LAYER.format(1), "layer_01-old-model_states.pt"), OTHER, "under other names"),
    ("two files of a layer", save("layer_1-model_states.pt", {}), WRONG, "both of layer 1"),
    ("a layer that is cut", save("layer_01-model_01-model_states.pt", {}), MISSING, "layer_00-model_01.*this file of"),
    ("a layer that is a list", save(LAYER.format(1), [1]), WRONG, "does not contain a dictionary"),
    ("a layer with a number", save(LAYER.format(4), {7: 1}), WRONG, "has the key 7"),
    ("a layer of another shape", save(LAYER.format(3), ONES), WRONG, "in param_shapes"),
    ("a stage is missing", unlink(MODEL.format(1), OPTIM.format(1)), MISSING, "mp_rank_01 is missing"),
    ("a stage's model file is missing", unlink(MODEL.format(1)), MISSING, "mp_rank_01_model"),
    ("a stage's optimizer is missing", unlink(OPTIM.format(1)), MISSING, "optimizer's file of this stage"),
    ("all optimizers are missing", unlink("bf16_*"), MISSING, "optimizer's file of this stage"),
    ("stages of two steps", updated(MODEL.format(1), global_steps=3), WRONG, "its global_steps is 3, but that of"),
    ("a stage with a model", updated(MODEL.format(1), module={}), WRONG, "files of a pipeline's layers beside it"),
)
MOVED = ("another place", changed(OPTIM.format(0), shift), WRONG, "param_slice_mappings do not fit")
test_the_mapping_of_a_run_without_zero_has_to_fit = pytest.mark.extended(damage_test("deepspeed-pipeline-bf16", MOVED))


@pytest.fixture
def native(tmp_path):
    return copied_run(NATIVE, tmp_path)


def test_the_ranks_of_all_stages_are_counted(native):
    [found] = ckpt_tools.ls(native).checkpoints
    assert found.world_size == ckpt_tools.inspect(native).world_size == 2


def test_a_frozen_layer_is_not_taken_for_a_tied_one(native):
    """It has the same names and shapes, and other elements than the masters."""
    save(LAYER.format(2), FROZEN)(native / TAG)
    manifest, found = contents(native)
    assert manifest.tensors[StateKey("2.weight")].shape == (16, 7)
    assert found[StateKey("2.weight")] != found[StateKey("tied_modules.embed.weight")]


def test_groups_that_differ_between_stages_stay_apart(native):
    def change(content: Any) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["weight_decay"] = 0.5

    changed(OPTIM.format(1), change)(native / TAG)
    manifest = contents(native)[0]
    assert [len(group.params) for group in manifest.groups] == [3, 3, 2, 1]
    assert any("differ in them" in note.why for note in manifest.notes)


# The names of the whole model, which a run may say

NAMED = "deepspeed-pipeline-fp32-named"
"""A run without ZeRO, whose optimizer has names for its parameters."""


def names(change: Callable[[Any], object], *stages: int) -> Harm:
    return several(*(changed(MODEL.format(n), lambda own: change(own["pipeline_names"])) for n in stages or (0,)))


def named(**found: Any) -> Harm:
    return names(lambda names: names.update({name.removeprefix("_"): each for name, each in found.items()}))


def with_frozen_layer(tag: Path) -> None:
    names(lambda found: found.update({"2": ["frozen"]}), 0, 1)(tag)
    save(LAYER.format(2), {"weight": torch.ones(3)})(tag)


test_names_that_do_not_fit_the_layers_are_an_error = damage_test(
    NAMED,
    ("not a dict", updated(MODEL.format(0), pipeline_names=[1]), WRONG, "a list of names for each layer"),
    ("a name that is no list", named(_1="body.0"), WRONG, "a list of names"),
    ("an empty list", named(_1=[]), WRONG, "a list of names"),
    ("an empty name", named(_1=[""]), WRONG, "a list of names"),
    ("a layer without a name", names(lambda found: found.pop("3")), WRONG, "3: .* has no name for this layer"),
    ("a layer that is not there", named(_9=["body.2"]), MISSING, "9: .* names this layer, and no file contains it"),
    ("a name twice", named(_5=["body.0"]), WRONG, "body.0: .* this name twice"),
    ("a name within another", named(_3=["body.0.up"]), WRONG, "gives two tensors one name"),
    # Which nothing else in the checkpoint would show.
    ("a frozen layer", several(with_frozen_layer, unlink(LAYER.format(2))), MISSING, "no file contains it"),
)


@pytest.mark.extended
def test_other_formats_have_the_names_and_not_the_entry(tmp_path):
    run = copied_run("deepspeed-pipeline-named", tmp_path)
    with_frozen_layer(run / TAG)
    assert StateKey("frozen.weight") in contents(run)[0].tensors
    named = make("deepspeed-pipeline-named").source
    ckpt_tools.convert(named, tmp_path / "out", to="zero2", world_size=3)
    assert ckpt_tools.verify(named, tmp_path / "out").equal
    manifest = ckpt_tools.open(tmp_path / "out").manifest
    assert dict(manifest.aliases) == {"head.weight": "embed.weight"}
    assert "pipeline_names" not in manifest.extra["client_state"]


# Without ZeRO, with an optimizer of named parameters

without_names = several(*(changed(MODEL.format(n), lambda content: content.pop("pipeline_names")) for n in (0, 1)))


def reversed_names(content: Any) -> None:
    for group in content["optimizer"]["param_groups"]:
        group["param_names"].reverse()


test_without_zero_files_that_do_not_fit_are_an_error = damage_test(
    NAMED,
    ("an optimizer of other shapes", changed(MODEL.format(0), reversed_names), WRONG, "shapes"),
    ("a missing layer", several(without_names, unlink(LAYER.format(3))), MISSING, "no file of a layer contains it"),
)


def test_a_stage_whose_optimizer_has_no_names_leaves_out_the_optimizer(tmp_path):
    """With a note, for all stages alike. Which layers are tied is then not known either."""

    def forget(content: Any) -> None:
        for group in content["optimizer"]["param_groups"]:
            group.pop("param_names")

    bare = copied_run(NAMED, tmp_path)
    without_names(bare / TAG)
    assert {*ckpt_tools.inspect(bare).optimizer_slots} == {"exp_avg", "exp_avg_sq", "step"}
    changed(MODEL.format(1), forget)(bare / TAG)
    found = ckpt_tools.inspect(bare)
    assert found.optimizer_slots == ()
    assert any("numbers the parameters of each stage" in note.why for note in found.notes)


# Layers that tensor parallelism cuts too

PART = "layer_{:02d}-model_{:02d}-model_states.pt"
CUT_OPTIM = OPTIM.removeprefix("bf16_")
parts_of_rank_1 = unlink(*(PART.format(layer, 1) for layer in (0, 1, 3, 4)))
frozen_parts = several(*(save(PART.format(2, part), {"weight": torch.ones(9, 6)}) for part in range(2)))


def three_parts(tag: Path) -> None:
    for layer in (0, 1, 3, 4):
        content = torch.load(tag / PART.format(layer, 0), weights_only=False)
        for number in (1, 2):
            torch.save(content, tag / PART.format(layer, number))


test_parts_that_do_not_fit_are_an_error = pytest.mark.extended(
    damage_test(
        "deepspeed-pipeline-tp-zero1-fp32",
        ("a part of a layer", unlink(PART.format(3, 1)), MISSING, r"layer_03-model_01\S+: this file of a layer"),
        ("a layer", unlink(PART.format(3, 0), PART.format(3, 1)), MISSING, r"3\.\S+: no file of a layer"),
        ("the last rank", unlink(MODEL.format(3), CUT_OPTIM.format(3)), MISSING, "mp_rank_03 is missing"),
        ("an optimizer", unlink(CUT_OPTIM.format(2)), MISSING, r"mp_rank_02\S+: .*optimizer's file of this stage"),
        ("all parts of a rank", parts_of_rank_1, WRONG, "both have this layer"),
        ("two swapped parts", swap(PART.format(1, 0), PART.format(1, 1)), WRONG, "saved as layer_01-model_01"),
        ("the rules", changed(MODEL.format(0), lambda c: c.pop("universal_checkpoint_info")), OTHER, "no universal"),
        ("a frozen layer", frozen_parts, OTHER, "it has only frozen parameters"),
        ("more parts than ranks", three_parts, WRONG, "cut into 3 parts, and the 4 parts of the model"),
    )
)


# Runs that go on


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, *deepspeed_pipeline.run_pipeline(folder, 4, 1, "fp32", "first")


@pytest.mark.extended
@pytest.mark.parametrize("to", ["zero2", "universal", pytest.param("zero3", marks=pytest.mark.soak)])
def test_the_run_goes_on_without_a_pipeline(to, saved, tmp_path):
    folder, state, losses = saved
    ckpt_tools.convert(folder, tmp_path / "out", to=to, **for_ranks(to, 3))
    arguments = (str(tmp_path / "out"), 3 if to == "zero3" else 2, "fp32", to == "universal")
    resumed, found = launch.pool(3).run(deepspeed_pipeline.load_whole, *arguments)[0]
    assert_goes_on(resumed, found, state, losses)


@pytest.mark.extended
def test_the_run_goes_on_without_a_pipeline_and_tensor_parallelism(tmp_path):
    state, losses = deepspeed_pipeline_cut.run_cut(tmp_path / "run", 1, "fp32")
    ckpt_tools.convert(tmp_path / "run", tmp_path / "out", to="zero2", world_size=3)
    resumed, found = launch.pool(3).run(deepspeed_pipeline_cut.load_whole, str(tmp_path / "out"), 2, "fp32")[0]
    assert_goes_on(resumed, found, state, losses)
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in state.weights.items())


@pytest.mark.extended
def test_what_deepspeeds_own_script_writes_is_refused(tmp_path):
    """Buffers and frozen weights are nowhere in it."""
    made = make("deepspeed-pipeline-zero1-fp32")
    launch.pool(1).run(universal.convert, made.source, tmp_path, True, False)
    words = r"universal checkpoint of a pipeline.*leaves out the buffers.*convert the native"
    with pytest.raises(UnsupportedError, match=words):
        ckpt_tools.inspect(tmp_path)


# Layers without ZeRO whose file is missing, as far as the optimizers of the stages show it

A, B, V = (4, 4), (4,), (16, 4)

UNKNOWN = OptimizedParameter(None, 0, b"")


def of(*shapes: Shape, tied: Mapping[Shape, bytes] | None = None) -> list[OptimizedParameter]:
    """Parameters with moments of their own, but for tied ones."""
    return [
        OptimizedParameter(shape, 4, (tied or {}).get(shape, f"{id(shapes)} {number}".encode()))
        for number, shape in enumerate(shapes)
    ]


def flat(numel: int, head: bytes) -> OptimizedParameter:
    return OptimizedParameter(None, numel, head)


def layers(shapes: Mapping[int, Sequence[Shape]], pins: Mapping[int, int] | None = None) -> list[LayerShapes]:
    return [LayerShapes(number, Counter(each), (pins or {}).get(number)) for number, each in shapes.items()]


SHARED = {V: b"tied"}

FITTING: dict[str, tuple[list[LayerShapes], list[list[OptimizedParameter]]]] = {
    "two stages": (layers({0: [A, B], 1: [A, B], 2: [A]}), [of(A, B, A, B), of(A)]),
    "frozen layers": (layers({0: [A], 1: [A], 2: [A], 3: [A]}), [of(A), of(A)]),
    "tied, with two files": (layers({0: [V], 1: [A], 2: [V]}), [of(V, tied=SHARED), of(V, A, tied=SHARED)]),
    "tied, with the first file": (layers({0: [V], 1: [A]}), [of(V, tied=SHARED), of(V, A, tied=SHARED)]),
    "states that are not there": (layers({0: [A, B], 1: [A]}), [[*of(A), UNKNOWN], [UNKNOWN]]),
    "flat groups": (layers({0: [A], 1: [B]}), [[flat(16, b"0")], [flat(4, b"1")]]),
    "flat groups that begin with a tied one": (layers({0: [V], 1: [B]}), [[flat(64, b"0")], [flat(68, b"0")]]),
    "buffers say the stage": (layers({0: [A], 1: [A], 2: [A]}, {1: 0}), [of(A), of(A)]),
}

LACKING: dict[str, tuple[list[LayerShapes], list[list[OptimizedParameter]], str]] = {
    "the first": (layers({1: [B], 2: [A]}), [of(A, B), of(A)], r"1 parameter of shape \[4, 4\].*layer 0"),
    "one between": (layers({0: [A], 2: [A]}), [of(A, A), of(A)], r"shape \[4, 4\].*none of layer 1 and after layer 2$"),
    "the last": (layers({0: [A], 1: [A]}), [of(A, A), of(A, B)], r"shape \[4\].*none after layer 1$"),
    "both tied": (layers({1: [A], 2: [B]}), [of(V, A, tied=SHARED), of(V, B, tied=SHARED)],
        r"1 parameter of shape \[16"),
    "a tied one whose shape another layer has": (layers({1: [V], 2: [B]}),
        [of(V, tied=SHARED) + of(V), of(V, B, tied=SHARED)],
        r"1 parameter of shape \[16, 4\]"),
    "one of the stage, and frozen ones lie in another": (layers({1: [B], 2: [A], 3: [A]}, {2: 1}), [of(A, B), of(A)],
        r"shape \[4, 4\].*none of layer 0$"),
    "states that are not there": (layers({0: [A]}), [[UNKNOWN, UNKNOWN], []], "1 parameter more"),
    "flat groups": (layers({0: [A]}), [[flat(16, b"0")], [flat(4, b"1")]], "4 elements more"),
    "tensors of a layer": (layers({0: [A], 1: [B]}, {1: 1}), [of(A, A), of(B)], "or one of them lacks tensors"),
}  # fmt: skip


def check(have: list[LayerShapes], stages: list[list[OptimizedParameter]]) -> None:
    check_layers(have, [(f"mp_rank_{stage:02d}", own) for stage, own in enumerate(stages)])


@pytest.mark.parametrize(("have", "stages"), FITTING.values(), ids=FITTING)
def test_layers_that_fit(have, stages):
    check(have, stages)


test_a_missing_layer_is_an_error = refusal_test(
    *((name, lambda _, row=row: check(*row), MISSING, words) for name, (*row, words) in LACKING.items())
)


# Layer 3 has two vectors, and a frozen one of their shape lies in its stage.
test_a_file_that_is_missing = damage_test(
    "deepspeed-pipeline-fp32",
    *((f"layer {layer}", unlink(LAYER.format(layer)), MISSING,
        rf"mp_rank_0{stage}.*file of a layer is missing") for layer, stage in ((0, 0), (3, 0), (6, 1))),
)  # fmt: skip
