"""Devices of the workers: their GPUs, process group and threads, and what the frameworks need on them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from ckpt_tools.errors import UsageError

from ..config.train_config import TrainConfig

THREADS = "OMP_NUM_THREADS"


def choose_backend(device_type: str) -> str:
    """Backend for ``init_process_group``. nccl alone refuses tensors on the CPU: those of ``--cpu-offload``, and what
    ranks tell each other. Without a ``device_id``, barriers and objects go over gloo too."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def check_gpus(workers: int, gpus: int, place: str) -> None:
    """Raises ``UsageError`` if there are GPUs in ``place``, but fewer than workers."""
    if 0 < gpus < workers:
        raise UsageError(
            f"--num-workers is {workers} and {place} has {gpus} GPU{'s' if gpus > 1 else ''}, one for each worker; "
            f"give --num-workers {gpus} or less"
        )


def choose_threads(config: TrainConfig, workers: int, cores: float, *, on_gpu: bool) -> dict[str, str]:
    """Number of threads of a rank, as an environment variable; the user's own stays. One thread fixes the order of sums
    on a CPU. Beside a GPU, the optimizer of offloaded state takes the cores that ``workers`` share."""
    offloads = config.cpu_offload or config.sharding.offload
    threads = max(1, int(cores / workers)) if on_gpu and offloads else 1
    return {THREADS: os.environ.get(THREADS) or str(threads)}


def check_device(config: TrainConfig) -> None:
    """Raises ``UsageError`` for a run that its frameworks would refuse on a machine like this one."""
    if config.compile:
        _check_compiler()
    if config.sharding.framework == "deepspeed" and (config.deepspeed_config or config.precision == "fp16"):
        _check_deepspeed(config)


def _check_compiler() -> None:
    """torch.compile needs a C++ compiler for CPUs and Triton for CUDA, but only from the first step."""
    if torch.cuda.is_available():
        if find_spec("triton") is None:
            raise UsageError("--compile needs triton on a GPU, which is not installed here; leave --compile out")
        return
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise UsageError(f"--compile needs a C++ compiler, and {compiler} is not here; install it, or name one in CXX")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.is_file():
        raise UsageError(f"--compile needs Python's headers, and {headers} is not here; install them (python3-dev)")


def _check_deepspeed(config: TrainConfig) -> None:
    """Check fp16 and ``--deepspeed-config``; DeepSpeed is imported only for them."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.accelerator import get_accelerator

    from ..engines.deepspeed_config import check_with_deepspeed, deepspeed_config

    if config.precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise UsageError(
            "--precision fp16: DeepSpeed does not compute in fp16 on this processor; choose bf16, or a GPU with CUDA"
        )
    options = deepspeed_config(config, config.data_workers)
    if config.deepspeed_config is not None:
        check_with_deepspeed(config, options)
