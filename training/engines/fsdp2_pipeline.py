"""Pipelines with FSDP2: the workers of a stage shard it, and torch's schedules run the micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from ..config.model_names import VOCABULARY
from ..config.train_config import TrainConfig
from ..models.losses import mean_loss, unpack_pair
from .base import DTYPES, Metrics
from .fsdp2 import Fsdp2Engine
from .optimizers import LearningRateSchedule
from .stages import ModelStage, broadcast_from_last, compute_stage_logits


class Fsdp2PipelineEngine(Fsdp2Engine):
    """An :class:`~training.engines.base.Engine` over the stages of a pipeline."""

    def __init__(self, config: TrainConfig, schedule: LearningRateSchedule, device: torch.device) -> None:
        super().__init__(config, schedule, device)
        assert isinstance(self._module, ModelStage) and self._meshes.pipeline is not None
        self._stage, self._device, self._group = self._module, device, self._meshes.pipeline.get_group()
        self._losses: list[Tensor] = []
        self._schedule: Any = None

    def _new_schedule(self, samples: int, context: int) -> Any:
        """The schedule, with given shapes, which stages would otherwise exchange."""
        chunks, size = self._stage.chunks, self._group.size()
        dtype = DTYPES[self._config.precision]
        hidden = torch.empty(samples, context, self._stage.width, dtype=dtype, device="meta").requires_grad_()
        tokens = torch.empty(samples, context, dtype=torch.int64, device="meta")
        logits = torch.empty(samples, context, VOCABULARY, dtype=dtype, device="meta")
        stages = [
            PipelineStage(
                chunk,
                self._group.rank() + at * size,
                size * len(chunks),
                self._device,
                input_args=tokens if chunk.is_first else hidden,
                output_args=logits if chunk.is_last else hidden,
                group=self._group,
            )
            for at, chunk in enumerate(chunks)
        ]
        kind: Any = get_schedule_class(self._config.pp_schedule or "1f1b")
        parts = self._config.gradient_accumulation
        return kind(stages if len(chunks) > 1 else stages[0], parts, loss_fn=self._compute_loss, scale_grads=False)

    def _compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Scaled loss of a micro-batch; called by the schedule on the last stage."""
        loss = mean_loss(logits, labels)
        self._losses.append(loss.detach())
        return self._scale_loss(loss)

    def _accumulate_gradients(self, batch: Any) -> Tensor:
        inputs, labels = unpack_pair(batch)
        if self._schedule is None:
            self._schedule = self._new_schedule(len(inputs) // self._config.gradient_accumulation, inputs.shape[1])
        self._losses.clear()
        args = (inputs,) if self._stage.is_first else ()
        self._schedule.step(*args, target=labels if self._stage.is_last else None)
        self._add_tied_gradients()
        loss = torch.stack(self._losses).mean() if self._losses else torch.zeros((), device=self._device)
        return broadcast_from_last(loss, self._group)

    def _add_tied_gradients(self) -> None:
        """Add the tied matrix's gradient of the other end; a sum of two has the same bits in either order."""
        if not (self._stage.is_first or self._stage.is_last):
            return
        gradient = self._stage.embed.weight.grad
        assert isinstance(gradient, DTensor)
        mine = gradient.to_local()
        sent = mine.to(self._device).contiguous()
        received, other = torch.empty_like(sent), self._group.size() - 1 if self._stage.is_first else 0
        operations = [P2POp(torch.distributed.isend, sent, group=self._group, group_peer=other)]
        operations.append(P2POp(torch.distributed.irecv, received, group=self._group, group_peer=other))
        for work in torch.distributed.batch_isend_irecv(operations):
            work.wait()
        mine.add_(received.to(mine.device))

    def _counted_parameters(self) -> Iterable[Parameter]:
        """The tied matrix counts once, on the first stage."""
        counted_before = self._stage.embed.weight if self._stage.is_last else None
        return (each for each in self._stage.parameters() if each is not counted_before)

    def evaluate(self, metrics: Metrics, batch: Any) -> Mapping[str, Tensor]:
        dtype = DTYPES[self._config.precision]
        return metrics(lambda inputs: compute_stage_logits(self._stage, inputs, dtype, self._group), batch)
