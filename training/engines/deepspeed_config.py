"""DeepSpeed configuration of a run: a JSON file merged with the run's options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from pydantic import ValidationError
from torch.optim import Optimizer

from ckpt_tools.errors import UsageError
from ckpt_tools.process.text_files import read_text

from ..config.command_line import read_bundled
from ..config.references import first_line
from ..config.train_config import TrainConfig
from .optimizers import optimizer_arguments

AUTO = "auto"  # as in transformers: the run's options set the value
SECTIONS = (
    "optimizer zero_optimization bf16 fp16 comms_logger flops_profiler tensorboard wandb csv_monitor aio checkpoint "
    "data_types activation_checkpointing compile"
)
VALUES = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print gradient_clipping "
    "gradient_predivide_factor zero_force_ds_cpu_optimizer zero_allow_untested_optimizer wall_clock_breakdown "
    "memory_breakdown dump_state prescale_gradients sparse_gradients communication_data_type "
    "seq_parallel_communication_data_type"
)
"""Keys that a file may have, which do not contradict the run's options. DeepSpeed itself ignores unknown keys."""


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """The configuration. Raises ``UsageError`` if the user's file contradicts the run's options. ``torch_adam`` uses
    torch's AdamW: no kernel is compiled, and updates equal those of the FSDP2 engine. Without ``--clip-grad-norm``,
    DeepSpeed's default of 1.0 is turned off, as it would change the losses."""
    from_file = _read_file(config)
    from_run = _values_of_run(config, world_size)
    if config.deepspeed_config is not None:
        _check_file(config, from_file, from_run)
    options = {"steps_per_print": 1_000_000_000} | _merge_nested(from_file, from_run)
    if config.optimizer != "adamw":
        # One of torch's or the user's, which DeepSpeed is handed; with offload it would insist on its own.
        del options["optimizer"]
        options |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return options


def _read_file(config: TrainConfig) -> Any:
    if (file := config.deepspeed_config) is None:
        return json.loads(read_bundled(f"{config.sharding.name}.json"))
    try:
        content = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--deepspeed-config {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--deepspeed-config {file} is not a JSON object")
    return content


def _values_of_run(config: TrainConfig, world_size: int) -> dict[str, Any]:
    hpz = {} if config.shard_size is None else {"zero_hpz_partition_size": config.shard_size}
    return {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": config.batch_size // world_size // config.gradient_accumulation,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.clip_grad_norm or 0.0,
        "optimizer": {"params": optimizer_arguments(config)},
        "zero_optimization": {"stage": config.sharding.stage, **hpz},
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": config.precision == "fp16"},
    }


def _merge_nested(from_file: Mapping[str, Any], from_run: Mapping[str, Any]) -> dict[str, Any]:
    """``from_file``, with values of ``from_run`` in nested objects."""
    nested = {
        key: _merge_nested(from_file[key], value)
        for key, value in from_run.items()
        if isinstance(value, dict) and isinstance(from_file.get(key), dict)
    }
    return dict(from_file) | dict(from_run) | nested


def _check_file(config: TrainConfig, from_file: Mapping[str, Any], from_run: Mapping[str, Any]) -> None:
    file = f"--deepspeed-config {config.deepspeed_config}"
    if config.optimizer != "adamw" and "optimizer" in from_file:
        raise UsageError(f"{file} has an optimizer, and so has --optimizer; leave one of them out")
    sections, values = SECTIONS.split(), VALUES.split()
    if unknown := sorted(from_file.keys() - {*sections, *values}):
        known = ", ".join(sorted([*sections, *values]))
        raise UsageError(f"{file}: {unknown[0]} is not a key that a run takes; it takes {known}")
    for key, value in from_file.items():
        is_auto = value == AUTO and key in from_run and key != "optimizer"
        if isinstance(value, dict) != (key in sections) and not is_auto:
            raise UsageError(f"{file}: {key} is {'an object' if key in sections else 'one value'}, not {value!r}")
    for key, (theirs, ours) in _find_conflicts(from_file, from_run).items():
        raise UsageError(f"{file} sets {key} to {theirs} and the options of the run say {ours}; change one of them")
    optimizer = from_file.get("optimizer", {})
    is_torch = (optimizer.get("type"), optimizer.get("params", {}).get("torch_adam")) == ("AdamW", True)
    # Resuming a pipeline needs the state of torch's AdamW and ZeRO-1's own masters.
    if config.pp > 1 and not is_torch:
        raise UsageError(
            f'{file}: --pp needs torch\'s AdamW: set optimizer.type to "AdamW" and optimizer.params.torch_adam to true'
        )
    if config.pp > 1 and "data_types" in from_file:
        raise UsageError(f"{file} sets data_types, which does not go together with --pp")


def _find_conflicts(
    from_file: Mapping[str, Any], from_run: Mapping[str, Any], above: str = ""
) -> dict[str, tuple[Any, Any]]:
    conflicts: dict[str, tuple[Any, Any]] = {}
    for key, ours in from_run.items():
        theirs = from_file.get(key, AUTO)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            conflicts |= _find_conflicts(theirs, ours, f"{above}{key}.")
        elif theirs not in (AUTO, ours):
            conflicts[above + key] = (theirs, ours)
    return conflicts


def check_with_deepspeed(config: TrainConfig, options: Mapping[str, Any]) -> None:
    """Have DeepSpeed read what :func:`deepspeed_config` returned. Raises ``UsageError`` for a value that it refuses."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig

    file = f"--deepspeed-config {config.deepspeed_config}"
    # The file is read without a process group, so for one rank.
    one_rank = options["train_micro_batch_size_per_gpu"] * options["gradient_accumulation_steps"]
    try:
        DeepSpeedConfig({**options, "train_batch_size": one_rank})
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except Exception as error:
        # DeepSpeed checks by assertions, and by what else its code meets.
        raise UsageError(f"{file}: {first_line(error)}") from error
    if "optimizer" not in options:
        return
    name, params = options["optimizer"].get("type"), dict(options["optimizer"]["params"])
    if name is None:  # DeepSpeed would train without an optimizer
        raise UsageError(f"{file}: optimizer.type is missing; set it to AdamW")
    is_deepspeeds = name.lower() in DEEPSPEED_OPTIMIZERS
    kind = torch.optim.AdamW if is_deepspeeds else getattr(torch.optim, name, None)
    if kind is None:
        raise UsageError(f"{file}: optimizer.type {name} is none of DeepSpeed or torch.optim; set it to AdamW")
    if is_deepspeeds and not params.pop("torch_adam", False):
        # DeepSpeed's own are compiled first, on a rank: what they share with torch's is tried.
        params = {key: value for key, value in params.items() if key in signature(kind).parameters}
    params.pop("adam_w_mode", None)
    params.pop("fp32_optimizer_states", None)
    if (refusal := _find_refusal(kind, params)) is not None:
        wrong = [key for key in params if _find_refusal(kind, {k: v for k, v in params.items() if k != key}) is None]
        place = f"optimizer.params{f'.{wrong[0]}: {params[wrong[0]]!r}' if wrong else ''}"
        raise UsageError(f"{file}: {place} is not taken by {kind.__name__}: {first_line(refusal)}") from refusal


def _find_refusal(kind: type[Optimizer], params: Mapping[str, Any]) -> Exception | None:
    """The error of an optimizer that is made with ``params``."""
    try:
        kind([torch.zeros(1, requires_grad=True)], **params)
    except Exception as error:
        return error
    return None
