"""Why a run failed: the reason of a full disk, and the rank that was killed instead of those that lost it."""

import os
import pickle
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_tools.errors import StoreError
from tests.training.conftest import in_process
from tests.training.jobs import small_config
from tests.training.watched import Watched, watched
from training.checkpoints.run_folder import list_saved_checkpoints
from training.launchers.failures import RankFailure
from training.launchers.ray_restarts import AttemptFailedError, find_cause

GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
CUT_OFF = r"cannot be written: torch could not write a whole file; its disk has [\d,]+ bytes left"


@contextmanager
def no_larger_files() -> Iterator[None]:
    """The disk is full, or as good as: metrics.jsonl is smaller than this, a shard larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.extended
def test_a_failed_run_says_how_to_go_on(small_run, tmp_path):
    epoch = Path(small_run("fsdp2").checkpoint).with_name("epoch_0001")
    shutil.copytree(epoch, tmp_path / "checkpoints/epoch_0001", copy_function=os.link)
    with no_larger_files():  # of the process that is started too
        done = in_process("-m", "training", *small_config(tmp_path, engine="fsdp2", resume="latest").to_args())
    unfinished = re.escape(str(tmp_path / "checkpoints/.epoch_0002.partial"))
    assert done.returncode == 5
    assert re.fullmatch(f"Error: {unfinished} {CUT_OFF}; continue with --resume latest\n", done.stderr), done.stderr


def test_the_failure_in_a_checkpoint_exception_is_that_of_its_rank(tmp_path):
    failure = RankFailure.from_error(0, CheckpointException("", {1: (ValueError("two words"), None)}))  # type: ignore[dict-item]
    assert failure.sentence == "rank 0 failed with ValueError: two words"
    full = RankFailure.from_error(0, CheckpointException("", {1: (OSError(28, "No space left on device"), None)}))  # type: ignore[dict-item]
    assert (type(full.to_error(tmp_path)), full.message) == (StoreError, "No space left on device")


def test_the_first_failure_is_recorded_in_room_that_was_kept_for_it(tmp_path):
    record = tmp_path / "error.json"
    RankFailure.reserve_record(record)
    room = record.stat().st_size
    assert RankFailure.read_record(record) is None
    first = RankFailure.from_error(1, ValueError("first"))
    first.write_record(record)
    RankFailure.from_error(0, GLOO).write_record(record)
    assert RankFailure.read_record(record) == first and record.stat().st_size == room
    RankFailure.reserve_record(record)
    assert RankFailure.read_record(record) is None


@pytest.mark.extended
def test_the_ranks_that_lost_a_killed_one_are_not_blamed(tmp_path):
    """torchrun's agent ends the run as soon as it finds the killed rank; restarts are none."""
    config = small_config(tmp_path, engine="fsdp2", epochs=9000, save_every_steps=1, keep_last=2)
    with watched(tmp_path, "-m", "training", *config.to_args()) as run:
        run.wait_until(lambda: bool(list_saved_checkpoints(tmp_path)))
        os.kill(rank_of(run, 1), signal.SIGKILL)
        _, said = run.process.communicate(timeout=120)
    sentence = f"rank 1 was ended by SIGKILL; the kernel does so when memory runs out (see {tmp_path / 'torchrun.log'})"
    assert (run.process.returncode, said) == (1, f"Error: {sentence}; continue with --resume latest\n")


def rank_of(run: Watched, rank: int) -> int:
    for pid in run.processes():
        environment, words = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
        if f"\0LOCAL_RANK={rank}\0".encode() in environment and b"\0-m\0training\0" in words:
            return pid
    raise AssertionError("no such rank")


class WorkerHealthCheckFailedError(Exception):
    """Shaped as Ray Train's."""

    def __init__(self, failure: Exception) -> None:
        super().__init__("A worker health check failed.")
        self.health_check_failure = failure


def test_under_ray_the_lost_process_is_the_cause_and_then_what_lost_no_connection():
    """Ray passes on the failures of all ranks, pickled."""
    of_ranks = {
        rank: pickle.loads(pickle.dumps(AttemptFailedError(RankFailure.from_error(rank, GLOO)))) for rank in (0, 1)
    }
    assert find_cause(of_ranks).sentence.startswith("rank 0 failed with RuntimeError: [")
    own = of_ranks | {2: AttemptFailedError(RankFailure.from_error(2, StoreError("full")))}
    assert find_cause(own).to_error(Path("/run")).exit_code == 5
    died = own | {3: WorkerHealthCheckFailedError(RuntimeError("The actor died unexpectedly"))}
    ended = "its process, as by SIGKILL; the kernel sends it when memory runs out"
    assert find_cause(died).sentence == f"rank 3 has lost {ended}"
    machine = of_ranks | {1: WorkerHealthCheckFailedError(RuntimeError("The actor died because its node has died."))}
    assert find_cause(machine).sentence == "rank 1 has lost its machine"
