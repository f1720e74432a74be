"""What goes wrong before any worker starts: one sentence and the documented exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from training.__main__ import main


def fail(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["--engine=fsdp2", *args])
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.exit_code, result.stderr


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """The folder of a run that has saved epochs 2, 9 and 10, and begun another."""
    for name in ("epoch_0002", "epoch_0009", "epoch_0010", ".epoch_0011.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    return tmp_path


def test_options_that_do_not_fit_are_a_usage_error(tmp_path: Path) -> None:
    code, sentence = fail(f"--out={tmp_path}", "--num-workers=3")
    assert code == 2
    assert sentence.startswith("error: the global batch of 64 does not divide over 3 workers")


def test_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert fail(f"--out={tmp_path}", "--resume=latest")[0] == 3
    code, sentence = fail(f"--out={tmp_path}", f"--resume={tmp_path / 'none'}")
    assert code == 3
    assert "there is no checkpoint " in sentence


def test_a_used_folder_is_not_written_to_by_accident(used: Path, tmp_path: Path) -> None:
    assert fail(f"--out={used}")[0] == 8
    code, sentence = fail(f"--out={used}", f"--resume={tmp_path}")
    assert code == 8
    assert "--resume latest" in sentence


def test_latest_is_the_highest_finished_epoch(used: Path) -> None:
    from training.checkpoints import resume_folder
    from training.config import TrainConfig

    found = resume_folder(TrainConfig(out=used, engine="fsdp2", resume="latest"))
    assert found == used / "checkpoints" / "epoch_0010"
