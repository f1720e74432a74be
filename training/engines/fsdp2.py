"""PyTorch's strategies: FSDP2, with ``fully_shard`` on every block and on the root, or DDP; checkpoints by DCP.

The checkpoint is the tree ``{"app": {"model", "optim", "lr_scheduler", "epoch", "step", "settings"}}`` of one
``Stateful``. ``get_state_dict`` names optimizer state by fqn, so the files do not depend on the world size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ckpt_tools import load_into

from ..checkpoints.settings import SETTINGS_ENTRY, reading
from ..checkpoints.weights import load_first_weights
from ..config.schedule import Schedule
from ..config.train_config import Settings, TrainConfig
from ..models.zoo import spec_of
from .base import Metrics, Progress, Save, mean_of, micro_batches
from .blocks import RunningAverages, set_training
from .optimizers import optimizer_of
from .parallel import meshes_of, parallel_model
from .pipeline import StageNames, names_of_stages
from .resuming import apply_settings, own_values, progress_of, scheduler_of


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm over all ranks, 0-d. Norms are stacked by mesh, as tensor parallelism has several."""
    by_mesh: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [torch.stack([_whole(torch.linalg.vector_norm(one.float())) for one in same]) for same in by_mesh.values()]
    return torch.linalg.vector_norm(torch.cat(norms))


def _whole(norm: Tensor) -> Tensor:
    """Summed on the mesh's device, as nccl has no sums of what ``--cpu-offload`` keeps on the CPU."""
    if not isinstance(norm, DTensor):
        return norm
    mesh = norm.device_mesh
    return DTensor.from_local(norm.to_local().to(mesh.device_type), mesh, norm.placements).full_tensor()


@torch.no_grad()
def multiply(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


@dataclass(slots=True)
class LossScaler:
    """Dynamic loss scale, because fp16 has no gradients under 6e-8. It is halved when a gradient overflows (that step
    is skipped), and doubled after GROWTH_STEPS good steps. All ranks use the same norm."""

    scale: float = 2.0**16
    good_steps: int = 0

    GROWTH_STEPS = 2000

    def update(self, is_finite: bool) -> None:
        """Called after each step; ``is_finite``: whether its gradients were."""
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.GROWTH_STEPS == 0:
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


SCALER_ENTRY = "loss_scaler"
CLIP_EPSILON = 1e-6  # the value of torch's ``clip_grad_norm_`` and of DeepSpeed


@dataclass(eq=False)
class AppState(Stateful):
    """Model, optimizer, scheduler, progress and settings as one DCP entry."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    settings: Settings
    scaler: LossScaler | None = None
    stages: StageNames | None = None
    progress: Progress = field(default_factory=Progress)

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        if self.stages is not None:
            # Each stage saves its own tensors, but all share the entry of the group.
            groups: Any = optim["param_groups"]
            groups[0]["params"] = list(self.stages.parameters)
        return {
            "model": model,
            "optim": optim,
            "lr_scheduler": self.scheduler.state_dict(),
            **self.progress.entries(),
            SETTINGS_ENTRY: self.settings,
            **({} if self.scaler is None else {SCALER_ENTRY: self.scaler.state_dict()}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.scheduler.load_state_dict(state_dict["lr_scheduler"])
        self.progress = Progress.of(state_dict) or Progress()


class Fsdp2Engine:
    """An :class:`~training.engines.base.Engine` over FSDP2, or over DistributedDataParallel."""

    def __init__(self, config: TrainConfig, schedule: Schedule, device: torch.device) -> None:
        self._meshes = meshes_of(config, device)
        made = parallel_model(config, spec_of(config), self._meshes, device)
        self._module, self.loss = made.module, made.loss
        model = self._module.module if isinstance(self._module, DistributedDataParallel) else self._module
        pipeline = self._meshes.pipeline
        stages = None if pipeline is None else names_of_stages(model, pipeline.get_group())
        self._elsewhere = frozenset[str]() if stages is None else stages.elsewhere
        load_first_weights(config, model, self._elsewhere)
        optimizer = optimizer_of(config, replace(made, module=model).parameters())
        self._own_values = own_values(optimizer)
        self._config = config
        # Memory that is reused by each save. Threads and pinned memory would need CUDA.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        scaler = LossScaler() if config.precision == "fp16" else None
        self._app = AppState(model, optimizer, schedule.attach(optimizer), config.settings, scaler, stages)
        # DDP has no mixed-precision policy.
        casts = config.precision == "bf16" and model is not self._module
        self._autocast: Callable[[], AbstractContextManager[Any]] = (
            partial(torch.autocast, device.type, torch.bfloat16) if casts else nullcontext
        )
        self._averages = RunningAverages(model)

    @property
    def data_rank(self) -> int:
        return self._meshes.data_rank

    def step(self, batch: Any) -> Tensor:
        set_training(self._app.model)
        loss = self._train(batch)
        self._update()
        self._averages.average()
        return loss

    def _train(self, batch: Any) -> Tensor:
        """Compute the gradients of all micro-batches; their mean loss."""
        parts = self._config.gradient_accumulation
        cut = micro_batches(batch, parts)
        return mean_of([self._backward(one, is_last=at == parts) for at, one in enumerate(cut, 1)])

    def _backward(self, batch: Any, is_last: bool) -> Tensor:
        """Add the gradients of a micro-batch, which are reduced over ranks after the last one."""
        with self._exchanging(is_last):
            with self._autocast():
                loss = self.loss(self._module, batch)
            self._scaled(loss).backward()
        return loss.detach()

    def _scaled(self, loss: Tensor) -> Tensor:
        """Divide by the number of micro-batches, and multiply by the loss scale of fp16."""
        scale = 1.0 if self._app.scaler is None else self._app.scaler.scale
        factor = scale / self._config.gradient_accumulation
        return loss if factor == 1.0 else loss * factor

    @contextmanager
    def _exchanging(self, is_last: bool) -> Iterator[None]:
        if isinstance(self._module, DistributedDataParallel):
            with nullcontext() if is_last else self._module.no_sync():
                yield
            return
        if self._config.gradient_accumulation > 1:
            assert isinstance(self._module, FSDPModule)
            self._module.set_requires_gradient_sync(is_last)
        yield

    def _update(self) -> None:
        if self._prepare_gradients():
            self._app.optimizer.step()
            self._app.scheduler.step()
        self._app.optimizer.zero_grad()

    def _prepare_gradients(self) -> bool:
        """Unscale and clip; False if the step must be skipped."""
        limit, scaler = self._config.clip_grad_norm, self._app.scaler
        if limit is None and scaler is None:
            return True
        gradients = [found.grad for found in self._app.model.parameters() if found.grad is not None]
        scale = 1.0 if scaler is None else scaler.scale
        norm = self._norm(self._app.model.parameters()) / scale
        if scaler is not None:
            scaler.update(math.isfinite(norm))
        factor = 1 / scale if limit is None else min(1.0, limit / (norm + CLIP_EPSILON)) / scale
        multiply(gradients, factor)
        return scaler is None or math.isfinite(norm)

    def _norm(self, parameters: Iterable[nn.Parameter]) -> float:
        return float(total_norm(found.grad for found in parameters if found.grad is not None))

    @torch.no_grad()
    def evaluated(self, metrics: Metrics, batch: Any) -> Mapping[str, Tensor]:
        self._app.model.eval()
        with self._autocast():
            return metrics(self._module, batch)

    def save(self, folder: Path, progress: Progress) -> None:
        self._app.progress = progress
        state_dict_saver.save({"app": self._app}, checkpoint_id=folder)

    def staged(self, progress: Progress, group: ProcessGroup) -> Save:
        self._app.progress = progress
        state = self._stager.stage({"app": self._app.state_dict()})
        return lambda folder: state_dict_saver.save(state, checkpoint_id=folder, process_group=group)

    def resume(self, checkpoint: Path | str) -> Progress:
        with reading(checkpoint):
            entries = load_into(self._app.model, self._app.optimizer, checkpoint, elsewhere=self._elsewhere)
        self._app.scheduler.load_state_dict(scheduler_of(entries, checkpoint))
        apply_settings(self._own_values, self._app.scheduler)
        if self._app.scaler is not None and SCALER_ENTRY in entries:
            self._app.scaler.load_state_dict(entries[SCALER_ENTRY])
        return progress_of(entries, checkpoint)

    def close(self) -> None:
        self._stager.close()
