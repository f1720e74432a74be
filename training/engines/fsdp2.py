"""PyTorch FSDP2: ``fully_shard`` on every encoder block and on the root, saved through DCP.

The checkpoint is the tree ``{"app": {"model", "optim", "lr_scheduler", "epoch", "step", "settings"}}``: one
``Stateful`` owns the whole state, and ``get_state_dict`` names optimizer state by fqn, so the files do not depend on
the world size.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchvision.models import VisionTransformer

from ckpt_tools import load_into

from ..config import Precision, Settings, TrainConfig
from ..engines.base import Progress, Save
from ..engines.resuming import apply_settings, progress_of, scheduler_of
from ..models import build_model, encoder_blocks
from ..reading import reading
from ..schedule import WarmupCosine
from ..settings import SETTINGS_ENTRY
from ..starting import load_first_weights


class AppState(Stateful):
    """Model, optimizer, scheduler, progress and the run's settings as one DCP entry."""

    def __init__(self, model: VisionTransformer, optimizer: Optimizer, scheduler: LambdaLR, settings: Settings) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.settings = settings
        self.progress = Progress()

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optim": optim,
            "lr_scheduler": self.scheduler.state_dict(),
            **self.progress.entries(),
            SETTINGS_ENTRY: self.settings,
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
    """An :class:`~training.engines.base.Engine` over FSDP2."""

    def __init__(self, config: TrainConfig, schedule: WarmupCosine, device: torch.device) -> None:
        model = sharded_model(config, device)
        load_first_weights(config, model)
        # foreach=False: the update of one tensor at a time, as DeepSpeed's flat buffers are updated.
        optimizer = AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, foreach=False)
        self._config = config
        # Into memory of its own, which is kept from save to save. Threads and pinned memory would need CUDA.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._app = AppState(model, optimizer, schedule.attach(optimizer), config.settings)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        self._app.model.train()
        loss = functional.cross_entropy(self._app.model(images).float(), labels)
        loss.backward()
        self._app.optimizer.step()
        self._app.scheduler.step()
        self._app.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        self._app.model.eval()
        return self._app.model(images).float()

    def save(self, folder: Path, progress: Progress) -> None:
        self._app.progress = progress
        state_dict_saver.save({"app": self._app}, checkpoint_id=folder)

    def staged(self, progress: Progress, group: ProcessGroup) -> Save:
        """Copy the state to this process' memory; the function that writes the copy, with collectives of ``group``."""
        self._app.progress = progress
        state = self._stager.stage({"app": self._app.state_dict()})
        return partial(_write_staged, state, group)

    def resume(self, checkpoint: Path | str) -> Progress:
        with reading(checkpoint):
            entries = load_into(self._app.model, self._app.optimizer, checkpoint)
        self._app.scheduler.load_state_dict(scheduler_of(entries, checkpoint))
        apply_settings(self._config, self._app.scheduler)
        return progress_of(entries, checkpoint)

    def close(self) -> None:
        self._stager.close()


def _write_staged(state: Any, group: ProcessGroup, folder: Path) -> None:
    state_dict_saver.save(state, checkpoint_id=folder, process_group=group)


def sharded_model(config: TrainConfig, device: torch.device) -> VisionTransformer:
    """The seeded model, each rank keeping its slice of every parameter; all ranks draw the same weights first."""
    torch.manual_seed(config.seed)
    model = build_model().to(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = precision_policy(config.precision)
    for unit in (*encoder_blocks(model), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """bf16 computes in bfloat16 and keeps parameters and the sums of gradients in float32; fp32 does all in float32."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
