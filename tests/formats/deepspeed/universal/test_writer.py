"""What we write as a universal checkpoint, judged by DeepSpeed's own load in stages 1, 2 and 3, and by torch.load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.value_json import value_to_json
from ckpt_tools.errors import UnsafeError, UnsupportedError, UsageError
from ckpt_tools.formats.builtin import DcpFormat, DeepSpeedFormat, UniversalFormat
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from fixtures import launch, recipe, zero
from tests.formats.deepspeed import by_hand
from tests.formats.deepspeed.by_hand import Checkpoint, loaded, notes_about
from tests.support.manifests import gathered, groups_of
from tests.support.refusals import refusal_test
from tests.support.sweep import extended
from tests.support.truth import MASTER, WEIGHT, Truth, assert_same_bits

READERS = {"fsdp2": DcpFormat(), "zero": DeepSpeedFormat(), "universal": UniversalFormat()}


def read(kind: str, folder: Path) -> Manifest:
    reader = next(reader for prefix, reader in READERS.items() if kind.startswith(prefix))
    return reader.read(Source.open(LocalStore(folder)), ReadOptions())


def layout_of(manifest: Manifest, tag: str | None = None) -> Layout:
    return UniversalFormat().layout(manifest, WriteOptions(tag=tag))


def write(manifest: Manifest, source: Path, out: Path) -> Layout:
    layout = layout_of(manifest)
    out.mkdir()
    by_hand.write(manifest, layout, LocalStore(source), LocalStore(out))
    return layout


# Judged by DeepSpeed

RESUMED = ("fsdp2 2 zero1-fp32 2", "fsdp2 2 zero2-fp32 3")
IN_STAGE_3 = ("zero1-fp32 3 zero3-fp32 3", "fsdp2 2 zero3-fp32 4")


@pytest.mark.parametrize("cell", [*RESUMED, *extended(*IN_STAGE_3, "universal-zero3-fp32 1 zero1-fp32 4")])
def test_a_run_goes_on_in_any_stage_at_any_world_size(cell, checkpoint, resume, tmp_path):
    """From one folder a run that starts from other weights becomes the one that was saved."""
    kind, from_ranks, flavour, to_ranks = cell.split()
    made = checkpoint(kind, "plain", int(from_ranks))
    write(read(kind, made.checkpoint), made.checkpoint, tmp_path / "out")
    truth, resumed = Truth.load(made.root), resume(f"universal-{flavour}", "plain", tmp_path / "out", int(to_ranks))
    assert_same_bits(trained(truth, truth.slot("exp_avg")), trained(resumed, truth.slot("exp_avg")))
    assert of_torch(resumed.facts["groups"]) == truth.facts["groups"]
    assert_same_facts(truth, resumed, ("scheduler", "global_step"), exactly=from_ranks == to_ranks)


def assert_same_facts(truth: Truth, resumed: Truth, facts: tuple[str, ...], *, exactly: bool) -> None:
    """And the same losses, up to another order of additions where the number of ranks is another."""
    for fact in facts:
        assert resumed.facts[fact] == truth.facts[fact], fact
    tolerance = 0 if exactly else 1e-6
    np.testing.assert_allclose(resumed.facts["losses"], truth.facts["losses"], rtol=tolerance, atol=0)


def of_torch(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups without the option that DeepSpeed's own Adams need and torch's do not know."""
    options = [{name: value for name, value in g["options"].items() if name != "bias_correction"} for g in groups]
    return [{**group, "options": option} for group, option in zip(groups, options, strict=True)]


def trained(truth: Truth, names: Mapping[str, Any]) -> dict[tuple[str, str], np.ndarray]:
    """The state of what is trained; masters, which FSDP2 has not, under the name of the weights."""
    masters = {(fqn, MASTER): tensor for fqn, tensor in truth.best_weights().items() if fqn in names}
    return {key: t for key, t in truth.tensors.items() if key[0] in names and key[1] not in (WEIGHT, MASTER)} | masters


def resume_as_made(flavour: str, case: str, checkpoint: str, folder: str) -> None:
    """Runs on every rank: a job that makes frozen weights and buffers itself, as the saved one had made them."""
    run = zero.Run(recipe.CASES[case], zero.FLAVOURS[flavour], seed=1, load_universal=True)
    path, client_state = run.engine.load_checkpoint(checkpoint)
    assert path is not None
    truth = run.gather()
    truth.facts["client_state"] = {name: client_state.get(name) for name in recipe.CLIENT_STATE}
    truth.facts["losses"] = run.train(recipe.STEPS_AFTER)
    truth.facts["last_steps"] = sorted({t.item() for (_, slot), t in run.gather().tensors.items() if slot == "step"})
    if dist.get_rank() == 0:
        truth.write(Path(folder))
    run.close()


def resumed_as_made(flavour: str, case: str, out: Path, world_size: int) -> Truth:
    folder = out.with_name("resumed")
    launch.pool(world_size).run(resume_as_made, flavour, case, str(out), str(folder))
    return Truth.load(folder)


AS_MADE = ("zero2-bf16 awkward 3 zero1-bf16 3",)
MORE_AS_MADE = ("zero3-fp16 awkward 2 zero2-fp16 3", "zero2-fp32 empty 3 zero1-fp32 3")


@pytest.mark.parametrize("cell", [*AS_MADE, *extended(*MORE_AS_MADE)])
def test_several_groups_and_16_bit_models_go_on_in_stages_1_and_2(cell, checkpoint, tmp_path):
    kind, case, from_ranks, flavour, to_ranks = cell.split()
    made = checkpoint(kind, case, int(from_ranks))
    write(read(kind, made.checkpoint), made.checkpoint, tmp_path / "out")
    truth, resumed = Truth.load(made.root), resumed_as_made(flavour, case, tmp_path / "out", int(to_ranks))
    assert_same_bits(truth.tensors, resumed.tensors)
    facts = ("groups", "scheduler", "global_step", "skipped_steps", "client_state", "loss_scaler")
    assert_same_facts(truth, resumed, facts, exactly=from_ranks == to_ranks)


def test_stage_3_gets_of_several_groups_what_they_share(checkpoint, tmp_path):
    """Weights, masters, moments and steps come whole. Options that differ stay as the job set them, and DeepSpeed's one
    step tensor for all groups is counted up once for each of them."""
    made = checkpoint("zero2-bf16", "awkward", 2)
    layout = write(read("zero2-bf16", made.checkpoint), made.checkpoint, tmp_path / "out")
    truth, resumed = Truth.load(made.root), resumed_as_made("zero3-bf16", "awkward", tmp_path / "out", 3)
    assert_same_bits(truth.tensors, resumed.tensors)
    options = [group["options"] for group in resumed.facts["groups"]]
    assert [group["weight_decay"] for group in options] == [0.1, 0.0, 0.01]
    assert {group["betas"][1] for group in options} == {0.95}
    assert resumed.facts["last_steps"] == [recipe.STEPS_BEFORE + 3 * recipe.STEPS_AFTER]
    (note,) = notes_about(layout, "3 parameter groups in stage 3")
    assert "initial_lr, lr, weight_decay stay" in note.why and "zero3 restores" in note.why


# Judged by our own reader

READ_BACK = ("fsdp2 awkward 3", "fsdp2-bf16 awkward 2", "zero3-fp16 awkward 2", "zero1-fp32 sgd 2")
MORE_READ_BACK = ("zero2-fp32 lone 3", "universal-zero3-fp32 awkward 3")


@pytest.mark.parametrize("cell", [*READ_BACK, *extended(*MORE_READ_BACK)])
def test_reads_back_what_it_wrote(cell, checkpoint, tmp_path):
    """Buffers and frozen weights too, which DeepSpeed does not load."""
    kind, case, world_size = cell.split()
    made = checkpoint(kind, case, int(world_size))
    source = read(kind, made.checkpoint)
    write(source, made.checkpoint, tmp_path / "out")
    back = read("universal", tmp_path / "out")
    want, got = _widened(gathered(made.checkpoint, source)), gathered(tmp_path / "out", back)
    masters = {key for key in got if key[1] == MASTER}
    assert_same_bits({key: t for key, t in want.items() if key in got}, {k: t for k, t in got.items() if k in want})
    assert masters == {key for key in got if (key[0], "exp_avg") in got or (key[0], "momentum_buffer") in got} & masters
    assert want.keys() <= got.keys() and got.keys() - want.keys() <= masters
    assert back.aliases == source.aliases
    assert of_torch(groups_of(back)) == groups_of(source)
    assert back.step == source.step == recipe.STEPS_BEFORE
    for name in ("lr_scheduler", "loss_scaler"):
        assert value_to_json(back.extra.get(name)) == value_to_json(source.extra.get(name))


def _widened(tensors: Mapping[tuple[str, str], np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    """Optimizer state as fp32, which is all that DeepSpeed knows."""
    return {key: t if key[1] == WEIGHT or t.ndim == 0 else t.astype(np.float32) for key, t in tensors.items()}


# Judged by torch.load, from manifests made by hand


def adam(*names: str) -> Checkpoint:
    found = Checkpoint()
    for name in names or ("w",):
        found.adam(name, 3, 2)
    return found


def manifest_of(made: Checkpoint, *groups: Any, **others: Any) -> Manifest:
    every = tuple(key.fqn for key, entry in made.tensors.items() if entry.kind is Kind.PARAMETER)
    return made.manifest(*groups or (ParamGroup(every, {"lr": 0.1}),), **others)


def written(made: Checkpoint, *groups: Any, tag: str | None = None, **others: Any) -> tuple[dict[str, bytes], Layout]:
    manifest = manifest_of(made, *groups, **others)
    layout = layout_of(manifest, tag)
    return made.files(manifest, layout), layout


def why(layout: Layout, what: str) -> str:
    (note,) = [note for note in layout.notes if note.what == what]
    return note.why


def test_a_step_that_is_a_number_stays_one():
    """DeepSpeed's own optimizers count in Python: their one step does not run ahead for several groups in stage 3."""
    made = adam("w", "b").number("w", "step", 4)
    made.tensors[StateKey("b", "step")] = made.tensors[StateKey("w", "step")]
    files, layout = written(made, ParamGroup(("w",), {}), ParamGroup(("b",), {}))
    assert not notes_about(layout, "2 parameter groups in stage 3")
    assert type(loaded(files, "zero/w/step.pt")) is int
    assert loaded(files, "zero/optimizer_state.pt")["optimizer_state_dict"]["state"] == {0: {"step": 4}}


def test_a_slot_that_a_parameter_lacks_is_zeros_and_narrow_state_is_widened():
    """DeepSpeed takes each slot from every parameter of a group, and wants one step and fp32."""
    files, layout = written(adam("a").weight("b", np.ones((2, 2), np.float32)))
    assert loaded(files, "zero/b/exp_avg.pt")["param"].tolist() == [[0, 0], [0, 0]]
    assert loaded(files, "zero/b/step.pt").item() == 4.0
    assert any("set to zero" in note.why for note in layout.notes)
    half = np.float16([[1, 2], [3, -0.0], [5, 6]])
    files, _ = written(adam().add("w", "exp_avg", half))
    assert loaded(files, "zero/w/exp_avg.pt")["param"].numpy().tobytes() == half.astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("slot", "value"),
    [
        pytest.param("exp_avg_sq_row", np.ones(3, np.float32), id="a factor"),
        pytest.param("mu_product", np.float32(0.9), id="a number beside the step"),
        pytest.param("exp_avg", np.ones((3, 2), np.uint8), id="8-bit state"),
    ],
)
def test_a_group_keeps_all_of_its_state_or_nothing(slot, value):
    """An optimizer takes a part of its state for the whole."""
    files, layout = written(adam("a", "b").add("a", slot, value), ParamGroup(("a",), {}), ParamGroup(("b",), {}))
    assert [path for path in files if "zero/a/" in path] == ["global_step0/zero/a/fp32.pt"]
    assert len([path for path in files if "zero/b/" in path]) == 4
    (note,) = notes_about(layout, "optimizer state of parameter group 0")
    assert note.outcome is Outcome.DROPPED and slot in note.why


SCALER = {"cur_scale": 64.0, "dynamic": True, "cur_iter": 7, "dtype": None}


@pytest.mark.parametrize(
    ("dtype", "scaler", "kind"),
    [
        ("float16", SCALER, "DynamicLossScaler"),
        ("float16", {"cur_scale": 8.0, "dynamic": False}, "LossScaler"),
        ("float16", None, None),
        ("float32", {"cur_scale": 1.0, "dynamic": False}, "LossScaler"),
        ("float32", SCALER, None),
    ],
)
def test_a_loss_scaler_that_does_not_fit_is_left_to_the_job(dtype, scaler, kind):
    made = adam().weight("w", np.ones((3, 2), dtype))
    files, layout = written(made, extra={} if scaler is None else {"loss_scaler": scaler})
    state = loaded(files, "zero/optimizer_state.pt")
    assert type(state.get("loss_scaler")).__name__ == (kind or "NoneType")
    assert ("dynamic_loss_scale" in state) == (kind is not None)
    if kind:
        assert state["loss_scaler"].cur_scale == scaler["cur_scale"]
        assert state["dynamic_loss_scale"] is scaler["dynamic"]
    assert bool(notes_about(layout, "loss_scaler")) == (kind is None and (dtype == "float16" or scaler is not None))


def test_notes_say_which_stage_and_which_target():
    made = adam().adam("one", 1).add("w", "max_exp_avg_sq", np.ones((3, 2), np.float32))
    made.add("one", "max_exp_avg_sq", np.ones(1, np.float32))
    layout = layout_of(manifest_of(made, ParamGroup(("w",), {"lr": 1}), ParamGroup(("one",), {"lr": 1})))
    assert "the next step fails without it; zero3" in why(layout, "optimizer state in stage 3")
    assert why(layout, "2 parameter groups in stage 3").startswith("they get one step count")
    assert "zero1 and zero2 load" in why(layout, "parameter group 1 of 1 elements")
    made = Checkpoint().weight("w", np.ones(4, np.float32)).add("w", "momentum_buffer", np.ones(4, np.float32))
    layout = layout_of(manifest_of(made))
    assert "fails without exp_avg, exp_avg_sq, step" in why(layout, "optimizer state in stage 3")
    more = adam().weight("frozen", np.ones(4, np.float32)).weight("count", np.int64(1), Kind.BUFFER)
    layout = layout_of(manifest_of(more, ParamGroup(("w",), {}), source="universal"))
    for what in ("1 parameter without optimizer state (frozen, or tied to others)", "1 buffer"):
        assert "zero1, zero2 and zero3 do" in why(layout, what)
    extra = {"deepspeed": {"ds_config": {"zero_optimization": {"sub_group_size": 5}}}}
    assert "sub_group_size (5)" in why(layout_of(manifest_of(adam(), extra=extra)), "the step count in stage 3")
    assert not notes_about(layout_of(manifest_of(adam())), "the step count in stage 3")


test_refused = refusal_test(
    *((f"the tag {tag!r}", lambda _, tag=tag: layout_of(manifest_of(adam()), tag), UsageError,
        "not a valid name for the folder") for tag in ("..", "a/b", ".", "a\n", "latest_universal")),
    ("a name that leads out", lambda _: layout_of(manifest_of(adam("../../w"))), UnsafeError, "outside|lead"),
    ("a slot with the name of the master",
        lambda _: layout_of(manifest_of(adam().add("w", "fp32", np.ones((3, 2), np.float32)))), UnsupportedError,
        "the name of another file"),
)  # fmt: skip
