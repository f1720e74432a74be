"""A run of what each trainer itself wrote, under its usual names: complete, and without its marker incomplete."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt_tools
from fixtures.corpus import make

pytestmark = pytest.mark.extended


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
    Run("accelerate-ddp-safetensors", ".", ACCELERATE, "random_states_*", "writes last", format="safetensors"),
    Run("accelerate-ddp-bin", ".", ACCELERATE, "pytorch_model.bin", "no file that holds the model", format="torch"),
    Run("accelerate-fsdp1-full", ".", ACCELERATE, "random_states_*", "writes last", format="torch"),
    Run("accelerate-fsdp2", ".", ACCELERATE, "random_states_*", "writes last"),
    Run("accelerate-fsdp2", ".", ACCELERATE, "pytorch_model_fsdp_0/.metadata", "no pytorch_model_fsdp_0/.metadata"),
    Run("accelerate-ranks", ".", ACCELERATE, "random_states_*", "writes last", format="sharded"),
    Run("accelerate-ranks", ".", ACCELERATE, "pytorch_model_fsdp_0_rank0.bin", "lacks", format="sharded"),
    Run("lightning-model-parallel", "last.ckpt", LIGHTNING, "meta.pt", "no meta.pt"),
    Run("lightning-fsdp", "last.ckpt", LIGHTNING, ".metadata", "no .metadata"),
    Run("torchtitan", "step-3", STEPS, ".metadata", "no .metadata"),
    Run("torch-checkpointing", "step-7", STEPS, "metadata.pkl", "no metadata.pkl", format="sharded"),
    Run("torch-checkpointing", "step-7", STEPS, "optimizer_1.pt", "lacks the files of rank 1", format="sharded"),
    Run("composer", "ep0-ba3", ("ep0-ba3", "ep1-ba6"), ".metadata", "no .metadata"),
    Run("olmo-core", "step3", ("step3", "step6"), ".metadata.json", "no .metadata.json"),
    Run("olmo-core", "step3", ("step3", "step6"), "model_and_optim/.metadata", "no model_and_optim/.metadata"),
    Run("automodel", "epoch_0_step_3", ("epoch_0_step_3", "epoch_0_step_6"), "optim/.metadata", "no optim/.metadata"),
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
    Run("deepspeed-zero1-fp32", "global_step4", TAGS, "*rank_1_*optim_states.pt", "rank 1",
        ("latest", TAGS[1]), format="deepspeed"),
    Run("deepspeed-zero3-bf16", "global_step4", TAGS, "*rank_2_*model_states.pt", "rank 2",
        ("latest", TAGS[1]), format="deepspeed"),
    *(
        Run(layout, "global_step4", TAGS, missing, missing.strip("*"), ("latest", TAGS[1]), format="deepspeed")
        for layout, missing in (
            ("deepspeed-pipeline-zero1-bf16", "layer_01-model_states.pt"),
            ("deepspeed-pipeline-tp-zero1-fp32", "layer_01-model_01-model_states.pt"),
            ("deepspeed-pipeline-zero1-bf16", "mp_rank_01*"),
            ("deepspeed-pipeline-fp32", "mp_rank_01*"),
            ("deepspeed-moe-zero2-fp32", "layer_0_expert_2*"),
            ("deepspeed-moe-zero2-fp32", "layer_1_expert_*"),
            ("deepspeed-moe-fp32", "expp_rank_1*"),
        )
    ),
    *(
        Run(f"deepspeed-pipeline-{dtype}", "global_step4", TAGS, f"layer_0{layers}-model_states.pt", why,
            ("latest", TAGS[1]), format="deepspeed")
        for dtype, layers, why in (
            *(("fp32", layer, "file of a layer is missing") for layer in "036"),
            *(("bf16", layers, "no file of a layer contains it") for layers in ("3", "[06]")),
        )
    ),
    Run("deepspeed-pipeline-zero1-fp32", "global_step4", TAGS, "zero_pp_rank_1_mp_rank_01*", "rank 1",
        ("latest", TAGS[1]), format="deepspeed"),
    Run("deepspeed-moe-zero2-fp32", "global_step4", TAGS, "zero_pp_rank_3*", "rank 3", ("latest", TAGS[1]),
        format="deepspeed"),
    Run("deepspeed-tp-zero1-bf16", "global_step4", TAGS, "*rank_1_mp_rank_01_optim_states.pt", "rank 1",
        ("latest", TAGS[1]), format="deepspeed"),
    Run("deepspeed-universal", "global_step4", TAGS, "mp_rank_*", "no *_model_states.pt",
        ("latest_universal", TAGS[1]), format="universal"),
    Run("deepspeed-universal", "global_step4", TAGS, "zero/blocks.0.up.weight/fp32.pt", "fp32.pt",
        ("latest_universal", TAGS[1]), format="universal"),
    Run("orbax-manager", "run/5", ("5", "10"), "commit_success.txt", "no commit_success.txt", format="orbax"),
)  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.layout}-{run.markers}")
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


@pytest.mark.parametrize("layout", SINGLE)
def test_one_file_is_complete_to_its_end(layout, tmp_path):
    part, names = SINGLE[layout]
    newer = Run(layout, part, names, "", "").lay(tmp_path / "run")
    assert [each.is_complete for each in ckpt_tools.ls(tmp_path / "run").checkpoints] == [True, True]
    newer.write_bytes(newer.read_bytes()[:-1])
    assert [each.is_complete for each in ckpt_tools.ls(tmp_path / "run").checkpoints] == [False, True]
