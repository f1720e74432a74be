"""Launcher with torchrun.

:func:`launch` starts torchrun with the command line of the run, as a user does on several machines with
``torchrun ... -m training --launcher torchrun ...``; each process runs :func:`work`. Ranks write their shards into the
run's folder, which all machines share.
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
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ckpt_tools.errors import CkptError
from ckpt_tools.guard import guarded
from ckpt_tools.signals import held_back, let_through

from ..checkpoints.locking import RunLock, only_run
from ..checkpoints.run_folder import restarted, resume_folder
from ..checkpoints.weights import export
from ..config import PACKAGE
from ..config.train_config import TrainConfig
from ..loop.loop import Interrupted, train
from ..loop.outlets import FolderOutlet
from ..loop.result import RESULT_NAME, RunResult
from ..loop.screen import Screen
from ..loop.stopping import EXIT_CODE, Request, RunStoppedError, ignore_saving_signals, passing_on
from .checks import checked
from .devices import backend_of, threads_of
from .failures import BLAME_SECONDS, Failure, RunFailedError, end_of

LOG_NAME = "torchrun.log"
POLITE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
FILES_VARIABLE = "TRAINING_LAUNCHER_FILES"
"""Environment variable of the ranks: folder of :class:`_Files`. Ranks of a torchrun that the user started lack it."""

_NO_REASON = "a rank failed; torchrun's log has the reason"
_RANK_ENDED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""Line of torchrun's agent about the first rank that ended."""


def launch(config: TrainConfig, lock: RunLock) -> RunResult:
    """Run all workers here; their logs go to ``OUT/torchrun.log``. Raises the error of the first failing rank."""
    log = config.out / LOG_NAME
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as stderr, closing(Screen()):
        files = _Files.inside(Path(folder))
        Failure.reserve(files.error)
        with guarded(keep_open=[lock.descriptor]) as marking, marking():
            cores, on_gpu = os.cpu_count() or 1, torch.cuda.is_available()
            threads = threads_of(config, config.num_workers, cores, on_gpu=on_gpu)
            code = _run_agent(config, files, stderr, os.environ | threads | {FILES_VARIABLE: folder})
        if files.stopped.exists():
            raise RunStoppedError.at(json.loads(files.stopped.read_text()))
        if files.stop.exists() and code == -signal.SIGKILL:
            raise RunStoppedError.at(None)
        if code == 0:
            return RunResult.read(config.out / RESULT_NAME)
        failure = Failure.recorded(files.error)
    raise _error(config, failure, code)


def _error(config: TrainConfig, failure: Failure | None, code: int) -> CkptError:
    """Error of a run that has failed: the other ranks fail because of one that was killed."""
    end, log = _first_end(config, config.max_restarts), config.out / LOG_NAME
    if failure is not None and not _is_killed(end):
        return failure.to_error(config.out)
    return RunFailedError(f"{end_of(*end) if end else f'torchrun ended with exit code {code}'} (see {log})")


def _first_end(config: TrainConfig, restarts: int) -> tuple[int, int] | None:
    """Rank and exit code of the first one to end in the attempt after so many restarts; None if the log lacks it."""
    ends = _RANK_ENDED.findall((config.out / LOG_NAME).read_text(errors="replace"))
    return (int(ends[restarts][1]), int(ends[restarts][0])) if restarts < len(ends) else None


def _is_killed(end: tuple[int, int] | None) -> bool:
    return end is not None and end[1] < 0


def _run_agent(config: TrainConfig, files: _Files, stderr: IO[bytes], environment: dict[str, str]) -> int:
    """Exit code of torchrun's agent. If this process is interrupted, the agent is too, and killed after a few seconds.
    A signal during the fork waits until the agent is known here."""
    with held_back():
        agent = subprocess.Popen(_command(config), stderr=stderr, env=environment, preexec_fn=ignore_saving_signals)
        try:
            with passing_on(partial(_ask_to_stop, files, agent)), let_through():
                return agent.wait()
        finally:
            if agent.poll() is None:
                agent.send_signal(signal.SIGINT)  # torchrun's agent ignores SIGTERM
                try:
                    agent.wait(POLITE_SECONDS)
                except subprocess.TimeoutExpired:
                    agent.kill()
                    agent.wait()


def _ask_to_stop(files: _Files, agent: subprocess.Popen[bytes]) -> None:
    """Request a checkpoint and the end of the run; before any rank has begun, kill the agent."""
    files.stop.touch()
    if not files.begun.exists():
        agent.kill()


@dataclass(frozen=True, slots=True)
class _Files:
    """Files between launcher and ranks: first error, mark of a begun rank, request to stop, last checkpoint."""

    error: Path
    begun: Path
    stop: Path
    stopped: Path

    @classmethod
    def inside(cls, folder: Path) -> _Files:
        return cls(folder / "error.json", folder / "begun", folder / "stop", folder / "stopped.json")

    @classmethod
    def of_launcher(cls) -> _Files | None:
        """Those of the launcher that started this rank."""
        return cls.inside(Path(os.environ[FILES_VARIABLE])) if FILES_VARIABLE in os.environ else None


def work(config: TrainConfig) -> NoReturn:
    """Run one rank, and end this process; rank 0 writes ``result.json``. Under a torchrun that the user started, rank 0
    locks ``OUT``, and each rank ends the processes that it started."""
    _die_with_parent()
    files = _Files.of_launcher()
    request = Request(files.stop if files else None)
    request.handle_signals()
    try:
        if files:
            files.begun.touch()
        if _restarts():
            config = restarted(config)
            if os.environ["RANK"] == "0":
                limit = os.environ["TORCHELASTIC_MAX_RESTARTS"]
                print(f"restart {_restarts()} of {limit}: {_reason(config, files)}", flush=True)
        with nullcontext() if files else _on_its_own(config):
            code = _work(config, request, files)
    except BaseException as error:  # torch's CheckpointException is none of Exception's
        if files:
            Failure.of(int(os.environ["RANK"]), error).record(files.error)
        time.sleep(BLAME_SECONDS)
        raise
    leave(code)


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


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _reason(config: TrainConfig, files: _Files | None) -> str:
    """Reason of the last failure, whose record is emptied for the next one."""
    if files is None:
        return _NO_REASON
    failure = Failure.recorded(files.error)
    Failure.reserve(files.error)
    end = _first_end(config, _restarts() - 1)
    if failure is not None and not _is_killed(end):
        return failure.sentence
    return end_of(*end) if end else _NO_REASON


@contextmanager
def _on_its_own(config: TrainConfig) -> Iterator[None]:
    """Locks and guards of a rank under a torchrun that the user started."""
    with ExitStack() as held:
        if os.environ["RANK"] == "0":
            held.enter_context(only_run(config))
        marking = held.enter_context(guarded())
        held.enter_context(marking())
        yield


def leave(code: int = 0) -> NoReturn:
    """End the process without the interpreter's teardown.

    Gloo's threads outlive ``destroy_process_group`` if a framework keeps a reference to a group, as DeepSpeed does. One
    that drops its last tensor during the shutdown aborts the process ("terminate called without an active exception",
    seen once in ten runs on a loaded machine), and a finished run would be reported as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(config: TrainConfig, request: Request, files: _Files | None) -> int:
    """Exit code of this rank. An agent treats any but 0 as a failure, so only without it does a stopped run have 75."""
    if files is None or _restarts():
        _check(config)
    interrupted = run_rank(config, join_process_group(), request)
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    if interrupted is None:
        if rank == 0 and files is None:
            export(config, RunResult.read(config.out / RESULT_NAME).checkpoint)
        return 0
    if files is None:
        if rank == 0:
            print(RunStoppedError.at(interrupted.checkpoint), file=sys.stderr, flush=True)
        return EXIT_CODE
    if rank == 0:
        files.stopped.write_text(json.dumps(interrupted.checkpoint))
    return 0


def _check(config: TrainConfig) -> None:
    """The checks of the launcher, after a restart and under a torchrun that the user started. The first rank of a
    machine reads the data, which may download it."""
    lines = checked(config, with_data=os.environ["LOCAL_RANK"] == "0")
    if int(os.environ["RANK"]) == 0:
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)


def run_rank(config: TrainConfig, device: torch.device, request: Request | None = None) -> Interrupted | None:
    """Run one rank of an existing process group; rank 0 writes ``result.json``, unless the run is stopped."""
    started = time.perf_counter()
    outlet = FolderOutlet(config)
    trained = train(config, device, resume_folder(config), outlet, request or Request(None))
    if isinstance(trained, Interrupted):
        return trained
    if torch.distributed.get_rank() == 0:
        RunResult.of(config, trained, time.perf_counter() - started).write(config.out)
    return None


def join_process_group() -> torch.device:
    """Join the process group of torchrun's environment; with CUDA, one GPU per rank."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend_of(device.type), **_rendezvous())
    return device


def _rendezvous() -> dict[str, Any]:
    """Arguments of ``init_process_group``: a new store per restart, as the agent's has addresses of dead ranks."""
    store, rank, world_size = next(rendezvous("env://"))
    return {"store": PrefixStore(f"start_{_restarts()}", store), "rank": rank, "world_size": world_size}


def _command(config: TrainConfig) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.num_workers)]
    # The launcher handles SIGTERM; see ignore_saving_signals.
    torchrun += ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", "--max-restarts", str(config.max_restarts)]
    return [sys.executable, *torchrun, "-m", PACKAGE, *config.to_args()]
