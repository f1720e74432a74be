"""``ckpt-tools prune``: old checkpoints go, by rules that a user states, and never the newest complete one."""

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import CkptError, DestinationExistsError, SourceNotFoundError, UsageError
from ckpt_tools.runs.files import batch_for_removal
from ckpt_tools.runs.rules import BestMetric
from tests.runs.test_completeness import MADE, laid, listed
from tests.support.commands import printed
from tests.support.s3_server import BUCKET


def saved(folder: Path, step: int, **metrics: float) -> Path:
    folder.mkdir(parents=True)
    torch.save({"w": torch.full((1,), float(step))}, folder / "pytorch_model.bin")
    state = {"global_step": step, "log_history": [{"step": step, "eval_loss": 1 / step, **metrics}]}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def run(tmp_path):
    for step in (100, 200, 300, 400, 500):
        saved(tmp_path / "run" / f"checkpoint-{step}", step, eval_accuracy=0.9 if step == 200 else 0.5)
    (tmp_path / "run" / "log.txt").write_text("x")
    return tmp_path / "run"


def kept(run: Path, **options: Any) -> list[int]:
    report = ckpt_tools.prune(run, keep_last=options.pop("keep_last", 1), **options)
    return [int(each.name.rpartition("-")[2]) for each in report.checkpoints if each.stays]


def there(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_what_does_not_stay_is_gone_and_nothing_goes_without_yes(run):
    before = there(run)
    assert kept(run, keep_last=2) == [500, 400]
    said = printed("prune", run, "--keep-last", "2")
    assert "would go" in said and "6 files" in said and "add --yes" in said
    assert there(run) == before
    report = ckpt_tools.prune(run, keep_last=2, yes=True)
    assert there(run) == ["checkpoint-400", "checkpoint-500", "log.txt"]
    assert (report.num_files, report.is_removed) == (6, True)
    assert ckpt_tools.open(run / "checkpoint-400")["w"].numpy()[0] == 400


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"keep_last": 1}, [500]),
        ({"keep_every": 200}, [500, 400, 200]),
        ({"keep_best": "eval_loss"}, [500]),
        ({"keep_best": "eval_loss:max"}, [500, 100]),
        ({"keep_best": "eval_accuracy"}, [500, 200]),
        ({"keep_last": 3, "keep_best": "eval_accuracy:max"}, [500, 400, 300, 200]),
        ({"keep_last": 99}, [500, 400, 300, 200, 100]),
    ],
)
def test_rules_say_what_stays(options, steps, run):
    assert kept(run, **options) == steps


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_best": "eval_f1:max"}, "have eval_accuracy, eval_loss"),
        ({"keep_best": "eval_thing"}, "write eval_thing:min or eval_thing:max"),
        ({"keep_best": ":max"}, "names no metric"),
        ({"keep_last": 0}, "keep_last=0 is not a number"),
    ],
)
def test_wrong_rules_are_refused(options, words, run):
    with pytest.raises(UsageError, match=words):
        kept(run, **options)


def test_which_end_of_a_metric_is_better():
    for word in ("loss", "error", "perplexity", "ppl", "wer", "cer", "mse", "mae", "rmse", "nll"):
        assert BestMetric.parse(f"eval_{word}") == BestMetric(f"eval_{word}", True)
    for word in ("accuracy", "acc", "f1", "bleu", "rouge", "score", "auc", "reward", "precision", "recall"):
        assert BestMetric.parse(f"Test/{word.upper()}@1") == BestMetric(f"Test/{word.upper()}@1", False)
    assert BestMetric.parse("recall:min") == BestMetric("recall", True)
    assert BestMetric.parse("a:b:max") == BestMetric("a:b", False)


def test_the_newest_complete_one_stays_whatever_is_newer(run):
    (run / "checkpoint-500" / "trainer_state.json").rename(run / "checkpoint-500" / "rng_state.pth")
    assert kept(run) == [500, 400]
    reason = ckpt_tools.prune(run, keep_last=1).checkpoints[0].reason
    assert "not complete" in reason and "incomplete=True removes it" in reason
    (run / "checkpoint-500" / "trainer_state.json").write_text("{")
    assert "trainer_state.json" in (ckpt_tools.ls(run).checkpoints[0].problem or "")


def test_incomplete_ones_go_an_hour_after_their_last_write(run):
    for step in (100, 500):
        (run / f"checkpoint-{step}" / "trainer_state.json").rename(run / f"checkpoint-{step}" / "rng_state.pth")
    for path in (run / "checkpoint-100").iterdir():
        os.utime(path, (1e9, 1e9))
    assert kept(run, incomplete=True) == [500, 400]
    report = ckpt_tools.prune(run, keep_last=4, incomplete=True, yes=True)
    assert [each.name for each in report.checkpoints if not each.stays] == ["checkpoint-100"]
    assert not (run / "checkpoint-100").exists()


def test_what_a_link_or_latest_names_stays(run):
    (run / "LOWEST_VAL").symlink_to("checkpoint-200")
    (run / "latest").write_text("checkpoint-300")
    report = ckpt_tools.prune(run, keep_last=1)
    reasons = {each.name: each.reason for each in report.checkpoints if each.stays}
    assert reasons["checkpoint-200"] == "the link LOWEST_VAL leads to it"
    assert reasons["checkpoint-300"] == "the file latest names it"


def test_names_without_a_step_and_files_of_one_step_stay(run, tmp_path):
    saved(run / "final", 600)
    assert "its name has no step" in [each.reason for each in ckpt_tools.prune(run, keep_last=1).checkpoints]
    (tmp_path / "files").mkdir()
    for stem in ("model", "optimizer"):
        for epoch in (1, 2):
            torch.save({"w": torch.ones(2)}, tmp_path / "files" / f"{stem}_epoch_{epoch}.pt")
    ckpt_tools.prune(tmp_path / "files", keep_last=1, yes=True)
    assert there(tmp_path / "files") == ["model_epoch_2.pt", "optimizer_epoch_2.pt"]


def test_several_runs_and_single_checkpoints_are_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "sweep" / "a")
    shutil.copytree(run, tmp_path / "sweep" / "b")
    with pytest.raises(UsageError, match="several runs"):
        ckpt_tools.prune(tmp_path / "sweep", keep_last=1, yes=True)
    with pytest.raises(UsageError, match="is itself one checkpoint"):
        ckpt_tools.prune(run / "checkpoint-100", keep_last=1, yes=True)
    with pytest.raises(SourceNotFoundError):
        ckpt_tools.prune(tmp_path / "nothing", keep_last=1)


def test_a_newest_checkpoint_that_cannot_be_opened_stops_it(run):
    """``ls`` reads no pickle of the newest; ``prune`` does, before the others go."""
    path = run / "checkpoint-500" / "pytorch_model.bin"
    data = bytearray(path.read_bytes())
    at = data.index(b"_rebuild_tensor_v2")
    data[at : at + 8] = b"_rebuilt"
    path.write_bytes(data)
    assert ckpt_tools.ls(run).checkpoints[0].is_complete
    before = there(run)
    with pytest.raises(CkptError, match=r"checkpoint-500, .* nothing was removed"):
        ckpt_tools.prune(run, keep_last=1, yes=True)
    assert there(run) == before


def test_a_run_that_is_being_written_is_left_alone(run):
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DestinationExistsError, match="a run is writing"):
            ckpt_tools.prune(run, keep_last=1, yes=True)
        assert len(kept(run)) == 1
    ckpt_tools.prune(run, keep_last=1, yes=True)
    assert there(run) == [".lock", "checkpoint-500", "log.txt"]


def assert_never_whole(run: Path, name: str, files: Sequence[Sequence[str]]) -> None:
    """After each file that goes, the checkpoint is incomplete, or gone."""
    for path in [path for batch in files for path in batch]:
        (run / path).unlink()
        found = listed(run) if any(each.is_file() for each in (run / name).rglob("*")) else {}
        assert not found or not found[name].is_complete, path


@pytest.mark.parametrize("name", [name for name in MADE if not name.endswith(".ckpt")])
def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole(name, tmp_path):
    laid(tmp_path / "run", name, MADE[name])
    files = [
        path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run" / name).rglob("*") if path.is_file()
    ]
    try:
        assert_never_whole(tmp_path / "run", name, batch_for_removal(files))
    except SourceNotFoundError:
        assert not list((tmp_path / "run" / name).rglob("*.safetensors"))


def test_in_a_store_of_fsspec(run):
    fsspec.filesystem("memory").put(str(run), "/of-prune", recursive=True)
    ckpt_tools.prune("memory://of-prune", keep_last=1, yes=True)
    assert [each.name for each in ckpt_tools.ls("memory://of-prune").checkpoints] == ["checkpoint-500"]
    fsspec.filesystem("memory").rm("/of-prune", recursive=True)


@pytest.mark.extended
def test_in_a_bucket(s3, run):
    prefix = s3.new_prefix()
    s3.put(prefix, {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()})
    url = f"s3://{BUCKET}/{prefix}".rstrip("/")
    with ckpt_tools.claim(url), pytest.raises(DestinationExistsError):
        ckpt_tools.prune(url, keep_last=1, yes=True)
    ckpt_tools.prune(url, keep_last=1, keep_every=300, yes=True)
    assert [each.name for each in ckpt_tools.ls(url).checkpoints] == ["checkpoint-500", "checkpoint-300"]


def lightning(path: Path, epoch: int, score: float) -> None:
    callback = {"monitor": "val_loss", "current_score": torch.tensor(score), "best_model_score": torch.tensor(0.1)}
    content = {"state_dict": {"w": torch.ones(2)}, "epoch": epoch, "callbacks": {"ModelCheckpoint{}": callback}}
    torch.save(content, path / f"epoch={epoch}-step={epoch}.ckpt")


def test_metrics_of_lightning_ray_and_ours(tmp_path):
    for name in ("lightning", "ray", "ours/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    for number, score in ((1, 0.5), (2, 0.25), (3, 0.75)):
        lightning(tmp_path / "lightning", number, score)
        saved(tmp_path / "ray" / f"checkpoint_00000{number}", number)
        saved(tmp_path / "ours" / "checkpoints" / f"epoch_000{number}", number)
    results = [
        {"checkpoint_dir_name": f"checkpoint_00000{number}", "metrics": {"reward": -abs(number - 2)}}
        for number in (1, 2, 3)
    ]
    (tmp_path / "ray" / "checkpoint_manager_snapshot.json").write_text(json.dumps({"checkpoint_results": results}))
    history = [{"epoch": number, "losses": [1.0], "correct": 9 - number, "total": 10} for number in (1, 2, 3)]
    (tmp_path / "ours" / "result.json").write_text(json.dumps({"history": history}))
    cases = {"lightning": ("val_loss", 2), "ray": ("reward", 2), "ours": ("accuracy", 1)}
    for name, (metric, best) in cases.items():
        found = ckpt_tools.prune(tmp_path / name, keep_last=1, keep_best=metric).checkpoints
        assert [str(best) in each.name for each in found if each.reason == f"the best by {metric}"] == [True], name
