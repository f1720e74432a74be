"""Checks of a run by its frameworks, before any worker starts."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from ckpt_tools.errors import UsageError

from ..config.model_names import HUGGING_FACE
from ..config.train_config import TrainConfig


def check_frameworks(config: TrainConfig) -> None:
    """Raises ``UsageError`` or ``FormatError`` for a run that its frameworks would refuse on every worker."""
    if config.model.startswith(HUGGING_FACE):
        from ..models.zoo import spec_of

        spec_of(config.model)
    if config.compile:
        _check_compiler()
    if config.sharding.framework == "deepspeed":
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
    if config.deepspeed_config is None and config.precision != "fp16":
        return
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.accelerator import get_accelerator

    from .deepspeed_config import deepspeed_config

    if config.precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise UsageError(
            "--precision fp16: DeepSpeed does not compute in fp16 on this processor; choose bf16, or a GPU with CUDA"
        )
    deepspeed_config(config, config.data_workers)
