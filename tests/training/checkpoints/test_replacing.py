"""A run removes and replaces nothing that no run wrote."""

from __future__ import annotations

import pytest

from ckpt_tools.errors import DestinationExistsError
from training.checkpoints.locking import only_run
from training.checkpoints.run_folder import CHECKPOINTS, make_partial
from training.config.train_config import TrainConfig
from training.loop.result import RESULT_NAME, RunResult, check_result_file

RESULT = RunResult(
    "fsdp2", "full_shard", "ray", 2, "fp32", "digits", 1, {}, {}, {}, 0.5, 1, 2, "epoch_0001", 1.0, (), (1, 2)
)
SHARDS = (".metadata", ".metadata.tmp", "__0_0.distcp", "latest", "zero_to_fp32.py", "zero_to_torch.py",
          "global_step8/zero_pp_rank_0_mp_rank_00_model_states.pt",
          "global_step8/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")  # fmt: skip


def test_what_a_killed_run_left_of_a_checkpoint_is_removed(tmp_path):
    for name in SHARDS:
        path = tmp_path / ".epoch_0001.partial" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    for _ in range(2):
        assert list(make_partial(tmp_path, "epoch_0001").iterdir()) == []


@pytest.mark.parametrize("name", ["notes.txt", "global_step8/notes.pt", ".metadata.bak", "link"])
def test_anything_else_there_is_kept(name, tmp_path):
    partial = make_partial(tmp_path, "epoch_0001")
    (partial / ".metadata").write_text("half")
    path = partial / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(".metadata") if name == "link" else path.write_text("mine")
    with pytest.raises(DestinationExistsError, match=path.name):
        make_partial(tmp_path, "epoch_0001")
    assert path.exists() and (partial / ".metadata").exists()


@pytest.mark.parametrize("text", ["mine", "{}", "[]", '{"accuracy": 1}'])
def test_a_result_that_no_run_wrote_is_found_before_it_is_replaced(text, tmp_path):
    check_result_file(tmp_path)
    RESULT.write(tmp_path)
    check_result_file(tmp_path)
    (tmp_path / RESULT_NAME).write_text(text)
    with pytest.raises(DestinationExistsError, match="is not the result of a run"):
        check_result_file(tmp_path)


def test_a_new_run_keeps_what_somebody_laid_into_an_unfinished_checkpoint(tmp_path):
    partial = make_partial(tmp_path / CHECKPOINTS, "epoch_0001")
    (partial / ".metadata").write_text("half")
    (partial / "notes.txt").write_text("mine")
    config = TrainConfig(out=tmp_path, engine="fsdp2", launcher="torchrun")
    with pytest.raises(DestinationExistsError, match=r"notes\.txt"), only_run(config):
        pass
    assert sorted(path.name for path in partial.iterdir()) == [".metadata", "notes.txt"]
    (partial / "notes.txt").unlink()
    with only_run(config):
        assert list((tmp_path / CHECKPOINTS).iterdir()) == []
