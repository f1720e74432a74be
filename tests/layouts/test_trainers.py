"""A trainer's folder is given back: the trainer itself resumes from it at another number of ranks."""

import shutil
from pathlib import Path

import pytest

import ckpt_tools
from fixtures import launch
from fixtures.corpus import make
from fixtures.corpus.trainers import ON_RANKS
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

SMALL = {
    "accelerate-fsdp2": {"scheduler.bin", "custom_checkpoint_0.pkl"},
    "accelerate-fsdp1": {"scheduler.bin", "custom_checkpoint_0.pkl"},
    "lightning-model-parallel": {"meta.pt"},
    "lightning-fsdp": {"meta.pt"},
    "transformers-fsdp2": {"scheduler.pt", "trainer_state.json"},
}
"""What each lays beside its tensors for all ranks together."""

RESUMED = {
    "accelerate": "accelerator.load_state({})",
    "lightning": "trainer.fit(model, ckpt_path={})",
    "transformers": "trainer.train(resume_from_checkpoint={})",
}


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "kind", tiered(ON_RANKS, test=(), extended=("accelerate-fsdp2", "transformers-fsdp2", "lightning-fsdp"))
)
def test_its_trainer_resumes_from_it_as_from_the_source(kind, tmp_path):
    """From two ranks to three, and from three to two."""
    made, (_, resume, args) = make(kind), ON_RANKS[kind]
    ckpt_tools.reshard(made.source, tmp_path / "3.ckpt", world_size=3)
    ckpt_tools.reshard(tmp_path / "3.ckpt", tmp_path / "2.ckpt", world_size=2)
    for ranks in (3, 2):
        wanted, found = (
            launch.pool(ranks).run(resume, str(each), *args)[0] for each in (made.source, tmp_path / f"{ranks}.ckpt")
        )
        assert len(set(wanted)) == len(wanted), "losses that do not move show nothing"
        assert found == wanted


@pytest.mark.parametrize("kind", ON_RANKS)
def test_the_small_files_are_copied_and_those_of_ranks_are_named(kind, tmp_path):
    made = make(kind)
    report = ckpt_tools.reshard(made.source, tmp_path / "out", world_size=3)
    assert {name for name in names(tmp_path / "out") if not name.endswith((".distcp", ".metadata"))} == SMALL[kind]
    for name in SMALL[kind]:
        assert (tmp_path / "out" / name).read_bytes() == (made.source / name).read_bytes()
    assert report.loading == RESUMED[kind.partition("-")[0]].format(f'"{tmp_path}/out"')
    told = [note.what for note in report.plan.notes]
    of_ranks = sorted(name for name in names(made.source) if name.endswith(("_0.pth", "_1.pth", "_0.pkl", "_1.pkl")))
    of_ranks = [name for name in of_ranks if not name.startswith("custom")]
    assert told == of_ranks
    assert report.plan.num_tensors == len(ckpt_tools.inspect(tmp_path / "out").tensors)


def test_a_checkpoint_below_a_runs_folder_is_written_at_the_top(tmp_path):
    shutil.copytree(make("transformers-fsdp2").folder, tmp_path / "run")
    beside = {"config.json", "training_args.bin", "tokenizer.json", "tokenizer_config.json", "rng_state_2.pth"}
    for name in beside:
        (tmp_path / "run" / "checkpoint-3" / name).write_text(name)
    report = ckpt_tools.reshard(tmp_path / "run", tmp_path / "out", world_size=3)
    for name in beside:
        assert (tmp_path / "out" / name).read_text() == name
    assert (tmp_path / "out" / "trainer_state.json").is_file()
    assert report.plan.notes == ()


def test_olmo_core_takes_the_state_of_rank_0_where_a_rank_has_none(tmp_path):
    report = ckpt_tools.reshard(make("olmo-core").source, tmp_path / "out", world_size=3)
    small = {name for name in names(tmp_path / "out") if not name.startswith("model_and_optim")}
    assert small == {"config.json", ".metadata.json", "train/rank0.pt"}
    assert [note.what for note in report.plan.notes] == ["train/rank1.pt"]
