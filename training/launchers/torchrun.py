"""Launcher with torchrun.

:func:`launch` starts torchrun with the command line of the run, as a user does on several machines with
``torchrun ... -m training --launcher torchrun ...``; each process runs :func:`run_rank_process`. Ranks write their
shards into the run's folder, which all machines share.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ckpt_tools.process.guard import guard_processes
from ckpt_tools.process.signals import allow_signals, defer_signals

from ..checkpoints.locking import RunLock, lock_run
from ..checkpoints.run_folder import config_after_failure, find_resume_checkpoint
from ..checkpoints.weights import export_weights
from ..config import PACKAGE
from ..config.train_config import TrainConfig
from ..loop.loop import StoppedRun, train
from ..loop.outlets import Outlet
from ..loop.result import RESULT_NAME, RunResult
from ..loop.screen import ProgressDisplay
from ..loop.stopping import EXIT_CODE, RunStoppedError, StopRequest, ignore_saving_signals, pass_on_signals
from .checks import check_run
from .devices import choose_backend, choose_threads
from .failures import BLAME_SECONDS, TORCHRUN_LOG_NAME, RankFailure, RunFailedError

POLITE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
FILES_VARIABLE = "TRAINING_LAUNCHER_FILES"
"""Environment variable of the ranks: folder with the files below. Ranks of a torchrun that the user started lack it."""

ERROR, BEGUN, STOP, STOPPED = "error.json", "begun", "stop", "stopped.json"
"""Files between launcher and ranks: first error, mark of a begun rank, request to stop, last checkpoint."""

_RANK_ENDED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""Line of torchrun's agent about the first rank that ended."""


def launch(config: TrainConfig, lock: RunLock) -> RunResult:
    """Run all workers here; their logs go to ``OUT/torchrun.log``. Raises the error of the first failing rank."""
    log = config.out / TORCHRUN_LOG_NAME
    with tempfile.TemporaryDirectory() as name, log.open("wb") as stderr, closing(ProgressDisplay()):
        files = Path(name)
        RankFailure.reserve_record(files / ERROR)
        with guard_processes(keep_open=[lock.descriptor]) as marking, marking():
            cores, on_gpu = os.cpu_count() or 1, torch.cuda.is_available()
            threads = choose_threads(config, config.num_workers, cores, on_gpu=on_gpu)
            code = _run_agent(config, files, stderr, os.environ | threads | {FILES_VARIABLE: name})
        if (files / STOPPED).exists():
            raise RunStoppedError.after_checkpoint(json.loads((files / STOPPED).read_text()))
        if (files / STOP).exists() and code == -signal.SIGKILL:
            raise RunStoppedError.after_checkpoint(None)
        if code == 0:
            return RunResult.read(config.out / RESULT_NAME)
        failure = _find_failure(config, files, config.max_restarts)
    if failure is None:
        raise RunFailedError(f"torchrun ended with exit code {code} (see {log})")
    raise failure.to_error(config.out)


def _find_failure(config: TrainConfig, files: Path, restarts: int) -> RankFailure | None:
    """Why the attempt after so many restarts failed: because a rank was killed, or else as the first rank recorded."""
    recorded = RankFailure.read_record(files / ERROR)
    ends = _RANK_ENDED.findall((config.out / TORCHRUN_LOG_NAME).read_text(errors="replace"))
    if restarts < len(ends):
        code, rank = map(int, ends[restarts])
        if recorded is None or code < 0:
            return RankFailure.from_exit_code(rank, code)
    return recorded


def _run_agent(config: TrainConfig, files: Path, stderr: IO[bytes], environment: dict[str, str]) -> int:
    """Exit code of torchrun's agent. If this process is interrupted, the agent is too, and killed after a few seconds.
    A signal during the fork waits until the agent is known here."""
    with defer_signals():
        agent = subprocess.Popen(
            _torchrun_command(config), stderr=stderr, env=environment, preexec_fn=ignore_saving_signals
        )
        try:
            with pass_on_signals(partial(_ask_to_stop, files, agent)), allow_signals():
                return agent.wait()
        finally:
            if agent.poll() is None:
                agent.send_signal(signal.SIGINT)  # torchrun's agent ignores SIGTERM
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(POLITE_SECONDS)
                agent.kill()
                agent.wait()


def _ask_to_stop(files: Path, agent: subprocess.Popen[bytes]) -> None:
    """Request a checkpoint and the end of the run; before any rank has begun, kill the agent."""
    (files / STOP).touch()
    if not (files / BEGUN).exists():
        agent.kill()


def run_rank_process(config: TrainConfig) -> NoReturn:
    """Run one rank, and end this process; rank 0 writes ``result.json``. Under a torchrun that the user started, rank 0
    locks ``OUT``, and each rank ends the processes that it started."""
    _die_with_parent()
    files = Path(os.environ[FILES_VARIABLE]) if FILES_VARIABLE in os.environ else None
    request = StopRequest(files and files / STOP)
    request.handle_signals()
    leads = os.environ["RANK"] == "0"
    try:
        if files:
            (files / BEGUN).touch()
        if _count_restarts():
            config = config_after_failure(config)
            if leads:
                _print_restart_reason(config, files)
        with ExitStack() as resources:
            if files is None:
                if leads:
                    resources.enter_context(lock_run(config))
                resources.enter_context(resources.enter_context(guard_processes())())
            code = _run_checked_rank(config, request, files)
    except BaseException as error:  # torch's CheckpointException is none of Exception's
        if files:
            RankFailure.from_error(int(os.environ["RANK"]), error).write_record(files / ERROR)
        time.sleep(BLAME_SECONDS)
        raise
    exit_process(code)


def _die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # The parent ended before the call.
        os.kill(os.getpid(), signal.SIGKILL)


def _count_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _print_restart_reason(config: TrainConfig, files: Path | None) -> None:
    """Print the last failure, whose record is emptied for the next one."""
    failure = files and _find_failure(config, files, _count_restarts() - 1)
    if files:
        RankFailure.reserve_record(files / ERROR)
    reason = failure.sentence if failure else "a rank failed; torchrun's log has the reason"
    print(f"restart {_count_restarts()} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}: {reason}", flush=True)


def exit_process(code: int = 0) -> NoReturn:
    """End the process without the interpreter's teardown: threads of Gloo outlive ``destroy_process_group`` if a
    framework keeps a group, as DeepSpeed does, and may abort a process that has finished its run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_checked_rank(config: TrainConfig, request: StopRequest, files: Path | None) -> int:
    """Exit code of this rank. An agent treats any but 0 as a failure, so only without it does a stopped run have 75."""
    rank = int(os.environ["RANK"])
    if files is None or _count_restarts():
        # Not checked yet. The first rank of a machine reads the data, which may download it.
        for line in check_run(config, with_data=os.environ["LOCAL_RANK"] == "0"):
            if rank == 0:
                print(line, flush=True)
    interrupted = run_rank(config, join_process_group(), request)
    torch.distributed.destroy_process_group()
    if interrupted is None:
        if rank == 0 and files is None:
            export_weights(config, RunResult.read(config.out / RESULT_NAME).checkpoint)
        return 0
    if files is None:
        if rank == 0:
            print(RunStoppedError.after_checkpoint(interrupted.checkpoint), file=sys.stderr, flush=True)
        return EXIT_CODE
    if rank == 0:
        (files / STOPPED).write_text(json.dumps(interrupted.checkpoint))
    return 0


def run_rank(config: TrainConfig, device: torch.device, request: StopRequest | None = None) -> StoppedRun | None:
    """Run one rank of an existing process group; rank 0 writes ``result.json``, unless the run is stopped."""
    started = time.perf_counter()
    outlet = Outlet(config)
    trained = train(config, device, find_resume_checkpoint(config), outlet, request or StopRequest(None))
    if isinstance(trained, StoppedRun):
        return trained
    if torch.distributed.get_rank() == 0:
        RunResult.from_run(config, trained, time.perf_counter() - started).write(config.out)
    return None


def join_process_group() -> torch.device:
    """Join the process group of torchrun's environment; with CUDA, one GPU per rank."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # A new store for each restart: the agent's has addresses of dead ranks.
    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore(f"start_{_count_restarts()}", store)
    torch.distributed.init_process_group(choose_backend(device.type), store=store, rank=rank, world_size=size)
    return device


def _torchrun_command(config: TrainConfig) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.num_workers)]
    # The launcher handles SIGTERM; see ignore_saving_signals.
    torchrun += ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", "--max-restarts", str(config.max_restarts)]
    return [sys.executable, *torchrun, "-m", PACKAGE, *config.to_args()]
