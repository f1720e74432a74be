"""The loop under ``torchrun``, without Ray.

:func:`launch` starts torchrun on this machine with the command line of the run itself, so that
``torchrun ... -m training --launcher torchrun ...``, the way several machines are used, is the same: every process it
starts lands in :func:`work`. Each rank writes its shards straight into the run's folder, which the machines share; a
checkpoint gets its final name only when all ranks have written.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from ckpt_tools.guard import guarded

from ..checkpoints import CHECKPOINTS, checkpoint_name, make_partial, resume_folder
from ..config import TrainConfig
from ..launchers.failures import Failure, RunFailedError
from ..locking import RunLock, only_run
from ..loop import EpochMetrics, Save, train
from ..result import RESULT_NAME, RunResult
from ..settings import check_settings
from .processes import die_with_parent, wait_for

PACKAGE = f"{__package__}".rpartition(".")[0]
"""``training`` in a checkout, ``ckpt_tools_training`` where a wheel is installed."""

LOG_NAME = "torchrun.log"
ERROR_FILE_VARIABLE = "TRAINING_ERROR_FILE"


def launch(config: TrainConfig, lock: RunLock) -> RunResult:
    """Start one process a worker on this machine and wait; raises what the first failing rank raised.

    The workers' standard error, where the frameworks log, goes to ``OUT/torchrun.log``.
    """
    log = config.out / LOG_NAME
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as stderr:
        error_file = Path(folder, "error.json")
        with guarded(keep_open=[lock.descriptor]) as marking, marking():
            code = wait_for(subprocess.Popen(_command(config), stderr=stderr, env=_environment(error_file)))
        if code == 0:
            return RunResult.read(config.out / RESULT_NAME)
        if error_file.exists():
            raise Failure.recorded(error_file).to_error(config.out)
    raise RunFailedError(f"torchrun ended with exit code {code} (see {log})")


def work(config: TrainConfig) -> NoReturn:
    """Be one rank of the run, and end this process; rank 0 writes ``result.json``.

    Under a torchrun that is not ours, rank 0 holds the lock of ``OUT``, and each rank ends what it started.
    """
    die_with_parent()
    try:
        with nullcontext() if ERROR_FILE_VARIABLE in os.environ else _on_its_own(config):
            _work(config)
    except Exception as error:
        if ERROR_FILE_VARIABLE in os.environ:
            Failure.of(int(os.environ["RANK"]), error).record(Path(os.environ[ERROR_FILE_VARIABLE]))
        raise
    leave()


@contextmanager
def _on_its_own(config: TrainConfig) -> Iterator[None]:
    with ExitStack() as held:
        if os.environ["RANK"] == "0":
            held.enter_context(only_run(config))
        marking = held.enter_context(guarded())
        held.enter_context(marking())
        yield


def leave() -> NoReturn:
    """End the process without the interpreter's teardown.

    Gloo's threads outlive ``destroy_process_group`` where a framework keeps a reference to a group, as DeepSpeed does.
    One that drops its last tensor while Python shuts down aborts the process ("terminate called without an active
    exception", seen once in ten runs on a loaded machine), and a run that was done would be reported as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _work(config: TrainConfig) -> None:
    if ERROR_FILE_VARIABLE not in os.environ:
        _check_settings(config)
    run_rank(config, join_process_group())
    torch.distributed.destroy_process_group()


def _check_settings(config: TrainConfig) -> None:
    """As the launcher does before it starts torchrun, for a torchrun that the user has started."""
    checkpoint = resume_folder(config)
    line = None if checkpoint is None else check_settings(config, checkpoint)
    if line is not None and int(os.environ["RANK"]) == 0:
        print(line, flush=True)


def run_rank(config: TrainConfig, device: torch.device) -> None:
    """Run on this rank of an existing process group; rank 0 writes ``result.json``."""
    started = time.perf_counter()
    trained = train(config, device, resume_folder(config), partial(_report, config))
    if torch.distributed.get_rank() == 0:
        RunResult.of(config, trained, time.perf_counter() - started).write(config.out)


def join_process_group() -> torch.device:
    """Join the process group that torchrun's environment describes; nccl and one GPU a rank where CUDA is there."""
    if not torch.cuda.is_available():
        torch.distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    return device


def _report(config: TrainConfig, metrics: EpochMetrics, save: Save | None) -> None:
    if save is not None:
        publish(config.out / CHECKPOINTS, checkpoint_name(metrics.epoch), save)
    if torch.distributed.get_rank() == 0:
        print(metrics.line(config.last_epoch), flush=True)


def publish(folder: Path, name: str, save: Save) -> None:
    """All ranks write below a temporary name; rank 0 gives the folder its own when the last one is done."""
    partial_folder = folder / f".{name}.partial"
    leader = torch.distributed.get_rank() == 0
    if leader:
        make_partial(folder, name)
    torch.distributed.barrier()
    save(partial_folder)
    torch.distributed.barrier()
    if leader:
        partial_folder.rename(folder / name)


def _command(config: TrainConfig) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.num_workers)]
    return [sys.executable, *torchrun, "-m", PACKAGE, *config.to_args()]


def _environment(error_file: Path) -> dict[str, str]:
    """One thread a rank: the ranks share the cores, and a fixed thread count fixes the order of sums."""
    return os.environ | {"OMP_NUM_THREADS": "1", ERROR_FILE_VARIABLE: str(error_file)}
