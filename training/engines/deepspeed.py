"""DeepSpeed ZeRO, stages 1 to 3, saved with ``save_checkpoint`` and its client state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.nn import functional

from ..config import TrainConfig
from ..engines.base import Progress
from ..engines.resuming import apply_settings, as_zero, progress_of
from ..models import build_model
from ..reading import reading
from ..schedule import WarmupCosine
from ..settings import SETTINGS_ENTRY
from ..starting import load_first_weights


class DeepSpeedEngine:
    """An :class:`~training.engines.base.Engine` over DeepSpeed; the stage is the digit in the engine's name."""

    def __init__(self, config: TrainConfig, schedule: WarmupCosine, device: torch.device) -> None:
        join_process_group(device)
        self._config = config
        torch.manual_seed(config.seed)
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        model = build_model()
        load_first_weights(config, model)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=deepspeed_config(config, torch.distributed.get_world_size()),
            lr_scheduler=schedule.attach,
        )

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        self._engine.train()
        loss = functional.cross_entropy(self._forward(images), labels)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        self._engine.eval()
        return self._forward(images)

    def save(self, folder: Path, progress: Progress) -> None:
        tag = f"global_step{progress.step}"
        # DeepSpeed makes the tag's folder on rank 0 only, and each rank may have a folder of its own.
        (folder / tag).mkdir(exist_ok=True)
        client_state = {**progress.entries(), SETTINGS_ENTRY: self._config.settings}
        self._engine.save_checkpoint(str(folder), tag=tag, client_state=client_state)

    def resume(self, checkpoint: Path | str) -> Progress:
        stage = self._engine.zero_optimization_stage()
        with reading(checkpoint), as_zero(checkpoint, stage, self._dtype) as folder:
            _, client_state = self._engine.load_checkpoint(str(folder))
        apply_settings(self._config, self._engine.lr_scheduler)
        return progress_of(client_state, checkpoint)

    def close(self) -> None:
        self._engine.destroy()

    def _forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self._engine(images.to(self._dtype))
        return logits.float()


def join_process_group(device: torch.device) -> None:
    """Wrap the existing process group in ``deepspeed.comm``.

    On CPU, DeepSpeed would first compile an all-reduce for inference over shared memory, which training never
    calls: it needs a C++ compiler and the first run waits for it. Declared incompatible, it is skipped.
    """
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """The JSON configuration of a run.

    ``torch_adam`` uses torch's own AdamW: no kernel is compiled, and the update equals that of the FSDP2 engine.
    Clipping is off, where DeepSpeed's default of 1.0 would train to other losses than FSDP2.
    """
    return {
        "train_batch_size": config.batch_size,
        "train_micro_batch_size_per_gpu": config.batch_size // world_size,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": config.learning_rate, "weight_decay": config.weight_decay, "torch_adam": True},
        },
        "zero_optimization": {"stage": int(config.engine.removeprefix("zero"))},
        "bf16": {"enabled": config.precision == "bf16"},
        "steps_per_print": 1_000_000_000,
    }
