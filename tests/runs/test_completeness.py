"""A checkpoint of a run is complete by its trainer's own marker, and an incomplete one says why."""

import json
import os
import pickle
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.runs.listing import RunCheckpoint
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import find_members
from fixtures.corpus import make
from tests.support.sweep import tiered

Damage = Callable[[Path], None]


def listed(run: Path | str) -> Mapping[str, RunCheckpoint]:
    return {each.name: each for each in ckpt_tools.ls(run).checkpoints}


def zipped(path: Path, value: object = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.ones(3)} if value is None else value, path)


def shards(folder: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(3)}, folder / f"model-{number:05d}-of-00002.safetensors")
    weight_map = {f"w{number}": f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def hf(folder: Path) -> None:
    shards(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "training_args.bin"):
        zipped(folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": int(folder.name.rpartition("-")[2])}))


def accelerated(folder: Path) -> None:
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"):
        zipped(folder / name)


def verl(folder: Path) -> None:
    for rank in range(2):
        for stem in ("model", "optim", "extra_state"):
            zipped(folder / "actor" / f"{stem}_world_size_2_rank_{rank}.pt")
    zipped(folder / "data.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(folder.name.rpartition("_")[2])


def orbax(folder: Path) -> None:
    (folder / "default" / "d").mkdir(parents=True)
    for name in ("_CHECKPOINT_METADATA", "default/_METADATA", "default/manifest.ocdbt", "default/d/0f"):
        (folder / name).write_text("{}")


def lightning(path: Path) -> None:
    path.rmdir()
    torch.save({"state_dict": {"w": torch.ones(3)}, "global_step": 7}, path)


def without(name: str) -> Damage:
    return lambda path: shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()


def cut(name: str = "") -> Damage:
    def shorten(path: Path) -> None:
        file = path / name if name else path
        file.write_bytes(file.read_bytes()[:-1])

    return shorten


def tracker(text: str, name: str = "latest_checkpointed_iteration.txt") -> Damage:
    return lambda path: (path.parent / name).write_text(text) and None


def renamed(name: str) -> Damage:
    return lambda path: path.rename(path.with_name(name)) and None


def automodel(folder: Path) -> None:
    (folder / "model").mkdir()
    save_file({"w": torch.ones(3)}, folder / "model" / "shard-00001-model-00001-of-00001.safetensors")
    zipped(folder / "optim" / "optim.pt")


def managed(folder: Path) -> None:
    for rank in range(3):
        zipped(folder / f"model_{rank}.pt")
        zipped(folder / f"optimizer_{rank}.pt")
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"world_size": 3, "metadata": {}}))


MADE: dict[str, Callable[[Path], None]] = {
    "epoch_1_step_5": automodel, "step-7": managed, "checkpoint-5": hf, "checkpoint_5": accelerated,
    "global_step_5": verl, "1000": orbax, "epoch=1-step=7.ckpt": lightning,
}  # fmt: skip
CASES: list[tuple[str, Damage, str]] = [
    ("checkpoint-5", without("trainer_state.json"), "no trainer_state.json"),
    ("checkpoint-5", without("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors is missing"),
    ("checkpoint-5", cut("model-00002-of-00002.safetensors"), "cut off"),
    ("checkpoint-5", cut("optimizer.pt"), "optimizer.pt has no end"),
    ("checkpoint-5", renamed("tmp-checkpoint-5"), "the name tmp-checkpoint-5 says"),
    ("checkpoint-5", lambda path: (path / "IN_PROGRESS").touch(), "IN_PROGRESS marks it as unfinished"),
    ("checkpoint_5", without("random_states_1.pkl"), ""),  # as of a run on one rank
    ("checkpoint_5", without("random_states_0.pkl"), "rank 0 are missing"),
    ("global_step_5", without("actor/model_world_size_2_rank_1.pt"), "actor/model lacks the files of rank 1"),
    ("global_step_5", tracker("4"), "latest_checkpointed_iteration.txt names step 4"),
    ("epoch_1_step_5", without("optim"), "no optim/"),
    ("checkpoint-5", lambda path: (path.parent / "checkpoint-5-unfinished").touch(),
        "checkpoint-5-unfinished marks it"),
    ("1000", without("_CHECKPOINT_METADATA"), ""),  # as old versions wrote it
    ("1000", lambda path: [without(name)(path) for name in ("_CHECKPOINT_METADATA", "default/_METADATA")], "no _META"),
    ("1000", lambda path: [without("_CHECKPOINT_METADATA")(path), (path / "orbax.checkpoint").touch()], "no _CHECK"),
    ("1000", lambda path: (path / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1}'), "time of commit"),
    ("1000", renamed("1000.orbax-checkpoint-tmp-17"), "says that the save did not finish"),
    ("epoch=1-step=7.ckpt", cut(), "has no end: it is cut off"),
]  # fmt: skip


def laid(run: Path, name: str, make: Callable[[Path], None]) -> Path:
    (run / name).mkdir(parents=True)
    make(run / name)
    return run / name


@pytest.mark.parametrize("name", MADE)
def test_what_a_trainer_finished_is_complete(name, tmp_path):
    laid(tmp_path / "run", name, MADE[name])
    found = listed(tmp_path / "run")
    assert list(found) == [name]
    assert (found[name].problem, found[name].step) == (None, int(re.findall(r"\d+", name)[-1]))
    assert found[name].time is not None and found[name].file_bytes > 0


@pytest.mark.parametrize(("name", "damage", "why"), CASES)
def test_what_is_not_complete_says_why(name, damage, why, tmp_path):
    damage(laid(tmp_path / "run", name, MADE[name]))
    (found,) = listed(tmp_path / "run").values()
    assert found.is_complete == (not why)
    assert why in (found.problem or "")


@pytest.mark.parametrize(("kind", "case"), [("fsdp2", "plain"), ("zero3-bf16", "awkward")])
def test_genuine_checkpoints_lack_any_one_file(kind, case, checkpoint, tmp_path):
    """Without a file that a rank wrote it is incomplete; each file whole, it is complete, with its world size."""
    made = checkpoint(kind, case, 2).checkpoint
    run = tmp_path / "run"
    shutil.copytree(made, run / "epoch_3")
    (found,) = listed(run).values()
    assert (found.name, found.problem, found.world_size) == ("epoch_3", None, 2)
    assert found.format == ("dcp" if kind == "fsdp2" else "deepspeed")
    for path in sorted((run / "epoch_3").rglob("*.pt")) + sorted((run / "epoch_3").rglob("*.distcp")):
        aside = path.rename(tmp_path / "aside")
        assert not listed(run)["epoch_3"].is_complete, path
        aside.rename(path)
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert not listed(run)["epoch_3"].is_complete, path
        path.write_bytes(data)
    assert listed(run)["epoch_3"].is_complete


def test_a_tag_that_latest_does_not_name_yet(checkpoint, tmp_path):
    made = checkpoint("zero3-fp32", "awkward", 2).checkpoint
    tag = (made / "latest").read_text()
    for number in (9, 10):
        shutil.copytree(made / tag, tmp_path / "run" / f"global_step{number}")
    assert all(each.is_complete for each in listed(tmp_path / "run").values())
    (tmp_path / "run" / "latest").write_text("global_step9")
    found = listed(tmp_path / "run")
    assert found["global_step9"].is_complete
    assert "the file latest names global_step9" in (found["global_step10"].problem or "")


def test_ray_names_a_checkpoint_when_all_workers_have_uploaded(tmp_path):
    run = tmp_path / "run"
    for number in (0, 1):
        zipped(run / f"checkpoint_00000{number}" / "model.pt", {"w": torch.ones(3)})
    record = {"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_000000", "metrics": {}}]}
    (run / "checkpoint_manager_snapshot.json").write_text(json.dumps(record))
    found = listed(run)
    assert found["checkpoint_000000"].is_complete
    assert "does not name it" in (found["checkpoint_000001"].problem or "")


def test_a_universal_checkpoint_has_every_parameter(checkpoint, tmp_path):
    made = checkpoint("zero3-fp32", "awkward", 2).checkpoint
    run = tmp_path / "run"
    ckpt_tools.convert(made, run, to="universal")
    (found,) = listed(run).values()
    assert found.is_complete and found.format == "universal"
    next((run / found.name / "zero").rglob("fp32.pt")).unlink()
    assert "has no fp32.pt" in (listed(run)[found.name].problem or "")


@pytest.mark.parametrize(("files", "found"), [
    (["checkpoint-5/model.safetensors", "checkpoint-10/model.safetensors"], ["checkpoint-10", "checkpoint-5"]),
    (["global_step_5/actor/huggingface/model.safetensors", "global_step_5/critic/a.pt"], ["global_step_5"]),
    (["checkpoint-5/global_step5/mp_rank_00_model_states.pt", "checkpoint-5/a.bin"], ["checkpoint-5"]),
    (["s_step5/checkpoint-1/a.pt", "s_step5/checkpoint-2/a.pt"], ["s_step5/checkpoint-2", "s_step5/checkpoint-1"]),
    (["epoch_0_step_9/model/s.safetensors", "epoch_0_step_9/optim/.metadata"], ["epoch_0_step_9"]),
    (["iter_0000010/mp_rank_00/model_optim_rng.pt"], ["iter_0000010"]),
    (["c/epoch=1-step=7.ckpt", "c/last.ckpt", "c/hparams.yaml"], ["c/epoch=1-step=7.ckpt", "c/last.ckpt"]),
    (["epoch_9.pt", "epoch_10.pt", "best.pt", "scheduler.pt"], ["epoch_10.pt", "epoch_9.pt", "best.pt"]),
    (["10/_CHECKPOINT_METADATA", "10/default/manifest.ocdbt", "10/default/d/0f.pt"], ["10"]),
    (["2024/06/a.txt", "2024/06/checkpoint-1/model.pt"], ["2024/06/checkpoint-1"]),
    (["ep0-ba10/.metadata", "ep1-ba20/.metadata", "logs/a.txt"], ["ep1-ba20", "ep0-ba10"]),
    (["a/model_name=0--val_loss=0.51-step=9-consumed_samples=80.0-last/weights/.metadata",
        "a/model_name=0--val_loss=0.49-step=19-consumed_samples=160.0/weights/.metadata"],
        ["a/model_name=0--val_loss=0.49-step=19-consumed_samples=160.0",
        "a/model_name=0--val_loss=0.51-step=9-consumed_samples=80.0-last"]),
    ([".git/checkpoint-5/a.pt", ".checkpoint-5/a.pt", ".epoch_6.partial/a.pt"], [".epoch_6.partial"]),
    (["run1/model.safetensors", "run1/checkpoint-5/model.safetensors"], ["run1/checkpoint-5"]),
    (["shard-00001-model-00001-of-00001.safetensors", "optimizer/.metadata"], []),
    (["model.safetensors", "optimizer/.metadata", "checkpoint-5/optimizer/.metadata"], ["checkpoint-5"]),
    (["checkpoints/005000/pretrained_model/config.json", "checkpoints/005000/pretrained_model/model.safetensors",
        "checkpoints/005000/training_state/rng_state.safetensors"], ["checkpoints/005000"]),
    (["pretrained_model/pytorch_model_fsdp_0/.metadata", "training_state/optimizer_0/.metadata",
        "training_state/rng_state.safetensors"], []),
    (["out/pretrained_model/config.json", "out/pretrained_model/model.safetensors"], ["out/pretrained_model"]),
    (["final/model.safetensors", "checkpoint-5/model.safetensors"], ["checkpoint-5", "final"]),
])  # fmt: skip
def test_which_folders_and_files_are_checkpoints(files, found):
    assert [member.name for member in find_members(Source(MemoryStore(), dict.fromkeys(files, 1)))] == found


def test_a_zip_of_something_else_is_left_alone(tmp_path):
    """Only what begins as a torch file and has no end is called cut off."""
    folder = laid(tmp_path / "run", "checkpoint-5", hf)
    with zipfile.ZipFile(folder / "extra.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"x" * 100)
    (folder / "tokenizer.bin").write_bytes(b"words")
    assert listed(tmp_path / "run")["checkpoint-5"].is_complete


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {Path(tempfile.gettempdir()) / 'ls-ran-it'}",)


@pytest.mark.parametrize("name", [".metadata", "mp_rank_00_model_states.pt"])
def test_listing_runs_no_pickle(name, tmp_path):
    zipped(tmp_path / "run" / "step-5" / "model_0.pt", {"w": torch.ones(3)})
    path = tmp_path / "run" / "step-5" / name
    if name.endswith(".pt"):
        torch.save({"dp_world_size": Hostile()}, path)
    else:
        path.write_bytes(pickle.dumps(Hostile()))
    (found,) = listed(tmp_path / "run").values()
    assert not (Path(tempfile.gettempdir()) / "ls-ran-it").exists()
    assert found.problem is not None and name in found.problem


@dataclass(frozen=True, slots=True)
class Run:
    """Two copies of a layout's ``part`` under ``names``, the older one first. Without what ``markers`` match, the newer
    one is not complete, and ``why`` says so. ``latest`` are a file of the run and what it says.
    """

    layout: str
    part: str
    names: tuple[str, str]
    markers: str
    why: str
    latest: tuple[str, str] = ("", "")
    format: str = "dcp"

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.markers}"

    def lay(self, run: Path) -> Path:
        made = make(self.layout)
        for name in self.names:
            source, target = made.folder / self.part, run / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        if self.latest[0]:
            (run / self.latest[0]).write_text(self.latest[1])
        return run / self.names[1]


HF, ACCELERATE, STEPS = ("checkpoint-2", "checkpoint-4"), ("checkpoint_0", "checkpoint_1"), ("step-3", "step-6")
LIGHTNING, TAGS = ("epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt"), ("global_step4", "global_step8")
ITERATIONS = ("iter_0000010", "iter_0000020")
TRACKER = "latest_checkpointed_iteration.txt"
RUNS = (
    Run("hf-trainer", "checkpoint-2", HF, "trainer_state.json", "writes last", format="safetensors"),
    Run("transformers-fsdp2", "checkpoint-3", HF, "trainer_state.json", "writes last"),
    Run("transformers-fsdp2", "checkpoint-3", HF, "optimizer_0/.metadata", "no optimizer_0/.metadata"),
    Run("transformers-distributed", ".", STEPS, "optimizer/.metadata", "no optimizer/.metadata"),
    Run("transformers-distributed", ".", STEPS, "shard-00002-*", "shard-00002-model-00001-of-00001.safetensors"),
    Run("accelerate-ddp-safetensors", ".", ACCELERATE, "random_states_*", "writes last", format="safetensors"),
    Run("accelerate-ddp-bin", ".", ACCELERATE, "pytorch_model.bin", "no file that holds the model", format="torch"),
    Run("accelerate-fsdp2", ".", ACCELERATE, "pytorch_model_fsdp_0/.metadata", "no pytorch_model_fsdp_0/.metadata"),
    Run("accelerate-ranks", ".", ACCELERATE, "pytorch_model_fsdp_0_rank0.bin", "lacks", format="sharded"),
    Run("lightning-model-parallel", "last.ckpt", LIGHTNING, "meta.pt", "no meta.pt"),
    Run("lightning-fsdp", "last.ckpt", LIGHTNING, ".metadata", "no .metadata"),
    Run("torchtitan", "step-3", STEPS, ".metadata", "no .metadata"),
    Run("torch-checkpointing", "step-7", STEPS, "metadata.pkl", "no metadata.pkl", format="sharded"),
    Run("torch-checkpointing", "step-7", STEPS, "optimizer_1.pt", "lacks the files of rank 1", format="sharded"),
    Run("composer", "ep0-ba3", ("ep0-ba3", "ep1-ba6"), ".metadata", "no .metadata"),
    Run("olmo-core", "step3", ("step3", "step6"), ".metadata.json", "no .metadata.json"),
    Run("olmo-core", "step3", ("step3", "step6"), "model_and_optim/.metadata", "no model_and_optim/.metadata"),
    Run("lerobot", "checkpoints/000003", ("002000", "004000"), "training_state/optimizer*", "no optimizer in training",
        format="safetensors"),
    Run("lerobot-fsdp2", "checkpoints/000003", ("002000", "004000"), "training_state/optimizer_0/.metadata",
        "no optimizer in training_state"),
    Run("automodel", "epoch_0_step_3", ("epoch_0_step_3", "epoch_0_step_6"), "optim/.metadata", "no optim/.metadata"),
    Run("automodel", "epoch_0_step_3", ("epoch_0_step_3", "epoch_0_step_6"), "model/shard-00001-*", "shard-00001"),
    Run("torchtitan-hf", "step-3", STEPS, "shard-00001-*", "shard-00001-model", format="safetensors"),
    Run("ray-train-lightning", "checkpoint_000012", ("checkpoint_000012", "checkpoint_000013"),
        "checkpoint.ckpt/.metadata", "no checkpoint.ckpt/.metadata"),
    Run("ray-train-dcp", "checkpoint_000012", ("checkpoint_000012", "checkpoint_000013"), ".metadata", "no .metadata"),
    Run("verl", ".", ("global_step_2", "global_step_4"), "actor/model_world_size_2_rank_1.pt", "rank 1",
        (TRACKER, "4"), format="sharded"),
    Run("verl-1", ".", ("global_step_2/actor", "global_step_4/actor"), "model_*", "no", (TRACKER, "4"),
        format="sharded"),
    Run("megatron", ITERATIONS[0], ITERATIONS, "metadata.json", "no metadata.json", (TRACKER, "20"),
        format="megatron"),
    Run("megatron-common-item", ITERATIONS[0], ITERATIONS, "metadata.json", "no metadata.json", (TRACKER, "20"),
        format="megatron"),
    *(
        Run(f"deepspeed-{layout}", "global_step4", TAGS, missing, why, ("latest", TAGS[1]), format="deepspeed")
        for layout, missing, why in (
            ("zero1-fp32", "*rank_1_*optim_states.pt", "rank 1"),
            ("zero3-bf16", "*rank_2_*model_states.pt", "rank 2"),
            ("pipeline-zero1-bf16", "layer_01-model_states.pt", "layer_01-model_states.pt"),
            ("pipeline-tp-zero1-fp32", "layer_01-model_01-model_states.pt", "layer_01-model_01-model_states.pt"),
            ("pipeline-fp32", "mp_rank_01*", "mp_rank_01"),
            ("moe-zero2-fp32", "layer_0_expert_2*", "layer_0_expert_2"),
            ("moe-zero2-fp32", "layer_1_expert_*", "layer_1_expert_"),
            ("moe-fp32", "expp_rank_1*", "expp_rank_1"),
            *(("pipeline-fp32", f"layer_0{n}-model_states.pt", "file of a layer is missing") for n in "06"),
            ("pipeline-bf16", "layer_03-model_states.pt", "no file of a layer contains it"),
            ("pipeline-bf16", "layer_0[06]-model_states.pt", "no file of a layer contains it"),
            ("pipeline-zero1-fp32", "zero_pp_rank_1_mp_rank_01*", "rank 1"),
            ("moe-zero2-fp32", "zero_pp_rank_3*", "rank 3"),
            ("tp-zero1-bf16", "*rank_1_mp_rank_01_optim_states.pt", "rank 1"),
        )
    ),
    Run("deepspeed-universal", "global_step4", TAGS, "mp_rank_*", "no *_model_states.pt",
        ("latest_universal", TAGS[1]), format="universal"),
    Run("deepspeed-universal", "global_step4", TAGS, "zero/blocks.0.up.weight/fp32.pt", "fp32.pt",
        ("latest_universal", TAGS[1]), format="universal"),
    Run("orbax-manager", "run/5", ("5", "10"), "commit_success.txt", "no commit_success.txt", format="orbax"),
)  # fmt: skip


@pytest.mark.parametrize(
    "run", tiered(RUNS, test=["deepspeed-pipeline-fp32-layer_00-model_states.pt"], extended=[run.name for run in RUNS])
)
def test_it_is_complete_with_its_marker_alone(run, tmp_path):
    newer = run.lay(tmp_path / "run")
    listing = ckpt_tools.ls(tmp_path / "run").checkpoints
    names = [name.partition("/")[0] for name in reversed(run.names)]
    assert [each.name for each in listing] == names
    assert [each.problem for each in listing] == [None, None]
    assert {each.format for each in listing} == {run.format}
    removed = list(newer.glob(run.markers))
    assert removed
    for path in removed:
        path.unlink()
    found = {each.name: each for each in ckpt_tools.ls(tmp_path / "run").checkpoints}
    assert found[names[1]].is_complete
    assert names[0] not in found or (run.why in (found[names[0]].problem or ""))
    assert ckpt_tools.inspect(f"{tmp_path}/run@latest").source.endswith(names[1]) or run.latest[0]


SINGLE = {
    "lightning-ckpt": ("last.ckpt", LIGHTNING),
    "composer-monolithic": ("ep0-ba3-rank0.pt", ("ep0-ba3-rank0.pt", "ep1-ba6-rank0.pt")),
}


@pytest.mark.extended
@pytest.mark.parametrize("layout", SINGLE)
def test_one_file_is_complete_to_its_end(layout, tmp_path):
    part, names = SINGLE[layout]
    newer = Run(layout, part, names, "", "").lay(tmp_path / "run")
    assert [each.is_complete for each in ckpt_tools.ls(tmp_path / "run").checkpoints] == [True, True]
    newer.write_bytes(newer.read_bytes()[:-1])
    assert [each.is_complete for each in ckpt_tools.ls(tmp_path / "run").checkpoints] == [False, True]
