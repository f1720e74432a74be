"""DeepSpeed ZeRO, stages 0 to 3; checkpoints by ``save_checkpoint`` with a client state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ckpt_tools import load_into

from ..checkpoints.settings import SETTINGS_ENTRY, hint_at_convert
from ..checkpoints.weights import converted_copy, load_first_weights
from ..config.train_config import TrainConfig
from ..models.zoo import TrainableModel, make_spec
from .base import (
    DTYPES,
    Metrics,
    RunProgress,
    Save,
    apply_settings,
    average_losses,
    get_own_group_values,
    is_loaded_by_deepspeed,
    read_progress,
    read_scheduler_state,
    split_batch,
)
from .blocks import RunningAverages, build_in_blocks, prepare_block, set_training
from .deepspeed_config import deepspeed_config
from .optimizers import LearningRateSchedule, is_fused, make_optimizer


class DeepSpeedEngine:
    """An :class:`~training.engines.base.Engine` over DeepSpeed."""

    def __init__(self, config: TrainConfig, schedule: LearningRateSchedule, device: torch.device) -> None:
        join_process_group(device)
        self._config, self._device, self.data_rank = config, device, torch.distributed.get_rank()
        self._dtype = DTYPES[config.precision]
        options = deepspeed_config(config, torch.distributed.get_world_size() // config.pp)
        if (adam := options.get("optimizer", {}).get("params", {})).get("torch_adam"):
            adam.setdefault("fused", is_fused(config, device))
        for name in ("offload_optimizer", "offload_param"):
            (options["zero_optimization"].get(name) or {}).setdefault("pin_memory", device.type == "cuda")
        model = self._build_first_model(options, device)
        self.loss = model.loss
        self._engine, *_ = deepspeed.initialize(
            model=model.module,
            model_parameters=model.list_parameter_groups(),
            optimizer=self._make_own_optimizer(model, options),
            config=options,
            lr_scheduler=schedule.make_scheduler,
        )
        self._own_values = get_own_group_values(self._engine.lr_scheduler.optimizer)
        if (config.sharding.stage, config.pp, self._dtype) == (0, 1, torch.float32):
            # A state dict has numbers; names are in its groups, as torch adds them for named parameters.
            names = {parameter: name for name, parameter in self._engine.module.named_parameters()}
            for group in self._engine.optimizer.param_groups:
                group["param_names"] = [names[each] for each in group["params"]]
        self._averages = RunningAverages(self._engine.module)

    def _build_first_model(self, options: dict[str, Any], device: torch.device) -> TrainableModel:
        """The model with its initial weights. In stage 3 each block is partitioned as soon as it has its weights."""
        config, in_parts = self._config, self._config.sharding.stage == 3

        def on_block(block: nn.Module) -> None:
            prepare_block(config, block)
            if in_parts:
                # The first block makes the groups of hpZ.
                group = groups._get_zero_param_intra_parallel_group() if config.sharding.in_groups else None
                block.to(self._dtype)
                deepspeed.zero.Init(module=block, config_dict_or_path=options, zero_param_parallel_group=group)

        # A partitioned block cannot be loaded, so each rank loads the whole model first.
        later = in_parts and config.init_from is not None
        model = build_in_blocks(config, make_spec(config), (lambda block: None) if later else on_block)
        load_first_weights(config, model.module)
        for block in model.blocks if later else ():
            on_block(block)
        if in_parts:
            model.module.to(self._dtype)  # DeepSpeed does not cast a partly partitioned model
        return model

    def _make_own_optimizer(self, model: TrainableModel, options: dict[str, Any]) -> Optimizer | None:
        """None: DeepSpeed makes the one of its configuration."""
        parameter_groups = model.list_parameter_groups()
        return None if "optimizer" in options else make_optimizer(self._config, parameter_groups, self._device)

    def step(self, batch: Any) -> Tensor:
        set_training(self._engine.module)
        losses = []
        for part in split_batch(batch, self._config.gradient_accumulation):
            loss = self.loss(self._call_engine, part)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        self._averages.average_over_ranks()
        return average_losses(losses)

    @torch.no_grad()
    def evaluate(self, metrics: Metrics, batch: Any) -> Mapping[str, Tensor]:
        self._engine.eval()
        return metrics(self._call_engine, batch)

    def prepare_save(self, progress: RunProgress, group: ProcessGroup | None = None) -> Save:
        assert group is None, "DeepSpeed writes its state itself"
        tag = f"global_step{progress.step}"

        def save(folder: Path) -> None:
            # DeepSpeed makes the tag's folder on rank 0 only, and ranks may have different folders.
            (folder / tag).mkdir(exist_ok=True)
            self._engine.save_checkpoint(str(folder), tag=tag, client_state=self._make_client_state(progress))

        return save

    def _make_client_state(self, progress: RunProgress) -> dict[str, Any]:
        return {**progress.to_entries(), SETTINGS_ENTRY: self._config.settings}

    def resume(self, checkpoint: Path | str) -> RunProgress:
        with hint_at_convert(checkpoint):
            entries = self._load_checkpoint(checkpoint, self._engine.zero_optimization_stage())
        apply_settings(self._own_values, self._engine.lr_scheduler)
        return read_progress(entries, checkpoint)

    def _load_checkpoint(self, checkpoint: Path | str, stage: int) -> Mapping[str, Any]:
        """Load all except what the settings of the run replace; entries of the checkpoint."""
        if stage == 0:  # model and optimizer are unsharded modules of torch, equal on every rank
            return self._restore_scheduler(
                load_into(self._engine.module, self._engine.optimizer, checkpoint), checkpoint
            )
        # What does not fit is converted on each machine, which takes as much space as the checkpoint.
        fits, ranks = is_loaded_by_deepspeed(checkpoint, stage, self._dtype), torch.distributed.get_world_size()
        copied = converted_copy(checkpoint, to=f"zero{stage}", world_size=ranks, dtype=self._dtype)
        with nullcontext(checkpoint) if fits else copied as folder:
            _, entries = self._engine.load_checkpoint(str(folder))
        return entries

    def _restore_scheduler(self, entries: Mapping[str, Any], checkpoint: Path | str) -> Mapping[str, Any]:
        """Continue at the position of these entries, which DeepSpeed has not loaded."""
        self._engine.lr_scheduler.load_state_dict(read_scheduler_state(entries, checkpoint))
        self._engine.global_steps = read_progress(entries, checkpoint).step
        return entries

    def close(self) -> None:
        self._engine.destroy()

    def _call_engine(self, *inputs: Any, **named: Any) -> Any:
        """Output of the model for inputs whose floats get the model's dtype."""
        inputs, named = tree_map_only(
            Tensor, lambda each: each.to(self._dtype) if each.is_floating_point() else each, (inputs, named)
        )
        return self._engine(*inputs, **named)


def join_process_group(device: torch.device) -> None:
    """Wrap the existing process group in ``deepspeed.comm``. On CPU, DeepSpeed would first compile an all-reduce for
    inference over shared memory, which training never calls: it needs a C++ compiler and the first run waits for it.
    Declared incompatible, it is skipped."""
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
