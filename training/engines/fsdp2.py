"""PyTorch's strategies: FSDP2, with ``fully_shard`` on every block and on the root, or DDP; checkpoints by DCP.

The checkpoint is the tree ``{"app": {"model", "optim", "lr_scheduler", "epoch", "step", "settings"}}``.
``get_state_dict`` names optimizer state by fqn, so the files do not depend on the world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ckpt_tools import load_into

from ..checkpoints.settings import SETTINGS_ENTRY, hint_at_convert
from ..checkpoints.weights import load_first_weights
from ..config.train_config import TrainConfig
from ..models.zoo import make_spec
from .base import (
    Metrics,
    RunProgress,
    Save,
    apply_settings,
    average_losses,
    get_own_group_values,
    read_progress,
    read_scheduler_state,
    split_batch,
)
from .blocks import RunningAverages, set_training
from .optimizers import LearningRateSchedule, LossScaler, clip_factor, make_optimizer, scale_gradients, total_norm
from .parallel import build_parallel_model, make_meshes
from .stages import gather_stage_names

SCALER_ENTRY = "loss_scaler"


class Fsdp2Engine:
    """An :class:`~training.engines.base.Engine` over FSDP2, or over DistributedDataParallel."""

    def __init__(self, config: TrainConfig, schedule: LearningRateSchedule, device: torch.device) -> None:
        self._config, self._meshes = config, make_meshes(config, device)
        self.data_rank = torch.distributed.get_rank() // config.tp % self._meshes.data.size()
        sharded = build_parallel_model(config, make_spec(config), self._meshes, device)
        self._module, self.loss = sharded.module, sharded.loss
        self.model = self._module.module if isinstance(self._module, DistributedDataParallel) else self._module
        self._parameters, self._elsewhere = list[str](), frozenset[str]()
        if self._meshes.pipeline is not None:
            self._parameters, self._elsewhere = gather_stage_names(self.model, self._meshes.pipeline.get_group())
        load_first_weights(config, self.model, self._elsewhere)
        self.optimizer = make_optimizer(config, replace(sharded, module=self.model).list_parameter_groups(), device)
        self._own_values = get_own_group_values(self.optimizer)
        self._scheduler = schedule.make_scheduler(self.optimizer)
        # Each save reuses the memory. It is not shared: a thread writes it, and containers often have 64 MB of that.
        on_cuda = device.type == "cuda"
        self._stager = DefaultStager(StagingOptions(on_cuda, False, False, use_non_blocking_copy=on_cuda))
        self.scaler = LossScaler() if config.precision == "fp16" else None
        # DDP has no mixed-precision policy.
        casts = config.precision == "bf16" and self.model is not self._module
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=casts)
        self._averages = RunningAverages(self.model)

    def step(self, batch: Any) -> Tensor:
        set_training(self.model)
        loss = self._accumulate_gradients(batch)
        self._update_weights()
        self._averages.average_over_ranks()
        return loss

    def _accumulate_gradients(self, batch: Any) -> Tensor:
        """Compute the gradients of all micro-batches; their mean loss."""
        parts = self._config.gradient_accumulation
        losses = [self._backward_part(one, at == parts) for at, one in enumerate(split_batch(batch, parts), 1)]
        return average_losses(losses)

    def _backward_part(self, batch: Any, is_last: bool) -> Tensor:
        """Add the gradients of a micro-batch, which are reduced over ranks after the last one."""
        ddp = self._module if isinstance(self._module, DistributedDataParallel) else None
        if self._config.gradient_accumulation > 1 and isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(is_last)
        with nullcontext() if ddp is None or is_last else ddp.no_sync():
            with self._autocast():
                loss = self.loss(self._module, batch)
            self._scale_loss(loss).backward()
        return loss.detach()

    def _scale_loss(self, loss: Tensor) -> Tensor:
        """Divide by the number of micro-batches, and multiply by the loss scale of fp16."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        factor = scale / self._config.gradient_accumulation
        return loss if factor == 1.0 else loss * factor

    def _update_weights(self) -> None:
        if self._prepare_gradients():
            self.optimizer.step()
            self._scheduler.step()
        self.optimizer.zero_grad()

    def _prepare_gradients(self) -> bool:
        """Unscale and clip; False if the step must be skipped. Only a loss scaler waits for the norm."""
        limit, scaler = self._config.clip_grad_norm, self.scaler
        if limit is None and scaler is None:
            return True
        scale = 1.0 if scaler is None else scaler.scale
        norm = total_norm(each.grad for each in self._counted_parameters() if each.grad is not None) / scale
        factor = 1.0 if limit is None else clip_factor(norm, limit)
        scale_gradients((each.grad for each in self.model.parameters() if each.grad is not None), factor / scale)
        if scaler is None:
            return True
        is_finite = math.isfinite(norm)
        scaler.update_scale(is_finite)
        return is_finite

    def _counted_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters whose gradients this rank counts in the norm."""
        return self.model.parameters()

    @torch.no_grad()
    def evaluate(self, metrics: Metrics, batch: Any) -> Mapping[str, Tensor]:
        self.model.eval()
        with self._autocast():
            return metrics(self._module, batch)

    def state_dict(self, progress: RunProgress) -> dict[str, Any]:
        """The checkpoint at this position; collective."""
        model, optim = get_state_dict(self.model, self.optimizer)
        if self._parameters:
            # Each stage saves its own tensors, but all share the entry of the group.
            groups: Any = optim["param_groups"]
            groups[0]["params"] = self._parameters
        entries = {
            "model": model,
            "optim": optim,
            "lr_scheduler": self._scheduler.state_dict(),
            **progress.to_entries(),
        }
        entries[SETTINGS_ENTRY] = self._config.settings
        return {"app": entries | ({} if self.scaler is None else {SCALER_ENTRY: asdict(self.scaler)})}

    def prepare_save(self, progress: RunProgress, group: ProcessGroup | None = None) -> Save:
        state = self.state_dict(progress)
        staged = state if group is None else self._stager.stage(state)
        return lambda folder: state_dict_saver.save(staged, checkpoint_id=folder, process_group=group)

    def resume(self, checkpoint: Path | str) -> RunProgress:
        with hint_at_convert(checkpoint):
            entries = load_into(self.model, self.optimizer, checkpoint, elsewhere=self._elsewhere)
        self._scheduler.load_state_dict(read_scheduler_state(entries, checkpoint))
        apply_settings(self._own_values, self._scheduler)
        if self.scaler is not None and (saved := entries.get(SCALER_ENTRY)):
            self.scaler = LossScaler(float(saved["scale"]), int(saved["good_steps"]))
        return read_progress(entries, checkpoint)

    def close(self) -> None:
        self._stager.close()
