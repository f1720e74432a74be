"""The loop under ``torchrun``, without Ray.

:func:`launch` starts torchrun on this machine with the command line of the run itself, so that
``torchrun ... -m training --launcher torchrun ...``, the way several machines are used, is the same: every process it
starts lands in :func:`work`. Each rank writes its shards straight into the run's folder, which the machines share; a
checkpoint gets its final name only when all ranks have written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ckpt_tools.guard import guarded

from ..checkpoints.locking import RunLock, only_run
from ..checkpoints.run_folder import resume_folder
from ..checkpoints.settings import lines_before_start
from ..checkpoints.weights import check_export, export
from ..config import PACKAGE
from ..config.options import RESUME_AUTO
from ..config.train_config import TrainConfig
from ..loop.loop import Interrupted, train
from ..loop.outlets import FolderOutlet
from ..loop.result import RESULT_NAME, RunResult
from ..loop.screen import drawn
from ..loop.stopping import EXIT_CODE, Request, RunStoppedError, ignore_saving_signals, passed_on
from .failures import Failure, RunFailedError
from .processes import die_with_parent, wait_for

LOG_NAME = "torchrun.log"
ERROR_FILE_VARIABLE = "TRAINING_ERROR_FILE"
_RANK_ENDED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""As torchrun's agent logs the first rank that ended."""

BEGUN_FILE_VARIABLE = "TRAINING_BEGUN_FILE"
STOP_FILE_VARIABLE = "TRAINING_STOP_FILE"
STOPPED_FILE_VARIABLE = "TRAINING_STOPPED_FILE"


def launch(config: TrainConfig, lock: RunLock) -> RunResult:
    """Start one process a worker on this machine and wait; raises what the first failing rank raised.

    The workers' standard error, where the frameworks log, goes to ``OUT/torchrun.log``.
    """
    log = config.out / LOG_NAME
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as stderr:
        files = _Files.inside(Path(folder))
        with guarded(keep_open=[lock.descriptor]) as marking, marking():
            with drawn() as (stdout, drawing):
                agent = _started(_command(config), stdout, stderr, os.environ | files.environment() | drawing)
                with passed_on(partial(_ask_to_stop, files, agent)):
                    code = wait_for(agent)
        if files.stopped.exists():
            raise RunStoppedError.at(json.loads(files.stopped.read_text()))
        if files.stop.exists() and code == -signal.SIGKILL:
            raise RunStoppedError.at(None)
        if code == 0:
            return RunResult.read(config.out / RESULT_NAME)
        if files.error.exists():
            raise Failure.recorded(files.error).to_error(config.out)
    raise RunFailedError(f"torchrun ended with exit code {code} (see {log})")


_WAITING = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """They are raised after the block. What a signal raises while Python forks is raised in a callback of the fork,
    where Python drops it, or before the new process has a name here: nobody would end it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _WAITING}
    held = [number for number, handler in before.items() if callable(handler)]
    for number in held:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        for late in came:
            signal.raise_signal(late)


def _started(command: list[str], stdout: Any, stderr: Any, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """The agent. It is ended and awaited if a signal came meanwhile."""
    agent: subprocess.Popen[bytes] | None = None
    try:
        with _signals_waiting():
            agent = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, env=environment, preexec_fn=ignore_saving_signals
            )
    except BaseException:
        if agent is not None:
            agent.kill()
            agent.wait()
        raise
    return agent


def _ask_to_stop(files: _Files, agent: subprocess.Popen[bytes]) -> None:
    """The ranks stop at a checkpoint. While none has begun there is nothing to save, and their start is not awaited."""
    files.stop.touch()
    if not files.begun.exists():
        agent.kill()


@dataclass(frozen=True, slots=True)
class _Files:
    """How the launcher and its ranks speak: the first error, the first rank's beginning, the request to stop, the
    checkpoint at which they did."""

    error: Path
    begun: Path
    stop: Path
    stopped: Path

    @classmethod
    def inside(cls, folder: Path) -> _Files:
        return cls(folder / "error.json", folder / "begun", folder / "stop", folder / "stopped.json")

    def environment(self) -> dict[str, str]:
        """One thread a rank: the ranks share the cores, and a fixed thread count fixes the order of sums."""
        return {
            "OMP_NUM_THREADS": "1",
            ERROR_FILE_VARIABLE: str(self.error),
            BEGUN_FILE_VARIABLE: str(self.begun),
            STOP_FILE_VARIABLE: str(self.stop),
            STOPPED_FILE_VARIABLE: str(self.stopped),
        }


def work(config: TrainConfig) -> NoReturn:
    """Be one rank of the run, and end this process; rank 0 writes ``result.json``.

    Under a torchrun that is not ours, rank 0 holds the lock of ``OUT``, and each rank ends what it started.
    """
    die_with_parent()
    request = Request(Path(os.environ[STOP_FILE_VARIABLE]) if STOP_FILE_VARIABLE in os.environ else None)
    request.heed_signals()
    if BEGUN_FILE_VARIABLE in os.environ:
        Path(os.environ[BEGUN_FILE_VARIABLE]).touch()
    if _restarts():
        config = replace(config, resume=RESUME_AUTO)
        if os.environ["RANK"] == "0":
            limit = os.environ["TORCHELASTIC_MAX_RESTARTS"]
            print(f"restart {_restarts()} of {limit}: {_reason(config)}", flush=True)
    try:
        with nullcontext() if ERROR_FILE_VARIABLE in os.environ else _on_its_own(config):
            code = _work(config, request)
    except Exception as error:
        if ERROR_FILE_VARIABLE in os.environ:
            Failure.of(int(os.environ["RANK"]), error).record(Path(os.environ[ERROR_FILE_VARIABLE]))
        raise
    leave(code)


def _restarts() -> int:
    """How often the agent has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _reason(config: TrainConfig) -> str:
    """Of the last failure. A killed rank says nothing, and the others then fail because of it."""
    error = _taken_error()
    ends = _RANK_ENDED.findall((config.out / LOG_NAME).read_text()) if ERROR_FILE_VARIABLE in os.environ else []
    if ends and int(ends[-1][0]) < 0:
        return f"rank {ends[-1][1]} was ended by {signal.Signals(-int(ends[-1][0])).name}"
    return "a rank failed; torchrun's log has the reason" if error is None else error.sentence


def _taken_error() -> Failure | None:
    """The error that the last failure was recorded with, whose place is free for the next one's now."""
    path = Path(os.environ.get(ERROR_FILE_VARIABLE, ""))
    if not path.is_file():
        return None
    error = Failure.recorded(path)
    path.unlink()
    return error


@contextmanager
def _on_its_own(config: TrainConfig) -> Iterator[None]:
    with ExitStack() as held:
        if os.environ["RANK"] == "0":
            held.enter_context(only_run(config))
        marking = held.enter_context(guarded())
        held.enter_context(marking())
        yield


def leave(code: int = 0) -> NoReturn:
    """End the process without the interpreter's teardown.

    Gloo's threads outlive ``destroy_process_group`` where a framework keeps a reference to a group, as DeepSpeed does.
    One that drops its last tensor while Python shuts down aborts the process ("terminate called without an active
    exception", seen once in ten runs on a loaded machine), and a run that was done would be reported as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(config: TrainConfig, request: Request) -> int:
    """The exit code of this rank. An agent takes any other than 0 for a failure: only the user's own is told that the
    run was stopped."""
    if ERROR_FILE_VARIABLE not in os.environ or _restarts():
        _check_settings(config)
    interrupted = run_rank(config, join_process_group(), request)
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    if interrupted is None:
        if rank == 0 and ERROR_FILE_VARIABLE not in os.environ:
            export(config, RunResult.read(config.out / RESULT_NAME).checkpoint)
        return 0
    if STOPPED_FILE_VARIABLE not in os.environ:
        if rank == 0:
            print(RunStoppedError.at(interrupted.checkpoint), file=sys.stderr, flush=True)
        return EXIT_CODE
    if rank == 0:
        Path(os.environ[STOPPED_FILE_VARIABLE]).write_text(json.dumps(interrupted.checkpoint))
    return 0


def _check_settings(config: TrainConfig) -> None:
    """As the launcher does before it starts torchrun, for a torchrun that the user has started."""
    checkpoint = resume_folder(config)
    check_export(config)
    lines = lines_before_start(config, checkpoint)
    if int(os.environ["RANK"]) == 0:
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)


def run_rank(config: TrainConfig, device: torch.device, request: Request | None = None) -> Interrupted | None:
    """Run on this rank of an existing process group; rank 0 writes ``result.json``, if the run is not stopped."""
    started = time.perf_counter()
    outlet = FolderOutlet(config.out, tensorboard=config.tensorboard)
    trained = train(config, device, resume_folder(config), outlet, request or Request(None))
    if isinstance(trained, Interrupted):
        return trained
    if torch.distributed.get_rank() == 0:
        RunResult.of(config, trained, time.perf_counter() - started).write(config.out)
    return None


def join_process_group() -> torch.device:
    """Join the process group that torchrun's environment describes; nccl and one GPU a rank where CUDA is there."""
    if not torch.cuda.is_available():
        torch.distributed.init_process_group("gloo", **_meeting())
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device, **_meeting())
    return device


def _meeting() -> dict[str, Any]:
    """Where the ranks find each other. The agent's store outlives a restart, and would give the addresses of ranks that
    are gone."""
    store, rank, world_size = next(rendezvous("env://"))
    return {"store": PrefixStore(f"start_{_restarts()}", store), "rank": rank, "world_size": world_size}


def _command(config: TrainConfig) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.num_workers)]
    # SIGTERM is the launcher's to hear; see ignore_saving_signals.
    torchrun += ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", "--max-restarts", str(config.max_restarts)]
    return [sys.executable, *torchrun, "-m", PACKAGE, *config.to_args()]
