"""DeepSpeed configuration of a run: a JSON file merged with the run's options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import UsageError

from ..config.command_line import shipped_text
from ..config.train_config import TrainConfig
from .optimizers import optimizer_arguments

AUTO = "auto"  # as in transformers: the run's options set the value
KNOWN = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "optimizer",
        "zero_optimization",
        "gradient_clipping",
        "bf16",
        "fp16",
        "zero_force_ds_cpu_optimizer",
        "zero_allow_untested_optimizer",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "comms_logger",
        "flops_profiler",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "sparse_gradients",
        "aio",
        "checkpoint",
        "data_types",
        "activation_checkpointing",
        "seq_parallel_communication_data_type",
        "compile",
    ]
)
"""Allowed keys, which do not contradict the run's options. DeepSpeed itself ignores unknown keys."""

_NEVER = 1_000_000_000


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """The configuration. Raises ``UsageError`` if the user's file contradicts the run's options. ``torch_adam`` uses
    torch's AdamW: no kernel is compiled, and updates equal those of the FSDP2 engine. Without ``--clip-grad-norm``,
    DeepSpeed's default of 1.0 is turned off, as it would change the losses."""
    given = _given(config)
    decided = _decided(config, world_size)
    if config.deepspeed_config is not None:
        _check(config, given, decided)
    options = {"steps_per_print": _NEVER} | _over(given, decided)
    if config.optimizer != "adamw":
        # One of torch's or the user's, which DeepSpeed is handed; with offload it would insist on its own.
        del options["optimizer"]
        options |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return options


def _given(config: TrainConfig) -> dict[str, Any]:
    if config.deepspeed_config is None:
        return _object(json.loads(shipped_text(f"{config.sharding.name}.json")), config)
    try:
        return _object(json.loads(config.deepspeed_config.read_text()), config)
    except (OSError, ValueError) as error:
        raise UsageError(f"--deepspeed-config {config.deepspeed_config} cannot be read: {error}") from error


def _object(value: Any, config: TrainConfig) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"--deepspeed-config {config.deepspeed_config} is not a JSON object")
    return value


def _decided(config: TrainConfig, world_size: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.sharding.stage}
    if config.shard_size is not None:
        zero["zero_hpz_partition_size"] = config.shard_size
    return {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": config.batch_size // world_size // config.gradient_accumulation,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.clip_grad_norm or 0.0,
        "optimizer": {"params": optimizer_arguments(config)},
        "zero_optimization": zero,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": config.precision == "fp16"},
    }


def _over(given: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """``given``, with values of ``decided`` in nested objects."""
    nested = {
        key: _over(given[key], value)
        for key, value in decided.items()
        if isinstance(value, dict) and isinstance(given.get(key), dict)
    }
    return dict(given) | dict(decided) | nested


def _check(config: TrainConfig, given: Mapping[str, Any], decided: Mapping[str, Any]) -> None:
    file = f"--deepspeed-config {config.deepspeed_config}"
    if config.optimizer != "adamw" and "optimizer" in given:
        raise UsageError(f"{file} has an optimizer, and so has --optimizer; leave one of them out")
    if unknown := sorted(set(given) - KNOWN):
        raise UsageError(f"{file}: {unknown[0]} is not a key that a run takes; it takes {', '.join(sorted(KNOWN))}")
    for key, (theirs, ours) in _differing(given, decided).items():
        raise UsageError(f"{file} sets {key} to {theirs} and the options of the run say {ours}; change one of them")
    _check_sections(file, given)
    _check_pipeline(config, file, given)


def _check_pipeline(config: TrainConfig, file: str, given: Mapping[str, Any]) -> None:
    """Resuming a pipeline needs the state of torch's AdamW and ZeRO-1's own masters."""
    optimizer = given.get("optimizer", {})
    is_torch = (optimizer.get("type"), optimizer.get("params", {}).get("torch_adam")) == ("AdamW", True)
    if config.pp > 1 and not is_torch:
        raise UsageError(
            f'{file}: --pp needs torch\'s AdamW: set optimizer.type to "AdamW" and optimizer.params.torch_adam to true'
        )
    if config.pp > 1 and "data_types" in given:
        raise UsageError(f"{file} sets data_types, which does not go together with --pp")


def _differing(given: Mapping[str, Any], decided: Mapping[str, Any], above: str = "") -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for key, ours in decided.items():
        theirs = given.get(key, AUTO)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found |= _differing(theirs, ours, f"{above}{key}.")
        elif theirs not in (AUTO, ours):
            found[above + key] = (theirs, ours)
    return found


def _check_sections(file: str, given: Mapping[str, Any]) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    zero = {key: value for key, value in given.get("zero_optimization", {}).items() if value != AUTO}
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{file}: zero_optimization.{where}: {first['msg']}") from error
