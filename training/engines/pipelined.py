"""FSDP2 under a pipeline: workers that share a stage shard it, and torch's schedules pass micro-batches on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from ..config import Precision, TrainConfig
from ..engines.base import mean_loss
from ..language_model import CONTEXT, VOCABULARY, WIDTH
from ..schedule import Schedule
from .fsdp2 import Fsdp2Engine
from .gradients import total_norm
from .pipeline import Stage

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
        self._stage, self._device, self._mesh = self._module, device, self._meshes.pipeline
        self._number, self._group = self._mesh.get_local_rank(), self._mesh.get_group()
        self._ranks: list[int] = self._mesh.mesh.tolist()
        """Of all stages of this rank's pipeline."""
        self._losses: list[Tensor] = []
        self._schedule = self._new_schedule()

    def _new_schedule(self) -> Schedule1F1B | ScheduleGPipe:
        """Shapes are given, so that no stage has to ask the one before it."""
        parts, last = self._config.gradient_accumulation, self._mesh.size() - 1
        samples = self._config.batch_size // self._config.data_workers // parts
        hidden = self._hidden(samples, "meta").requires_grad_()
        tokens = torch.empty(samples, CONTEXT, dtype=torch.int64, device="meta")
        logits = torch.empty(samples, CONTEXT, VOCABULARY, dtype=hidden.dtype, device="meta")
        stage = PipelineStage(
            self._stage,
            self._number,
            self._mesh.size(),
            self._device,
            input_args=tokens if self._number == 0 else hidden,
            output_args=logits if self._number == last else hidden,
            group=self._group,
        )
        kind = ScheduleGPipe if self._config.pp_schedule == "gpipe" else Schedule1F1B
        return kind(stage, parts, loss_fn=self._loss, scale_grads=False)

    def _hidden(self, samples: int, device: torch.device | str) -> Tensor:
        return torch.empty(samples, CONTEXT, WIDTH, dtype=HANDED_ON[self._config.precision], device=device)

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
        return self._from_last(loss)

    def _from_last(self, value: Tensor) -> Tensor:
        """The last stage's value on every stage."""
        torch.distributed.broadcast(value, self._ranks[-1], group=self._group)
        return value

    def _add_tied_gradients(self) -> None:
        """First and last stage add the other's gradient of the matrix that both have. A sum of two has the same bits in
        either order."""
        if not (self._stage.is_first or self._stage.is_last):
            return
        gradient = self._stage.embed.weight.grad
        assert isinstance(gradient, DTensor)
        mine = gradient.to_local()
        sent = mine.to(self._device).contiguous()
        received, other = torch.empty_like(sent), self._ranks[-1 if self._stage.is_first else 0]
        operations = [P2POp(torch.distributed.isend, sent, other, self._group)]
        operations.append(P2POp(torch.distributed.irecv, received, other, self._group))
        for work in torch.distributed.batch_isend_irecv(operations):
            work.wait()
        mine.add_(received)

    def _norm(self, parameters: Iterable[Parameter]) -> float:
        """Over all stages; the matrix that two stages have counts once."""
        counted_before = self._stage.embed.weight if self._stage.is_last else None
        gradients = [found.grad for found in parameters if found.grad is not None and found is not counted_before]
        square = total_norm(gradients).to(self._device).double().square()
        torch.distributed.all_reduce(square, group=self._group)
        return float(square.sqrt())

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        """Each stage waits for the one before it. All ranks have the answer."""
        self._stage.eval()
        if not self._stage.is_first:
            inputs = self._hidden(len(inputs), self._device)
            torch.distributed.recv(inputs, self._ranks[self._number - 1], group=self._group)
        output = self._stage(inputs)
        if self._stage.is_last:
            return self._from_last(output.float().contiguous())
        torch.distributed.send(output.contiguous(), self._ranks[self._number + 1], group=self._group)
        return self._from_last(torch.empty(len(inputs), CONTEXT, VOCABULARY, device=self._device))
