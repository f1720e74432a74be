"""Pipelines with DeepSpeed's ``PipelineModule``, with ZeRO-1 or without ZeRO.

DeepSpeed numbers the layers. The client state of a checkpoint has their names in the whole model, for ckpt-tools.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from ckpt_tools import load_into

from ..checkpoints.weights import load_first_weights
from ..config.train_config import TrainConfig
from ..models.losses import mean_loss, unpack_pair
from ..models.zoo import TrainableModel, make_spec
from .base import Metrics, RunProgress, is_loaded_by_deepspeed, split_batch
from .blocks import OnBlock, prepare_block
from .deepspeed import DeepSpeedEngine
from .stages import ModelStage, build_stage, compute_stage_logits, gather_stage_names, layers_of

DEEPSPEEDS_OWN = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")  # parameters that select its implementation
NAMES_ENTRY = "pipeline_names"
EMBEDDING = "embed"

OTHER_LAYERS = 3  # the embedding, the norm and the head
MOMENTS = ("exp_avg", "exp_avg_sq")


def map_layer_names(layers: int) -> dict[str, list[str]]:
    """DeepSpeed's names of the layers, and their names in the whole model; a tied layer has several."""
    numbered = {str(1 + layer): [f"layers.{layer}"] for layer in range(layers)}
    return {f"tied_modules.{EMBEDDING}": ["embed", "head"], **numbered, str(1 + layers): ["norm"]}


class DeepSpeedPipelineEngine(DeepSpeedEngine):
    """An :class:`~training.engines.base.Engine` over DeepSpeed's ``PipelineEngine``."""

    def _build_first_model(self, options: dict[str, Any], device: torch.device) -> TrainableModel:
        self._stage = _seeded_stage(self._config, partial(prepare_block, self._config))
        # DeepSpeed prints the topology, and autograd would record the collective for tied weights.
        with redirect_stdout(io.StringIO()), torch.no_grad():
            model = _EvenPipelineModule(list(_list_layers(self._stage)), num_stages=self._config.pp, loss_fn=mean_loss)
        grid = model.mpu()
        self.data_rank, self._group = grid.get_data_parallel_rank(), grid.get_pipe_parallel_group()
        _, self._elsewhere = gather_stage_names(self._stage, self._group)
        self._names = self._elsewhere.union(self._stage.state_dict())
        load_first_weights(self._config, self._stage, self._elsewhere)
        return TrainableModel(model)

    def _make_own_optimizer(self, model: TrainableModel, options: dict[str, Any]) -> Optimizer | None:
        """An optimizer of named parameters, which DeepSpeed saves without ZeRO. For clipping, DeepSpeed counts only
        parameters with ``model_parallel`` on all stages but the first."""
        if self._config.sharding.stage:
            return super()._make_own_optimizer(model, options)
        parameter: Any
        for parameter in model.module.parameters():
            parameter.model_parallel = not parameter.ds_pipe_replicated
        values = {name: value for name, value in options["optimizer"]["params"].items() if name not in DEEPSPEEDS_OWN}
        return AdamW(model.module.named_parameters(), **values)

    def step(self, batch: Any) -> Tensor:
        parts = split_batch(unpack_pair(batch), self._config.gradient_accumulation)
        return self._engine.train_batch(iter(parts))

    def evaluate(self, metrics: Metrics, batch: Any) -> Mapping[str, Tensor]:
        return metrics(lambda inputs: compute_stage_logits(self._stage, inputs, self._dtype, self._group), batch)

    def _make_client_state(self, progress: RunProgress) -> dict[str, Any]:
        return {**super()._make_client_state(progress), NAMES_ENTRY: map_layer_names(self._stage.all_layers)}

    def _load_checkpoint(self, checkpoint: Path | str, stage: int) -> Mapping[str, Any]:
        if is_loaded_by_deepspeed(checkpoint, stage, self._dtype, self._config.pp, self._names):
            _, entries = self._engine.load_checkpoint(str(checkpoint))
            return entries
        if stage:
            return self._restore_scheduler(self._load_into_partitions(checkpoint), checkpoint)
        entries = load_into(self._stage, self._engine.optimizer, checkpoint, elsewhere=self._elsewhere)
        return self._restore_scheduler(entries, checkpoint)

    def _load_into_partitions(self, checkpoint: Path | str) -> dict[str, Any]:
        """Load this rank's stage unsharded, and copy its part into ZeRO's partitions."""
        stage = _seeded_stage(self._config, lambda block: None).to(self._device)
        optimizer = AdamW(stage.parameters())
        entries = load_into(stage, optimizer, checkpoint, elsewhere=self._elsewhere)
        _copy_into_partitions(stage, optimizer, self._stage, self._engine.optimizer)
        return entries


def _seeded_stage(config: TrainConfig, on_block: OnBlock) -> ModelStage:
    """This rank's stage. Stages are outermost, as in DeepSpeed's topology."""
    number = torch.distributed.get_rank() // (torch.distributed.get_world_size() // config.pp)
    return build_stage(config, make_spec(config), number, on_block)


@torch.no_grad()
def _copy_into_partitions(stage: ModelStage, optimizer: AdamW, ours: ModelStage, zero: Any) -> None:
    [group], [flat], [members] = optimizer.param_groups, zero.single_partition_of_fp32_groups, zero.bit16_groups
    step = optimizer.state[group["params"][0]]["step"].clone()
    zero.optimizer.state[flat] = {"step": step, **{moment: torch.zeros_like(flat) for moment in MOMENTS}}
    lazy_init_hp_params_optimizer_state(members, flat, zero.optimizer.state)
    zero.optimizer.param_groups[0] |= {name: value for name, value in group.items() if name != "params"}
    for mine, loaded in zip(ours.parameters(), stage.parameters(), strict=True):
        mine.copy_(loaded)
        safe_set_full_fp32_param(mine, loaded)
        for moment in MOMENTS:
            safe_set_full_optimizer_state(mine, optimizer.state[loaded][moment], moment)


def _list_layers(stage: ModelStage) -> Iterator[Any]:
    """All layers of the model in order; those of other stages are not built."""
    mine, elsewhere = dict(stage.layers.items()), LayerSpec(nn.Identity)
    yield _TiedEmbedding(stage)
    yield from (mine.get(str(at), elsewhere) for at in range(stage.all_layers))
    yield stage.norm if stage.is_last else elsewhere
    yield _TiedEmbedding(stage, lambda embed, x: functional.linear(x, embed.weight))


class _TiedEmbedding(TiedLayerSpec):
    """The tied matrix of the first and the last stage."""

    def __init__(self, stage: ModelStage, forward: Callable[[nn.Embedding, Tensor], Tensor] | None = None) -> None:
        super().__init__(EMBEDDING, nn.Embedding, forward_fn=forward)
        self._stage = stage

    def build(self, log: bool = False) -> nn.Module:
        return self._stage.embed


class _EvenPipelineModule(PipelineModule):
    """A pipeline with the same stages as with FSDP2."""

    def _partition_layers(self, method: str) -> None:
        stages, layers = range(1, self.num_stages), self._num_layers - OTHER_LAYERS
        self.parts = [0, *(1 + layers_of(stage, self.num_stages, layers).start for stage in stages), self._num_layers]
        self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])
