"""No process outlives its run, however the run ends; and the run that follows goes on exactly."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

import ckpt_tools
from tests.support.s3_server import BUCKET
from tests.training.conftest import in_process
from tests.training.jobs import result_of, train_each
from tests.training.watched import Watched, watched
from training.__main__ import main
from training.checkpoints.locking import LOCK_NAME, PATIENCE_SECONDS, lock_run
from training.checkpoints.run_folder import list_saved_checkpoints
from training.config.options import LauncherName
from training.config.train_config import TrainConfig

EPOCHS = 400

TRAIN, CKPT_TOOLS_TRAIN = ("-m", "training"), ("-m", "ckpt_tools", "train")
OWN_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *TRAIN)


def config(out: Path, launcher: LauncherName, **values: Any) -> TrainConfig:
    """One step an epoch, on two ranks if nothing else is said."""
    resume = "latest" if list_saved_checkpoints(out) else None
    size = {"model": "cnn", "num_samples": 64, "batch_size": 64, "epochs": EPOCHS, "resume": resume}
    return TrainConfig(out=out, engine="fsdp2", launcher=launcher, **(size | values))


def running(config: TrainConfig, program: tuple[str, ...] = TRAIN) -> Any:
    return watched(config.out, *program, *config.to_args())


def end(run: Watched, number: signal.Signals) -> None:
    """Stop the run; nothing of it is left, and it says so in one sentence with the documented code."""
    saved = bool(list_saved_checkpoints(run.out))
    code, stderr, _ = run.stop(number)
    if number == signal.SIGKILL:
        assert not run.left_in_time()
        return
    assert not run.left()
    way_on = r"epoch_\d{4}(_step_\d{6})? is saved; continue with --resume latest"
    if number == signal.SIGTERM:
        stopped = rf"stopped as requested(: {way_on}|, before .*)\n"
        assert (code == 75 and re.fullmatch(stopped, stderr)) or code == 143, (code, stderr)
        return
    assert code == 128 + number, stderr
    assert re.fullmatch(rf"interrupted by {number.name}: {way_on if saved else '.*'}\n", stderr), stderr


def check_goes_on_exactly(rest: TrainConfig, whole: TrainConfig) -> None:
    """What is left is resumed for two epochs, and does in them what a run does that nobody stopped."""
    with lock_run(rest):
        assert not list((rest.out / "checkpoints").glob(".epoch*"))
    if rest.export is None:
        train_each(rest)
    else:
        check_command(rest)
    train_each(whole)
    resumed, uninterrupted = result_of(rest), result_of(whole)
    assert [epoch.losses for epoch in resumed.history] == [epoch.losses for epoch in uninterrupted.history[-2:]]
    assert [epoch.epoch for epoch in resumed.history] == [rest.until - 1, rest.until]
    assert resumed.predicted == uninterrupted.predicted
    assert ckpt_tools.diff(resumed.checkpoint, uninterrupted.checkpoint).equal


def check_command(config: TrainConfig) -> None:
    """The command prints a line for each epoch, and exports the model."""
    done = in_process(*TRAIN, *config.to_args())
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    result = result_of(config)
    assert ckpt_tools.verify(result.checkpoint, config.export).equal
    lines = [line for line in done.stdout.splitlines() if not line.startswith("step ")]  # of a busy machine
    assert lines[-4:] == [
        *(epoch.format_line(config.until) for epoch in result.history),
        f"{result.correct} of 360 held-out samples right ({result.accuracy:.4f})",
        f"checkpoint: {config.out}/checkpoints/epoch_{config.until:04d}",
    ]


def end_after_a_checkpoint(config: TrainConfig, number: signal.Signals, moments: random.Random) -> None:
    """Within a second after its first one."""
    before = len(list_saved_checkpoints(config.out))
    with running(config) as run:
        run.wait_until(lambda: len(list_saved_checkpoints(config.out)) > before)
        time.sleep(moments.uniform(0, 1))
        end(run, number)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("launcher", "workers"),
    [
        ("torchrun", 1),
        pytest.param("torchrun", 2, marks=pytest.mark.extended),
        pytest.param("ray", 2, marks=pytest.mark.soak),
    ],
)
def test_a_stopped_run_leaves_no_process_and_goes_on_exactly(
    launcher, workers, tmp_path, pytestconfig, record_property
):
    """Killed after its first checkpoint; in the soak, also stopped before there is a worker, and after a checkpoint
    more. Then it goes on."""
    moments = random.Random(f"{pytestconfig.getoption('--kill-seed')} {launcher}")
    out = tmp_path / "run"
    end_after_a_checkpoint(config(out, launcher, num_workers=workers), signal.SIGKILL, moments)
    if pytestconfig.getoption("--soak") and workers > 1:
        with running(config(out, launcher)) as run:
            run.wait_until(run.holds_the_lock)
            time.sleep(moments.uniform(0, 2))
            end(run, signal.SIGHUP if launcher == "torchrun" else signal.SIGINT)
        end_after_a_checkpoint(config(out, launcher), signal.SIGTERM, moments)
        record_property("kills", "3 runs ended by SIGKILL, SIGTERM and SIGINT or SIGHUP")
    size = {"num_workers": workers, "until": int(list_saved_checkpoints(out)[-1].name[6:10]) + 2}
    export = str(tmp_path / "model.safetensors") if launcher == "torchrun" and workers == 2 else None
    rest = config(out, launcher, export=export, **size)
    check_goes_on_exactly(rest, config(tmp_path / "whole", "torchrun", save_every=EPOCHS, **size))


@pytest.mark.extended
@pytest.mark.parametrize("program", [CKPT_TOOLS_TRAIN, TRAIN], ids=" ".join)
def test_a_run_is_stopped_while_torch_is_imported(program, tmp_path):
    with running(config(tmp_path, "torchrun"), program) as run:
        run.wait_until(lambda: "/libtorch" in Path(f"/proc/{run.process.pid}/maps").read_text())
        said = "interrupted by SIGINT: no checkpoint was saved yet; start the run again\n"
        assert run.stop(signal.SIGINT)[:2] == (130, said)


@pytest.mark.extended
def test_ranks_of_a_users_own_torchrun_end_with_it(tmp_path):
    """Nobody else could end them: its agent is killed. Rank 0 held the lock until then."""
    own = config(tmp_path, "torchrun")
    with running(own, OWN_TORCHRUN) as run:
        run.wait_until(lambda: bool(list_saved_checkpoints(tmp_path)))
        sentence = f"Error: another run is writing to {tmp_path}"
        assert refused("--out", str(tmp_path), "--resume=latest").startswith(sentence)
        run.stop(signal.SIGKILL)
        assert not run.left_in_time()
    with lock_run(own):
        assert not list((tmp_path / "checkpoints").glob(".epoch*"))


def refused(*args: str) -> str:
    done = CliRunner().invoke(main, ["--engine=fsdp2", "--model=cnn", *args])
    assert (done.exit_code, done.stderr.count("\n")) == (8, 1), (done.exit_code, done.stderr)
    return done.stderr


@pytest.mark.parametrize("launcher", get_args(LauncherName))
@pytest.mark.parametrize("resume", [[], ["--resume=latest"]], ids=["fresh", "resumed"])
def test_a_second_run_on_a_folder_is_refused(launcher, resume, tmp_path, monkeypatch):
    monkeypatch.setattr("training.checkpoints.locking.PATIENCE_SECONDS", 0.1)
    (tmp_path / "checkpoints/epoch_0001").mkdir(parents=True)
    with lock_run(config(tmp_path, launcher)):
        sentence = refused(f"--out={tmp_path}", f"--launcher={launcher}", *resume)
    assert f"another run is writing to {tmp_path} (process {os.getpid()} on {socket.gethostname()})" in sentence
    assert not (tmp_path / "torchrun.log").exists()


KILLED = "import os, sys\n{take}\nprint('held', flush=True)\nos.kill(os.getpid(), 9)"
TAKE = """
from pathlib import Path; from training.config.train_config import TrainConfig
from training.checkpoints.locking import lock_run
held = lock_run(TrainConfig(out=Path(sys.argv[1]), engine='fsdp2')); held.__enter__()"""


def killed_while_it_holds(take: str, *args: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED.format(take=take), *args], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"held\n"), done.stderr


def test_the_lock_of_a_killed_run_keeps_nobody_out(tmp_path):
    killed_while_it_holds(TAKE, str(tmp_path))
    assert (tmp_path / LOCK_NAME).exists()
    started = time.monotonic()
    with lock_run(config(tmp_path, "torchrun")):
        assert time.monotonic() - started < PATIENCE_SECONDS


def test_only_what_a_killed_run_left_half_written_is_removed(tmp_path):
    kept = {"epoch_0001", ".epoch_1.partial", ".epoch_0003", "epoch_0004.partial", ".epoch_0005.partial.mine"}
    for name in (*kept, ".epoch_0002.partial"):
        (tmp_path / "checkpoints" / name / "below").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints/.epoch_0006.partial").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "checkpoints/.epoch_0007.partial").write_text("a file")
    with lock_run(config(tmp_path, "torchrun", resume=None)):
        found = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert found == kept | {".epoch_0006.partial", ".epoch_0007.partial"}
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.extended
def test_a_second_run_on_a_storage_is_refused_and_a_killed_one_keeps_nobody_out(s3_server, s3, tmp_path):
    prefix = s3_server.new_prefix()
    url = f"s3://{BUCKET}/{prefix}run"
    with ckpt_tools.claim(url):
        sentence = refused(f"--out={tmp_path / 'other'}", f"--storage={url}")
    assert f"another process is writing to {url} (process {os.getpid()} on {socket.gethostname()})" in sentence
    assert not s3.keys(f"{prefix}run")
    killed_while_it_holds("import ckpt_tools; held = ckpt_tools.claim(sys.argv[1]); held.__enter__()", url)
    assert s3.keys(f"{prefix}run") == ["/.ckpt-tools-partial/lock"]
    with ckpt_tools.claim(url) as claim:
        claim.check()
