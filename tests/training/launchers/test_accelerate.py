"""``accelerate launch`` starts the ranks of a run, by the command that the page on clusters gives."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from tests.training.conftest import in_process
from tests.training.documents import PAGES
from training.__main__ import main
from training.config.train_config import TrainConfig
from training.loop.result import RunResult

TINY = ("--model=cnn", "--num-samples=32", "--batch-size=16", "--epochs=1", "--strategy=full_shard")


def documented() -> tuple[Namespace, TrainConfig]:
    """The launcher's options, and the run that it starts."""
    [words] = re.findall(r"(?s)`accelerate launch (.*?)\s\.\.\.`", PAGES["training_clusters.md"])
    asked = launch_command_parser().parse_args(shlex.split(words))
    run = main.make_context("training", [*asked.training_script_args, *TINY]).params
    return asked, TrainConfig(**run)


def test_the_documented_command_starts_as_many_ranks_as_the_run_has():
    asked, config = documented()
    assert (asked.module, asked.training_script) == (True, "ckpt_tools_training")
    assert asked.multi_gpu and asked.num_machines == 2
    assert (config.launcher, config.num_workers) == ("torchrun", asked.num_processes)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_under_accelerate_trains_saves_and_says_its_world_size(tmp_path):
    """The documented options on one machine, with two ranks and a free port."""
    own = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0", "--module", "training")
    run = ("--launcher=torchrun", "--num-workers=2", f"--out={tmp_path}", *TINY)
    done = in_process("-m", "accelerate.commands.launch", *own, *run)
    assert done.returncode == 0, done.stderr
    result = RunResult.read(tmp_path / "result.json")
    assert (result.num_workers, len(result.history[0].losses)) == (2, 2)
    assert len(list(Path(result.checkpoint).glob("__*.distcp"))) == 2
