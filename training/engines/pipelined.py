"""FSDP2 under a pipeline: workers that share a stage shard it, and torch's schedules pass micro-batches on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from ..config.model_names import CONTEXT, VOCABULARY
from ..config.options import Precision
from ..config.schedule import Schedule
from ..config.train_config import TrainConfig
from ..models.language_model import WIDTH
from .base import mean_loss
from .fsdp2 import Fsdp2Engine
from .gradients import total_norm
from .pipeline import Line, Stage

HANDED_ON: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The dtype of hidden states between stages: that of the computation."""


class PipelineEngine(Fsdp2Engine):
    """An :class:`~training.engines.base.Engine` over the stages of a pipeline."""

    def __init__(self, config: TrainConfig, schedule: Schedule, device: torch.device) -> None:
        super().__init__(config, schedule, device)
        assert isinstance(self._module, Stage) and self._meshes.pipeline is not None
        self._stage, self._device, mesh = self._module, device, self._meshes.pipeline
        self._line = Line(tuple(mesh.mesh.tolist()), mesh.get_local_rank(), mesh.get_group(), device)
        self._losses: list[Tensor] = []
        self._schedule = self._new_schedule()

    def _new_schedule(self) -> Schedule1F1B | ScheduleGPipe:
        """Shapes are given, so that no stage has to ask the one before it."""
        parts, line = self._config.gradient_accumulation, self._line
        samples = self._config.batch_size // self._config.data_workers // parts
        handed_on = HANDED_ON[self._config.precision]
        hidden = torch.empty(samples, CONTEXT, WIDTH, dtype=handed_on, device="meta").requires_grad_()
        tokens = torch.empty(samples, CONTEXT, dtype=torch.int64, device="meta")
        logits = torch.empty(samples, CONTEXT, VOCABULARY, dtype=hidden.dtype, device="meta")
        stage = PipelineStage(
            self._stage,
            line.number,
            len(line.ranks),
            self._device,
            input_args=tokens if self._stage.is_first else hidden,
            output_args=logits if self._stage.is_last else hidden,
            group=line.group,
        )
        kind = ScheduleGPipe if self._config.pp_schedule == "gpipe" else Schedule1F1B
        return kind(stage, parts, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of one micro-batch, as it is differentiated; called by the schedule on the last stage."""
        loss = mean_loss(logits, labels)
        self._losses.append(loss.detach())
        return self._scaled(loss)

    def _train(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self._losses.clear()
        args = (inputs,) if self._stage.is_first else ()
        self._schedule.step(*args, target=labels if self._stage.is_last else None)
        self._add_tied_gradients()
        loss = torch.stack(self._losses).mean() if self._losses else torch.zeros((), device=self._device)
        return self._line.from_last(loss)

    def _add_tied_gradients(self) -> None:
        """First and last stage add the other's gradient of the matrix that both have. A sum of two has the same bits in
        either order."""
        if not (self._stage.is_first or self._stage.is_last):
            return
        gradient = self._stage.embed.weight.grad
        assert isinstance(gradient, DTensor)
        mine = gradient.to_local()
        sent = mine.to(self._device).contiguous()
        received, line = torch.empty_like(sent), self._line
        other = line.ranks[-1 if self._stage.is_first else 0]
        operations = [P2POp(torch.distributed.isend, sent, other, line.group)]
        operations.append(P2POp(torch.distributed.irecv, received, other, line.group))
        for work in torch.distributed.batch_isend_irecv(operations):
            work.wait()
        mine.add_(received)

    def _norm(self, parameters: Iterable[Parameter]) -> float:
        """Over all stages; the matrix that two stages have counts once."""
        counted_before = self._stage.embed.weight if self._stage.is_last else None
        gradients = [found.grad for found in parameters if found.grad is not None and found is not counted_before]
        square = total_norm(gradients).to(self._device).double().square()
        torch.distributed.all_reduce(square, group=self._line.group)
        return float(square.sqrt())

    def logits(self, inputs: Tensor) -> Tensor:
        return self._line.logits(self._stage, inputs, HANDED_ON[self._config.precision])
