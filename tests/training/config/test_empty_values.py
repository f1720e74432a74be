"""No option of a command of training may be empty; the cases are made from the commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt_tools.errors import UsageError
from tests.support.empty_values import check_refused, lines_with_one_empty_value
from training.__main__ import main
from training.config.options import Options
from training.config.train_config import TrainConfig
from training.studies import compare

COMMANDS = {"train": main, "compare": compare.main}
LINES = [
    pytest.param(command, label, words, id=f"{name}{label}")
    for name, command in COMMANDS.items()
    for label, words in lines_with_one_empty_value(command)
]


def test_every_command_is_here():
    folder = Path(sys.modules["training"].__path__[0])
    found = {path.stem for path in folder.rglob("*.py") if "@click.command(" in path.read_text()}
    assert found == {"__main__", *COMMANDS.keys() - {"train"}}


@pytest.mark.parametrize(("command", "label", "words"), LINES)
def test_an_empty_value_is_refused(command, label, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(command, label, words)


@pytest.mark.parametrize("name", ["out", "data-root", "storage", "rename"])
def test_an_empty_value_in_a_file_of_options_is_refused(name, tmp_path):
    file = tmp_path / "run.toml"
    value = '[""]' if name == "rename" else '""'
    file.write_text(f"{name} = {value}\n")
    out = [] if name == "out" else ["--out", str(tmp_path / "run")]
    ended = CliRunner().invoke(main, ["--config", str(file), *out])
    assert (ended.exit_code, f"--{name}" in ended.output) == (2, True), ended.output


@pytest.mark.parametrize("name", sorted(Options.__dataclass_fields__.keys() - {"out"}))
def test_a_run_has_no_empty_text(name, tmp_path):
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} is empty"):
        TrainConfig(**{"out": tmp_path, "strategy": "full_shard", name: ""})


@pytest.mark.parametrize("out", ["", Path()])
def test_a_run_has_no_empty_folder(out):
    """``Path`` makes the current folder of an unset variable."""
    with pytest.raises(UsageError, match=r"^--out is empty"):
        TrainConfig(out=out, strategy="full_shard")  # type: ignore[arg-type]


def test_an_unset_variable_does_not_train_in_the_current_folder(tmp_path):
    command = [sys.executable, "-m", "ckpt_tools", "train", "--strategy", "full_shard", "--out", ""]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, "Error: --out is empty")
    assert not list(tmp_path.iterdir())
