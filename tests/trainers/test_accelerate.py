"""Several models in one folder of accelerate: the folder is refused with the choices, each is read whole."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.runs.opening import open_checkpoint
from fixtures.corpus import make
from fixtures.corpus.several_models import weights_of
from tests.support.every_verb import refusal

MODELS = {
    "accelerate-models-fsdp2": ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"),
    "accelerate-models-fsdp2-full": ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"),
    "accelerate-models-ddp-safetensors": ("model.safetensors", "model_1.safetensors"),
    "accelerate-models-ddp-bin": ("pytorch_model.bin", "pytorch_model_1.bin"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_is_refused_by_every_verb_with_the_paths_to_name(name, tmp_path):
    folder = make(name).folder
    code, sentence = refusal(folder, tmp_path / "out")
    assert code == 4 and sentence.endswith(" or ".join(f"{folder}/{model}" for model in MODELS[name]))
    assert "latest" not in sentence


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_each_choice_is_read_with_its_own_optimizer(name, number, tmp_path):
    made = make(name)
    source = made.folder / MODELS[name][number]
    opened, wanted = ckpt_tools.open(source), weights_of(made.folder)[number]
    assert {fqn: opened[fqn][...].tolist() for fqn in wanted} == {fqn: each.tolist() for fqn, each in wanted.items()}
    assert set(ckpt_tools.inspect(source).optimizer_slots) == {"exp_avg", "exp_avg_sq", "step"}
    ckpt_tools.convert(source, tmp_path / "out", to="dcp")
    assert ckpt_tools.verify(source, tmp_path / "out").equal
    notes = open_checkpoint(source, ReadOptions()).manifest.notes
    assert not [note for note in notes if "optimizer" in note.what]


@pytest.mark.filterwarnings("ignore")
def test_torch_reads_the_choice_that_was_resharded(tmp_path):
    made = make("accelerate-models-fsdp2")
    ckpt_tools.reshard(made.folder / "pytorch_model_fsdp_1", tmp_path / "out", world_size=3)
    wanted = weights_of(made.folder)[1]
    found = {"model": {fqn: torch.zeros_like(each) for fqn, each in wanted.items()}}
    dcp.load(found, checkpoint_id=str(tmp_path / "out" / "pytorch_model_fsdp_1"), no_dist=True)
    assert all(torch.equal(found["model"][fqn], each) for fqn, each in wanted.items())
    assert (tmp_path / "out" / "optimizer_1" / ".metadata").exists()


def test_the_run_is_one_checkpoint(tmp_path):
    folder = shutil.copytree(make("accelerate-models-fsdp2").folder, tmp_path / "state")
    assert [each.name for each in ckpt_tools.ls(folder).checkpoints] == ["."]
    run = tmp_path / "run"
    for step in (1, 2):
        shutil.copytree(folder, run / f"checkpoint_{step}")
    assert [each.name for each in ckpt_tools.ls(run).checkpoints] == ["checkpoint_2", "checkpoint_1"]
    with pytest.raises(UnsupportedError, match=r"checkpoint_2/pytorch_model_fsdp_0 or .*/pytorch_model_fsdp_1"):
        ckpt_tools.inspect(f"{run}@latest")


def notes_of(source: Path) -> Sequence[Note]:
    return open_checkpoint(source, ReadOptions()).manifest.notes


@pytest.mark.parametrize(("name", "optimizer"), [
    ("accelerate-models-fsdp2", "optimizer_1"),
    ("accelerate-models-ddp-safetensors", "optimizer_1.bin"),
    ("accelerate-models-fsdp2-full", "optimizer_1.bin"),
])  # fmt: skip
def test_a_model_without_its_optimizer_is_read_with_a_note(name, optimizer, tmp_path):
    folder = shutil.copytree(make(name).folder, tmp_path / "state")
    lost = folder / optimizer
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    assert not ckpt_tools.inspect(folder / MODELS[name][1]).optimizer_slots
    assert [note.what for note in notes_of(folder / MODELS[name][1]) if note.outcome is Outcome.MISSING] == [optimizer]
    assert ckpt_tools.inspect(folder / MODELS[name][0]).optimizer_slots


def test_half_an_optimizer_is_refused(tmp_path):
    folder = shutil.copytree(make("accelerate-models-fsdp2").folder, tmp_path / "state")
    (folder / "optimizer_1" / ".metadata").unlink()
    code, sentence = refusal(folder / "pytorch_model_fsdp_1", tmp_path / "out")
    assert code == 4 and "optimizer_1" in sentence


def test_the_only_model_of_a_folder_is_read_with_its_optimizer_too(tmp_path):
    folder = make("accelerate-fsdp2").folder
    assert ckpt_tools.diff(folder, folder / "pytorch_model_fsdp_0").equal
    (tmp_path / "only").mkdir()
    shutil.copytree(folder / "pytorch_model_fsdp_0", tmp_path / "only" / "pytorch_model_fsdp_0")
    for source in (tmp_path / "only", tmp_path / "only" / "pytorch_model_fsdp_0"):
        (note,) = notes_of(source)
        assert note.what == "optimizer_0" and "read without an optimizer" in note.why


def test_digests_of_the_choices_lie_apart(tmp_path):
    for name in ("accelerate-models-fsdp2", "accelerate-models-ddp-safetensors"):
        folder = shutil.copytree(make(name).folder, tmp_path / name)
        for model in MODELS[name]:
            ckpt_tools.checksum(folder / model)
        for model in MODELS[name]:
            report = ckpt_tools.verify(folder / model)
            assert report.equal and report.num_digests


def tags(folder: Path) -> Path:
    """Stand-in for the tags that accelerate gives DeepSpeed: real ZeRO tags of two models."""
    for tag in ("pytorch_model", "pytorch_model_1"):
        torch.save({"model": torch.nn.Linear(2, 3).state_dict()}, folder.parent / "in.pt")
        ckpt_tools.convert(folder.parent / "in.pt", folder.parent / tag, to="zero2", world_size=2, tag=tag)
        shutil.copytree(folder.parent / tag / tag, folder / tag)
    (folder / "latest").write_text("pytorch_model_1")
    return folder


def test_tags_of_several_models_of_deepspeed(tmp_path):
    folder = tags(tmp_path / "state")
    code, sentence = refusal(folder, tmp_path / "out")
    assert code == 4 and sentence.endswith("choose one with tag='pytorch_model' or tag='pytorch_model_1'")
    assert ckpt_tools.inspect(folder, tag="pytorch_model").num_parameters == 9
    assert [each.name for each in ckpt_tools.ls(folder).checkpoints] == ["."]


def test_files_of_ranks_of_several_models(tmp_path):
    """A stand-in: accelerate's names around the files of ranks of two models."""
    ranks = make("accelerate-ranks").folder
    for number in range(2):
        for file in ranks.glob("*_rank*.bin"):
            rank = file.stem.partition("_rank")[2]
            item = "optimizer" if file.name.startswith("optimizer") else "pytorch_model_fsdp"
            shutil.copy(file, tmp_path / f"{item}_{number}_rank{rank}.bin")
    code, sentence = refusal(tmp_path, tmp_path / "out")
    assert code == 4 and sentence.endswith(
        "choose one with model_key='model' optim_key='optimizer' or "
        "model_key='pytorch_model_fsdp_1' optim_key='optimizer_1'"
    )
