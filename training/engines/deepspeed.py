"""DeepSpeed ZeRO, stages 0 to 3; checkpoints by ``save_checkpoint`` with a client state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt_tools import load_into

from ..checkpoints.settings import SETTINGS_ENTRY, reading
from ..checkpoints.weights import load_first_weights
from ..config.schedule import Schedule
from ..config.train_config import TrainConfig
from ..models.zoo import logits_of, spec_of
from .base import DTYPES, Progress, loss_of, mean_of
from .blocks import OnBlock, RunningAverages, build, prepare, set_training
from .deepspeed_config import deepspeed_config
from .resuming import apply_settings, as_zero, progress_of, scheduler_of


class DeepSpeedEngine:
    """An :class:`~training.engines.base.Engine` over DeepSpeed."""

    def __init__(self, config: TrainConfig, schedule: Schedule, device: torch.device) -> None:
        join_process_group(device)
        self._config = config
        self._dtype = DTYPES[config.precision]
        options = deepspeed_config(config, torch.distributed.get_world_size() // config.pp)
        model = self._first_model(options, device)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            optimizer=self._own_optimizer(model, options),
            config=options,
            lr_scheduler=schedule.attach,
        )
        self._averages = RunningAverages(self._engine.module)

    def _first_model(self, options: dict[str, Any], device: torch.device) -> nn.Module:
        return first_model(self._config, options, self._dtype)

    def _own_optimizer(self, model: nn.Module, options: dict[str, Any]) -> Optimizer | None:
        """None: DeepSpeed makes the one of its configuration."""
        return None

    @property
    def data_rank(self) -> int:
        return torch.distributed.get_rank()

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        set_training(self._engine.module)
        parts, losses = self._config.gradient_accumulation, []
        for micro_inputs, micro_labels in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            loss = loss_of(self._forward(micro_inputs), micro_labels)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        self._averages.average()
        return mean_of(losses)

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        self._engine.eval()
        return logits_of(self._forward(inputs)).float()

    def save(self, folder: Path, progress: Progress) -> None:
        tag = f"global_step{progress.step}"
        # DeepSpeed makes the tag's folder on rank 0 only, and ranks may have different folders.
        (folder / tag).mkdir(exist_ok=True)
        self._engine.save_checkpoint(str(folder), tag=tag, client_state=self._client_state(progress))

    def _client_state(self, progress: Progress) -> dict[str, Any]:
        return {**progress.entries(), SETTINGS_ENTRY: self._config.settings}

    def resume(self, checkpoint: Path | str) -> Progress:
        stage = self._engine.zero_optimization_stage()
        with reading(checkpoint):
            if stage == 0:
                return self._resume_unsharded(checkpoint)
            with as_zero(checkpoint, stage, self._dtype) as folder:
                _, client_state = self._engine.load_checkpoint(str(folder))
        apply_settings(self._config, self._engine.lr_scheduler)
        return progress_of(client_state, checkpoint)

    def _resume_unsharded(self, checkpoint: Path | str) -> Progress:
        """Load model and optimizer, which are unsharded modules of torch, equal on every rank."""
        entries = load_into(self._engine.module, self._engine.optimizer, checkpoint)
        self._engine.lr_scheduler.load_state_dict(scheduler_of(entries, checkpoint))
        apply_settings(self._config, self._engine.lr_scheduler)
        progress = progress_of(entries, checkpoint)
        self._engine.global_steps = progress.step
        return progress

    def close(self) -> None:
        self._engine.destroy()

    def _forward(self, inputs: Tensor) -> Any:
        values = inputs.to(self._dtype) if inputs.is_floating_point() else inputs
        return self._engine(values)


def first_model(config: TrainConfig, options: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """The model with its initial weights. In stage 3 each block is partitioned as soon as it has its weights."""
    spec, in_groups = spec_of(config.model), config.sharding.in_groups
    if config.sharding.stage != 3:
        model = build(config, spec, partial(prepare, config))
        load_first_weights(config, model)
        return model

    def on_block(block: nn.Module) -> None:
        prepare(config, block)
        _partition(block.to(dtype), options, in_groups=in_groups)

    # DeepSpeed does not cast a partly partitioned model.
    return _loaded_blocks(config, on_block).to(dtype) if config.init_from else build(config, spec, on_block).to(dtype)


def _loaded_blocks(config: TrainConfig, on_block: OnBlock) -> nn.Module:
    """Each rank loads the whole model first, because a partitioned block cannot be loaded."""
    spec = spec_of(config.model)
    model = build(config, spec, lambda block: None)
    load_first_weights(config, model)
    for block in spec.blocks_of(model):
        on_block(block)
    return model


def _partition(module: nn.Module, options: dict[str, Any], *, in_groups: bool) -> None:
    """Partition every parameter. The first call makes the groups of hpZ, which later calls reuse."""
    group = groups._get_zero_param_intra_parallel_group() if in_groups else None
    deepspeed.zero.Init(module=module, config_dict_or_path=options, zero_param_parallel_group=group)


def join_process_group(device: torch.device) -> None:
    """Wrap the existing process group in ``deepspeed.comm``. On CPU, DeepSpeed would first compile an all-reduce for
    inference over shared memory, which training never calls: it needs a C++ compiler and the first run waits for it.
    Declared incompatible, it is skipped."""
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
