"""Runs of DeepSpeed's ``PipelineModule``: files that do not fit each other, and runs that go on without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import MASTER, StateKey
from ckpt_tools.errors import FormatError, IncompleteError, MalformedError, UnsupportedError
from fixtures import launch, universal
from fixtures.corpus import deepspeed_pipeline, make
from fixtures.truth import State
from tests.layouts.contents import contents
from tests.support.damage import TAG, Damage, assert_is_named, copied_run, rename, save, unlink
from tests.support.resumed import assert_goes_on
from tests.support.saved_files import Change, change_file


@pytest.fixture
def native(tmp_path):
    """A copy of a run with ZeRO-1 of 2 stages, whose first and last layer are files of one tied module."""
    return copied_run("deepspeed-pipeline-zero1-bf16", tmp_path)


OPTIM = "bf16_zero_pp_rank_0_mp_rank_0{}_optim_states.pt"

DAMAGED: dict[str, Damage] = {
    "a layer is missing": (unlink("layer_01-model_states.pt"), IncompleteError, r"1\.\S+: no file of a layer"),
    "both tied layers are missing": (
        unlink("layer_00-model_states.pt", "layer_06-model_states.pt"),
        IncompleteError,
        r"tied_modules\.embed\.weight: no file of a layer",
    ),
    "all layers are missing": (
        unlink(*(f"layer_0{number}-model_states.pt" for number in (0, 1, 3, 4, 5, 6))),
        UnsupportedError,
        "there are no files of layers",
    ),
    "a layer has another's name": (
        rename("layer_01-model_states.pt", "layer_08-model_states.pt"),
        MalformedError,
        "it was saved as layer_01",
    ),
    "a layer has no number": (
        rename("layer_01-model_states.pt", "layer_01-old-model_states.pt"),
        UnsupportedError,
        "files of a pipeline's layers under other names",
    ),
    "two files of a layer": (save("layer_1-model_states.pt", {}), MalformedError, "both of layer 1"),
    "a layer that is cut": (
        save("layer_01-model_01-model_states.pt", {}),
        IncompleteError,
        r"layer_00-model_01-model_states.pt: this file of a layer is missing",
    ),
    "a layer that is a list": (save("layer_01-model_states.pt", [1]), MalformedError, "does not contain a dictionary"),
    "a layer with a number": (save("layer_04-model_states.pt", {7: 1}), MalformedError, "has the key 7"),
    "a layer of another shape": (
        save("layer_03-model_states.pt", {"weight": torch.ones(8), "bias": torch.ones(8)}),
        MalformedError,
        "in param_shapes",
    ),
    "a stage is missing": (
        unlink("mp_rank_01_model_states.pt", OPTIM.format(1)),
        IncompleteError,
        "mp_rank_01 is missing",
    ),
    "a stage's model file is missing": (unlink("mp_rank_01_model_states.pt"), IncompleteError, "mp_rank_01_model"),
    "a stage's optimizer is missing": (unlink(OPTIM.format(1)), IncompleteError, "optimizer's file of this stage"),
    "all optimizers are missing": (
        unlink(OPTIM.format(0), OPTIM.format(1)),
        IncompleteError,
        "optimizer's file of this stage",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_files_that_do_not_fit_are_an_error(name, native):
    assert_is_named(DAMAGED[name], native)


def test_the_ranks_of_all_stages_are_counted(native):
    [found] = ckpt_tools.ls(native).checkpoints
    assert found.world_size == ckpt_tools.inspect(native).world_size == 2


def test_stages_of_two_steps_are_refused(native):
    change_file(native / TAG / "mp_rank_01_model_states.pt", lambda content: content.update(global_steps=3))
    with pytest.raises(MalformedError, match="its global_steps is 3, but that of"):
        ckpt_tools.inspect(native)


def test_a_stage_that_holds_a_model_is_refused(native):
    change_file(native / TAG / "mp_rank_01_model_states.pt", lambda content: content.update(module={}))
    with pytest.raises(MalformedError, match="there are files of a pipeline's layers beside it"):
        ckpt_tools.inspect(native)


def test_a_frozen_layer_is_not_taken_for_a_tied_one(native):
    """It has the same names and shapes, and other elements than the masters."""
    torch.save(
        {"weight": torch.ones(16, 7, dtype=torch.bfloat16)}, native / "global_step4" / "layer_02-model_states.pt"
    )
    manifest, found = contents(native)
    assert manifest.tensors[StateKey("2.weight")].shape == (16, 7)
    assert found[StateKey("2.weight")] != found[StateKey("tied_modules.embed.weight")]
    (native / "global_step4" / "layer_00-model_states.pt").unlink()
    (native / "global_step4" / "layer_06-model_states.pt").unlink()
    with pytest.raises(IncompleteError, match=r"tied_modules\.embed\.weight"):
        contents(native)


def test_groups_that_differ_between_stages_stay_apart(native):
    def change(content: Any) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["weight_decay"] = 0.5

    change_file(native / TAG / OPTIM.format(1), change)
    manifest = contents(native)[0]
    assert [len(group.params) for group in manifest.groups] == [3, 3, 2, 1]
    assert any("differ in them" in note.why for note in manifest.notes)


def test_what_the_stages_have_for_themselves_is_noted(native):
    change_file(native / TAG / "mp_rank_01_model_states.pt", lambda content: content.update(epoch=9))
    notes = [f"{note.what}: {note.why}" for note in contents(native)[0].notes]
    assert any("client_state of the other stages" in note for note in notes), notes


def test_plain_numbers_of_two_stages_stay_apart(native):
    """DeepSpeed's own optimizers count in Python."""

    def count(value: int) -> Change:
        def change(content: Any) -> None:
            for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                state["count"] = value

        return change

    change_file(native / TAG / OPTIM.format(0), count(4))
    change_file(native / TAG / OPTIM.format(1), count(5))
    found = contents(native)[1]
    assert found[StateKey("1.up.weight", "count")] != found[StateKey("5.up.weight", "count")]


def test_the_mapping_of_a_run_without_zero_has_to_fit(tmp_path):
    run = copied_run("deepspeed-pipeline-bf16", tmp_path)

    def change(content: Any) -> None:
        group = content["optimizer_state_dict"]["param_slice_mappings"][0]
        group["tied_modules.embed.weight"].start += 1

    change_file(run / TAG / OPTIM.format(0), change)
    with pytest.raises(MalformedError, match="param_slice_mappings do not fit"):
        contents(run)


# The names of the whole model


@pytest.fixture
def named(tmp_path):
    """A copy of a run that says what its layers are called in the whole model."""
    return copied_run("deepspeed-pipeline-named", tmp_path)


def names(change: Callable[[Any], object]) -> Change:
    return lambda content: change(content["pipeline_names"])


WRONG_NAMES: dict[str, tuple[Change, type[FormatError], str]] = {
    "not a dict": (
        lambda content: content.update(pipeline_names=[1]),
        MalformedError,
        "a list of names for each layer",
    ),
    "a name that is no list": (names(lambda found: found.update({"1": "body.0"})), MalformedError, "a list of names"),
    "an empty list": (names(lambda found: found.update({"1": []})), MalformedError, "a list of names"),
    "an empty name": (names(lambda found: found.update({"1": [""]})), MalformedError, "a list of names"),
    "a layer without a name": (names(lambda found: found.pop("3")), MalformedError, "3: .* has no name for this layer"),
    "a layer that is not there": (
        names(lambda found: found.update({"9": ["body.2"]})),
        IncompleteError,
        "9: .* names this layer, and no file contains it",
    ),
    "a name twice": (
        names(lambda found: found.update({"5": ["body.0"]})),
        MalformedError,
        "body.0: .* this name twice",
    ),
    "a name within another": (
        names(lambda found: found.update({"3": ["body.0.up"]})),
        MalformedError,
        "gives two tensors one name",
    ),
}


@pytest.mark.parametrize("case", WRONG_NAMES)
def test_names_that_do_not_fit_the_layers_are_an_error(case, named):
    change, kind, text = WRONG_NAMES[case]
    change_file(named / TAG / "mp_rank_00_model_states.pt", change)
    with pytest.raises(kind, match=text):
        ckpt_tools.inspect(named)


def test_a_run_that_says_its_names_shows_a_layer_of_frozen_parameters_that_is_missing(named):
    """Which nothing else in the checkpoint would show."""
    for stage in (0, 1):
        change_file(
            named / TAG / f"mp_rank_0{stage}_model_states.pt", names(lambda found: found.update({"2": ["frozen"]}))
        )
    torch.save({"weight": torch.ones(3)}, named / "global_step4" / "layer_02-model_states.pt")
    assert StateKey("frozen.weight") in contents(named)[0].tensors
    (named / "global_step4" / "layer_02-model_states.pt").unlink()
    with pytest.raises(IncompleteError, match="no file contains it"):
        ckpt_tools.inspect(named)


def test_other_formats_have_the_names_and_not_the_entry(named, tmp_path):
    ckpt_tools.convert(named, tmp_path / "out", to="zero2", world_size=3)
    assert ckpt_tools.verify(named, tmp_path / "out").equal
    manifest = ckpt_tools.open(tmp_path / "out").manifest
    assert dict(manifest.aliases) == {"head.weight": "embed.weight"}
    unnamed = ckpt_tools.open(make("deepspeed-pipeline-zero1-fp32").source).manifest
    assert manifest.extra["client_state"].keys() == unnamed.extra["client_state"].keys()


# Without ZeRO, with an optimizer of named parameters


@pytest.fixture
def bare(tmp_path):
    """A copy of a run without ZeRO whose optimizer has names for its parameters."""
    return copied_run("deepspeed-pipeline-fp32-named", tmp_path)


def test_a_stage_whose_optimizer_has_no_names_leaves_out_the_optimizer(bare):
    """With a note, for all stages alike. Which layers are tied is then not known either."""

    def forget(content: Any) -> None:
        for group in content["optimizer"]["param_groups"]:
            group.pop("param_names")

    for stage in (0, 1):
        change_file(bare / TAG / f"mp_rank_0{stage}_model_states.pt", lambda content: content.pop("pipeline_names"))
    assert {*ckpt_tools.inspect(bare).optimizer_slots} == {"exp_avg", "exp_avg_sq", "step"}
    change_file(bare / TAG / "mp_rank_01_model_states.pt", forget)
    found = ckpt_tools.inspect(bare)
    assert found.optimizer_slots == ()
    assert any("numbers the parameters of each stage" in note.why for note in found.notes)


def test_an_optimizer_of_other_shapes_than_the_layers_is_refused(bare):
    def change(content: Any) -> None:
        for group in content["optimizer"]["param_groups"]:
            group["param_names"].reverse()

    change_file(bare / TAG / "mp_rank_00_model_states.pt", change)
    with pytest.raises(MalformedError, match="shapes"):
        ckpt_tools.inspect(bare)


def test_without_names_of_the_whole_model_a_missing_layer_still_shows(bare):
    for stage in (0, 1):
        change_file(bare / TAG / f"mp_rank_0{stage}_model_states.pt", lambda content: content.pop("pipeline_names"))
    (bare / "global_step4" / "layer_03-model_states.pt").unlink()
    with pytest.raises(IncompleteError, match="no file of a layer contains it"):
        ckpt_tools.inspect(bare)


# Runs that go on

Saved = tuple[Path, State, list[float]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, *deepspeed_pipeline.run_pipeline(folder, 4, 1, "fp32", "first")


def check(found: Any, saved: Saved) -> None:
    (resumed, losses), (_, state, next_losses) = found, saved
    assert_goes_on(resumed, losses, state, next_losses)


@pytest.mark.parametrize("to", ["zero2", "zero3", "universal"])
def test_the_run_goes_on_without_a_pipeline(to, saved, tmp_path):
    options: dict[str, Any] = {} if to == "universal" else {"world_size": 3}
    ckpt_tools.convert(saved[0], tmp_path / "out", to=to, **options)  # type: ignore[arg-type]
    stage = 2 if to == "universal" else int(to[-1])
    arguments = (str(tmp_path / "out"), stage, "fp32", "first", to == "universal")
    check(launch.pool(3).run(deepspeed_pipeline.load_whole, *arguments)[0], saved)


@pytest.mark.parametrize("to", ["dcp", "universal", "zero1", "safetensors"])
def test_other_formats_hold_the_same(to, tmp_path):
    source = make("deepspeed-pipeline-zero1-bf16").source
    ckpt_tools.convert(source, tmp_path / "out", to=to)  # type: ignore[arg-type]
    report = ckpt_tools.verify(source, tmp_path / "out")
    assert report.equal, report.differences


def test_deepspeeds_own_script_finds_the_same(tmp_path):
    """What it writes is refused by its name: buffers and frozen weights are nowhere in it."""
    made = make("deepspeed-pipeline-zero1-fp32")
    launch.pool(1).run(universal.convert, made.source, tmp_path, True, False)
    with pytest.raises(
        UnsupportedError, match=r"universal checkpoint of a pipeline.*leaves out the buffers.*convert the native"
    ):
        ckpt_tools.inspect(tmp_path)
    found = contents(made.source)[1]
    masters = [key.fqn for key in found if key.slot == MASTER]
    for fqn in masters:
        (path,) = tmp_path.glob(f"*/zero/{fqn}/fp32.pt")
        theirs = torch.load(path, weights_only=False)["param"]
        assert theirs.detach().numpy().tobytes() == found[StateKey(fqn, MASTER)][2], fqn
    assert len(masters) == len(list(tmp_path.glob("*/zero/*/fp32.pt")))
    files = [torch.load(path, weights_only=False) for path in tmp_path.glob("*/mp_rank_*")]
    assert len(files) == deepspeed_pipeline.STAGES and all(file["module"] is None for file in files)
    assert not list(tmp_path.glob("*/layer_*"))
