"""What we write as a universal checkpoint, judged by DeepSpeed's own load in stages 1, 2 and 3, and by torch.load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.transforms import cast
from ckpt_tools.core.values import to_json
from ckpt_tools.errors import UnsafeError, UnsupportedError, UsageError
from ckpt_tools.formats.dcp.format import DcpFormat
from ckpt_tools.formats.deepspeed.format import DeepSpeedFormat, UniversalFormat
from ckpt_tools.planning.plan import make_plan
from ckpt_tools.stores.file_destination import StoreDestination
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import Overlay
from ckpt_tools.transfer.execute import execute
from ckpt_tools.transfer.runners.threads import ThreadRunner
from fixtures import launch, recipe, zero
from fixtures.store import Fixture
from tests.support.manifests import gathered, groups_of
from tests.support.truth import MASTER, WEIGHT, Truth, assert_same_bits

Checkpoint = Callable[[str, str, int], Fixture]

READERS = {"fsdp2": DcpFormat(), "zero": DeepSpeedFormat(), "universal": UniversalFormat()}


def read(kind: str, folder: Path) -> Manifest:
    reader = next(reader for prefix, reader in READERS.items() if kind.startswith(prefix))
    return reader.read(Source.open(LocalStore(folder)), ReadOptions())


def write(manifest: Manifest, source: Path, out: Path, options: WriteOptions | None = None) -> Layout:
    layout = UniversalFormat().layout(manifest, options or WriteOptions())
    plan = make_plan(manifest, layout, memory_bytes=512 << 20, num_workers=1)
    out.mkdir()
    store = Overlay(LocalStore(source), manifest.literals)
    execute(plan, store, StoreDestination(LocalStore(out)), runner=ThreadRunner(1), on_bytes=lambda _: None)
    return layout


# Judged by DeepSpeed

# In an order in which few pools of processes are started anew: `launch.pool` keeps 7 ranks alive.
RESUMED = [
    ("universal-zero1-fp32", 1, "zero3-fp32", 1),
    ("fsdp2", 2, "zero1-fp32", 2),
    ("universal-zero3-fp32", 1, "zero1-fp32", 4),
    ("fsdp2", 2, "zero3-fp32", 4),
    ("fsdp2", 2, "zero2-fp32", 3),
    ("zero1-fp32", 3, "zero3-fp32", 3),
]


@pytest.mark.parametrize(("kind", "from_ranks", "flavour", "to_ranks"), RESUMED)
def test_a_run_goes_on_in_any_stage_at_any_world_size(
    kind, from_ranks, flavour, to_ranks, checkpoint, resume, tmp_path
):
    """From one folder a run that starts from other weights becomes the one that was saved."""
    made = checkpoint(kind, "plain", from_ranks)
    write(read(kind, made.checkpoint), made.checkpoint, tmp_path / "out")
    truth, resumed = Truth.load(made.root), resume(f"universal-{flavour}", "plain", tmp_path / "out", to_ranks)
    assert_same_bits(trained(truth, truth.slot("exp_avg")), trained(resumed, truth.slot("exp_avg")))
    assert of_torch(resumed.facts["groups"]) == truth.facts["groups"]
    for fact in ("scheduler", "global_step"):
        assert resumed.facts[fact] == truth.facts[fact], fact
    tolerance = 0 if from_ranks == to_ranks else 1e-6
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


AS_MADE = [
    ("zero2-bf16", "awkward", 3, "zero1-bf16", 3),
    ("zero3-fp16", "awkward", 2, "zero2-fp16", 3),
    ("zero1-bf16acc", "awkward", 3, "zero1-bf16acc", 4),
    ("zero3-fp32-sub", "awkward", 4, "zero2-fp32", 4),
    ("universal-zero2-bf16", "awkward", 2, "zero2-bf16", 3),
    ("zero2-fp32", "empty", 3, "zero1-fp32", 3),
    ("zero3-fp32", "sgd", 4, "zero1-fp32", 4),
    ("zero2-fp32", "rmsprop", 3, "zero2-fp32", 3),
]


@pytest.mark.parametrize(("kind", "case", "from_ranks", "flavour", "to_ranks"), AS_MADE)
def test_several_groups_and_16_bit_models_go_on_in_stages_1_and_2(
    kind, case, from_ranks, flavour, to_ranks, checkpoint, tmp_path
):
    made = checkpoint(kind, case, from_ranks)
    write(read(kind, made.checkpoint), made.checkpoint, tmp_path / "out")
    truth, resumed = Truth.load(made.root), resumed_as_made(flavour, case, tmp_path / "out", to_ranks)
    assert_same_bits(truth.tensors, resumed.tensors)
    for fact in ("groups", "scheduler", "global_step", "skipped_steps", "client_state", "loss_scaler"):
        assert resumed.facts[fact] == truth.facts[fact], fact
    tolerance = 0 if from_ranks == to_ranks else 1e-6
    np.testing.assert_allclose(resumed.facts["losses"], truth.facts["losses"], rtol=tolerance, atol=0)


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
    notes = {note.what: note.why for note in layout.notes}
    assert "initial_lr, lr, weight_decay stay" in notes["3 parameter groups in stage 3"]
    assert "zero3 restores" in notes["3 parameter groups in stage 3"]


def test_an_fp32_run_goes_on_as_a_16_bit_one_with_fp32_masters(checkpoint, tmp_path):
    """What was trained in fp32 becomes the masters, every bit of it."""
    made = checkpoint("fsdp2", "plain", 2)
    manifest, _ = cast(read("fsdp2", made.checkpoint), DType.BFLOAT16)
    write(manifest, made.checkpoint, tmp_path / "out")
    truth, resumed = Truth.load(made.root), resumed_as_made("zero3-bf16", "plain", tmp_path / "out", 3)
    masters = resumed.slot(MASTER)
    assert_same_bits({fqn: truth.tensors[fqn, WEIGHT] for fqn in masters}, masters)
    rounded = {fqn: torch.tensor(master).bfloat16() for fqn, master in masters.items()}
    assert all(
        rounded[fqn].view(torch.int16).numpy().tobytes() == resumed.tensors[fqn, WEIGHT].tobytes() for fqn in masters
    )


def test_weights_alone_start_a_run_in_stages_1_and_2(checkpoint, tmp_path):
    """Their number of groups need not be the job's."""
    made = checkpoint("fsdp2", "rmsprop", 2)
    whole = read("fsdp2", made.checkpoint)
    weights = {key: e for key, e in whole.tensors.items() if key.slot == WEIGHT and not key.fqn.startswith("keepsakes")}
    manifest = Manifest("safetensors", weights, extra={"lr_scheduler": whole.extra["lr_scheduler"]})
    layout = write(manifest, made.checkpoint, tmp_path / "out")
    truth, resumed = Truth.load(made.root), resumed_as_made("zero2-fp32", "rmsprop", tmp_path / "out", 3)
    assert_same_bits({fqn: truth.tensors[fqn, WEIGHT] for fqn in resumed.slot(MASTER)}, resumed.slot(MASTER))
    assert [group["options"]["weight_decay"] for group in resumed.facts["groups"]] == [0.1, 0.0, 0.01]
    assert any("fails without exp_avg" in note.why for note in layout.notes)
    assert UniversalFormat().read(Source.open(LocalStore(tmp_path / "out")), ReadOptions()).groups == ()


# Judged by our own reader

ROUND_TRIPS = [
    ("fsdp2", "awkward", 3),
    ("fsdp2-bf16", "awkward", 2),
    ("zero1-fp32", "awkward", 3),
    ("zero2-bf16", "awkward", 4),
    ("zero3-fp16", "awkward", 2),
    ("zero2-fp32", "lone", 3),
    ("zero1-fp32", "sgd", 2),
    ("universal-zero1-fp32", "awkward", 2),
    ("universal-zero3-fp32", "awkward", 3),
]


@pytest.mark.parametrize(("kind", "case", "world_size"), ROUND_TRIPS)
def test_reads_back_what_it_wrote(kind, case, world_size, checkpoint, tmp_path):
    """Buffers and frozen weights too, which DeepSpeed does not load."""
    made = checkpoint(kind, case, world_size)
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
    assert to_json(back.extra["lr_scheduler"]) == to_json(source.extra["lr_scheduler"])
    assert to_json(back.extra.get("loss_scaler")) == to_json(source.extra.get("loss_scaler"))


def _widened(tensors: Mapping[tuple[str, str], np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    """Optimizer state as fp32, which is all that DeepSpeed knows."""
    return {key: t if key[1] == WEIGHT or t.ndim == 0 else t.astype(np.float32) for key, t in tensors.items()}


def test_writes_again_what_it_wrote(checkpoint, tmp_path):
    made = checkpoint("zero2-bf16", "awkward", 4)
    write(read("zero2-bf16", made.checkpoint), made.checkpoint, tmp_path / "one")
    write(read("universal", tmp_path / "one"), tmp_path / "one", tmp_path / "two")
    files = [p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file()]
    assert len(files) > 80
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)


# Judged by torch.load, from manifests made by hand


@dataclass(slots=True)
class Made:
    """A manifest in the making, whose tensors are given as arrays and lie in one file."""

    folder: Path
    data: bytearray = field(default_factory=bytearray)
    tensors: dict[StateKey, TensorEntry] = field(default_factory=dict)
    arrays: dict[StateKey, np.ndarray] = field(default_factory=dict)

    def add(self, fqn: str, slot: str, array: Any, kind: Kind = Kind.STATE) -> StateKey:
        key, array = StateKey(fqn, slot), np.asarray(array)
        at = ByteRange("data", len(self.data), len(self.data) + array.nbytes)
        self.data += array.tobytes()
        dtype = DType(array.dtype.name)
        table = ShardTable.build(array.shape, dtype, [Shard(Box.whole(array.shape), at)])
        self.tensors[key], self.arrays[key] = TensorEntry(array.shape, dtype, kind, table), array
        return key

    def adam(self, fqn: str, shape: tuple[int, ...] = (3, 2), step: float = 4.0) -> None:
        """A parameter with the state of Adam."""
        numbers = np.random.default_rng(len(self.data)).random((3, *shape), np.float32)
        self.add(fqn, WEIGHT, numbers[0], Kind.PARAMETER)
        self.add(fqn, "exp_avg", numbers[1])
        self.add(fqn, "exp_avg_sq", numbers[2])
        self.add(fqn, "step", np.float32(step))

    def manifest(self, *groups: ParamGroup, **others: Any) -> Manifest:
        every = tuple(key.fqn for key, entry in self.tensors.items() if entry.kind is Kind.PARAMETER)
        return Manifest("dcp", self.tensors, groups=groups or (ParamGroup(every, {"lr": 0.1}),), **others)

    def written(self, manifest: Manifest, options: WriteOptions | None = None) -> tuple[Path, Layout]:
        (self.folder / "source").mkdir()
        (self.folder / "source/data").write_bytes(self.data)
        layout = write(manifest, self.folder / "source", self.folder / "out", options)
        return self.folder / "out", layout


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


def loaded(out: Path, name: str, tag: str = "global_step0") -> Any:
    return torch.load(out / tag / name, weights_only=False)


def whys(layout: Layout) -> dict[str, tuple[Outcome, str]]:
    return {note.what: (note.outcome, note.why) for note in layout.notes}


def test_the_folder_is_published_by_its_last_file(made):
    made.adam("layer.weight")
    layout = UniversalFormat().layout(made.manifest(step=7), WriteOptions())
    assert [file.path for file in layout.files] == [
        "global_step7/zero/layer.weight/fp32.pt",
        "global_step7/zero/layer.weight/exp_avg.pt",
        "global_step7/zero/layer.weight/exp_avg_sq.pt",
        "global_step7/zero/layer.weight/step.pt",
        "global_step7/zero/optimizer_state.pt",
        "global_step7/mp_rank_00_model_states.pt",
        "global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "latest_universal",
    ]


def test_the_files_of_a_parameter(made):
    made.adam("layer.weight")
    out, _ = made.written(made.manifest())
    for slot, name in (("weight", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        value = loaded(out, f"zero/layer.weight/{name}.pt")
        assert value.keys() == {"cat_dim", "param"}
        assert value["param"].numpy().tobytes() == made.arrays[StateKey("layer.weight", slot)].tobytes()
        assert (value["param"].shape, value["param"].dtype, value["cat_dim"]) == ((3, 2), torch.float32, 0)
    assert torch.equal(loaded(out, "zero/layer.weight/step.pt"), torch.tensor(4.0))
    assert (out / "latest_universal").read_bytes() == b"global_step0"


def test_each_stage_finds_its_own_part_of_the_optimizer(made):
    made.adam("a")
    made.adam("b")
    options = {"betas": (0.9, 0.95), "fused": None, "foreach": False}
    manifest = made.manifest(
        ParamGroup(("a",), {"lr": 0.1, "weight_decay": 0, **options}),
        ParamGroup(("b",), {"lr": 0.1, "weight_decay": 0.0, **options, "fused": True}),
    )
    out, layout = made.written(manifest)
    state = loaded(out, "zero/optimizer_state.pt")
    assert state["param_groups"] == [
        {"lr": 0.1, "weight_decay": 0, "betas": (0.9, 0.95), "fused": None, "foreach": False, "params": [0]},
        {"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.95), "fused": True, "foreach": False, "params": [1]},
    ]
    nested = state["optimizer_state_dict"]
    assert nested["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95), "foreach": False, "params": [0]}]
    assert nested["state"][0]["step"].item() == 4.0
    assert state["ds_version"] == "0.19.8"
    outcome, why = whys(layout)["2 parameter groups in stage 3"]
    assert outcome is Outcome.KEPT and "fused, weight_decay stay" in why


def test_model_files_hold_what_only_they_can(made):
    """Trained weights at size 0, frozen ones and buffers whole; the file of stage 3 has no module at all."""
    made.adam("layer.weight")
    frozen = made.add("frozen.weight", WEIGHT, np.arange(4, dtype=np.float32), Kind.PARAMETER)
    count = made.add("count", WEIGHT, np.int64(2**53 + 1), Kind.BUFFER)
    manifest = made.manifest(ParamGroup(("layer.weight",), {}), aliases={"head.weight": "layer.weight", "n": "count"})
    out, layout = made.written(replace(manifest, format="universal"))
    model = loaded(out, "mp_rank_00_model_states.pt")
    module = model["module"]
    assert list(module) == ["layer.weight", "frozen.weight", "count", "head.weight", "n"]
    assert module["layer.weight"].shape == module["head.weight"].shape == (0,)
    assert module["frozen.weight"].numpy().tobytes() == made.arrays[frozen].tobytes()
    assert module["count"].item() == made.arrays[count]
    assert model["buffer_names"] == ["count", "n"]
    assert model["param_shapes"] == [{"layer.weight": torch.Size([3, 2])}]
    assert model["frozen_param_shapes"] == {"frozen.weight": torch.Size([4])}
    assert model["shared_params"] == {"head.weight": "layer.weight"}
    stage3 = loaded(out, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert (stage3.pop("module"), model.pop("module") is module) == ({}, True)
    assert stage3 == model
    for what in ("1 parameter without optimizer state (frozen, or tied to others)", "1 buffer"):
        outcome, why = whys(layout)[what]
        assert outcome is Outcome.NOT_LOADED and "zero1, zero2 and zero3 do" in why


def test_what_is_no_tensor_is_in_both_model_files(made):
    made.adam("w")
    mean = TensorRef(made.add("client_state.mean", "extra", np.float64([1, 2]), Kind.EXTRA))
    rate = TensorRef(made.add("param_groups.0.lr", "extra", np.float32(0.5), Kind.EXTRA))
    extra = {
        "global_step": 9,
        "lr_scheduler": {"last_epoch": 9},
        "client_state": {"epoch": 3, "mean": [mean]},
        "rng": b"\x00\xff",
        "deepspeed": {
            "skipped_steps": 2,
            "ds_config": {"seed": 1},
            "tag": "mine",
            "clip_grad": 0.5,
            "module": {"x": 1},
        },
        "lr": 5,
    }
    out, _ = made.written(made.manifest(ParamGroup(("w",), {"lr": rate}), extra=extra, world_size=4))
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        model = loaded(out, name, "mine")
        assert (model["global_steps"], model["skipped_steps"], model["dp_world_size"]) == (9, 2, 4)
        assert (model["mp_world_size"], model["ds_config"], model["ds_version"]) == (1, {"seed": 1}, "0.19.8")
        assert model["lr_scheduler"] == {"last_epoch": 9}
        assert (model["epoch"], model["rng"], model["lr"]) == (3, b"\x00\xff", 5)
        assert model["mean"][0].tolist() == [1.0, 2.0]
        assert model["universal_checkpoint_info"] == {"universal_checkpoint_version": 0.4}
    assert loaded(out, "mp_rank_00_model_states.pt", "mine")["module"]["x"] == 1
    state = loaded(out, "zero/optimizer_state.pt", "mine")
    assert state["clip_grad"] == 0.5
    assert state["param_groups"][0]["lr"].item() == 0.5


def test_a_step_that_is_a_number_stays_one(made):
    """DeepSpeed's own optimizers count in Python: their one step does not run ahead for several groups in stage 3."""
    at = ByteRange("literal:0.step", 0, 8)
    table = ShardTable.build((), DType.INT64, [Shard(Box.whole(()), at)])
    for name in ("w", "b"):
        made.adam(name)
        made.tensors[StateKey(name, "step")] = TensorEntry((), DType.INT64, Kind.STATE, table)
    groups, literals = [ParamGroup((name,), {}) for name in ("w", "b")], {at.file: (4).to_bytes(8, "little")}
    out, layout = made.written(made.manifest(*groups, literals=literals))
    assert "2 parameter groups in stage 3" not in whys(layout)
    assert type(loaded(out, "zero/w/step.pt")) is int
    assert loaded(out, "zero/optimizer_state.pt")["optimizer_state_dict"]["state"] == {0: {"step": 4}}


def test_a_slot_that_a_parameter_lacks_is_zeros_and_its_step_the_group_s(made):
    """DeepSpeed takes each slot from every parameter of a group, and wants one step."""
    made.adam("a")
    made.add("b", WEIGHT, np.ones((2, 2), np.float32), Kind.PARAMETER)
    out, layout = made.written(made.manifest())
    assert loaded(out, "zero/b/exp_avg.pt")["param"].tolist() == [[0, 0], [0, 0]]
    assert loaded(out, "zero/b/step.pt").item() == 4.0
    assert any("set to zero" in why for _, why in whys(layout).values())


def test_narrow_state_is_widened(made):
    made.adam("w")
    half = made.add("w", "exp_avg", np.float16([[1, 2], [3, -0.0], [5, 6]]))
    out, _ = made.written(made.manifest())
    param = loaded(out, "zero/w/exp_avg.pt")["param"]
    assert param.numpy().tobytes() == made.arrays[half].astype(np.float32).tobytes()


FOREIGN = {
    "a factor": ("exp_avg_sq_row", np.ones(3, np.float32)),
    "a number beside the step": ("mu_product", np.float32(0.9)),
    "8-bit state": ("exp_avg", np.ones((3, 2), np.uint8)),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_group_keeps_all_of_its_state_or_nothing(case, made):
    """An optimizer takes a part of its state for the whole."""
    made.adam("a")
    made.adam("b")
    made.add("a", *FOREIGN[case])
    out, layout = made.written(made.manifest(ParamGroup(("a",), {}), ParamGroup(("b",), {})))
    assert [path.name for path in (out / "global_step0/zero/a").iterdir()] == ["fp32.pt"]
    assert len(list((out / "global_step0/zero/b").iterdir())) == 4
    outcome, why = whys(layout)["optimizer state of parameter group 0"]
    assert outcome is Outcome.DROPPED and FOREIGN[case][0] in why


SCALER = {"cur_scale": 64.0, "dynamic": True, "cur_iter": 7, "dtype": None}


@pytest.mark.parametrize(
    ("dtype", "scaler", "kind"),
    [
        ("float16", SCALER, "DynamicLossScaler"),
        ("float16", {"cur_scale": 8.0, "dynamic": False}, "LossScaler"),
        ("float16", None, None),
        ("float32", {"cur_scale": 1.0, "dynamic": False}, "LossScaler"),
        ("float32", SCALER, None),
        ("float32", None, None),
    ],
)
def test_a_loss_scaler_that_does_not_fit_is_left_to_the_job(dtype, scaler, kind, made):
    made.adam("w")
    made.add("w", WEIGHT, np.ones((3, 2), dtype), Kind.PARAMETER)
    out, layout = made.written(made.manifest(extra={} if scaler is None else {"loss_scaler": scaler}))
    state = loaded(out, "zero/optimizer_state.pt")
    assert type(state.get("loss_scaler")).__name__ == (kind or "NoneType")
    if kind:
        assert state["loss_scaler"].cur_scale == scaler["cur_scale"]
        assert state["dynamic_loss_scale"] is scaler["dynamic"]
    else:
        assert "dynamic_loss_scale" not in state
    assert ("loss_scaler" in whys(layout)) == (kind is None and (dtype == "float16" or scaler is not None))


def noted(made: Made, manifest: Manifest) -> dict[str, tuple[Outcome, str]]:
    return whys(UniversalFormat().layout(manifest, WriteOptions()))


def test_notes_say_which_stage_and_which_target(made):
    made.adam("w")
    made.adam("one", (1,))
    for name in ("w", "one"):
        made.add(name, "max_exp_avg_sq", np.ones_like(made.arrays[StateKey(name)]))
    notes = noted(made, made.manifest(ParamGroup(("w",), {"lr": 1}), ParamGroup(("one",), {"lr": 1})))
    assert "the next step fails without it; zero3" in notes["optimizer state in stage 3"][1]
    assert notes["2 parameter groups in stage 3"][1].startswith("they get one step count")
    assert "zero1 and zero2 load" in notes["parameter group 1 of 1 elements"][1]


def test_optimizers_that_stage_3_does_not_load_are_noted(made):
    made.add("w", WEIGHT, np.ones(4, np.float32), Kind.PARAMETER)
    made.add("w", "momentum_buffer", np.ones(4, np.float32))
    assert "fails without exp_avg, exp_avg_sq, step" in noted(made, made.manifest())["optimizer state in stage 3"][1]


def test_sub_groups_of_one_group_are_noted(made):
    made.adam("w")
    config = {"zero_optimization": {"sub_group_size": 5}}
    notes = noted(made, made.manifest(extra={"deepspeed": {"ds_config": config}}))
    assert "sub_group_size (5)" in notes["the step count in stage 3"][1]
    assert "the step count in stage 3" not in noted(made, made.manifest())


@pytest.mark.parametrize("tag", ["..", "a/b", "", ".", "a\n", "latest_universal"])
def test_a_tag_is_the_name_of_a_folder(tag, made):
    made.adam("w")
    if tag:
        with pytest.raises(UsageError, match="not a valid name for the folder"):
            UniversalFormat().layout(made.manifest(), WriteOptions(tag=tag))
    out, _ = made.written(made.manifest(), WriteOptions(tag="best"))
    assert (out / "latest_universal").read_text() == "best"
    assert (out / "best/zero/w/fp32.pt").is_file()


def test_names_do_not_lead_out(made):
    made.adam("../../w")
    with pytest.raises(UnsafeError):
        UniversalFormat().layout(made.manifest(), WriteOptions())


def test_a_slot_with_the_name_of_the_master_is_refused(made):
    made.adam("w")
    made.add("w", "fp32", np.ones((3, 2), np.float32))
    with pytest.raises(UnsupportedError, match="the name of another file"):
        UniversalFormat().layout(made.manifest(), WriteOptions())
