"""Expert parallelism: experts are split over workers, and tokens are sent to the workers of their experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..models.experts import Experts, MixtureBlock

Compute = Callable[[Tensor, Tensor], Tensor]


def experts_of(block: nn.Module) -> Experts | None:
    """Experts of a layer, if it has any."""
    return block.feed_forward.experts if isinstance(block, MixtureBlock) else None


def split_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep this worker's part of the experts, whose initial weights are the same on all workers of ``mesh``."""
    for name, weight in list(experts.named_parameters()):
        kept = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(kept))
    experts.weights = partial(_here, experts.weights, mesh.size())  # type: ignore[method-assign]
    # A wrapper of the module would change the names of parameters.
    experts.forward = partial(_exchanged, experts.forward, mesh.get_group())  # type: ignore[method-assign]


def _here(weights: Callable[[], Sequence[Tensor]], workers: int) -> list[Tensor]:
    """This worker's experts. Their gradients, from the tokens of all workers of the mesh, become means over them, as
    FSDP2's over its workers. FSDP2's own divisor cannot be used: on a mesh of one worker it divides twice."""
    return [_with_mean_gradient(weight, workers) for weight in weights()]


def _with_mean_gradient(weight: Tensor, workers: int) -> Tensor:
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / workers)
    return local


def _exchanged(compute: Compute, group: ProcessGroup, tokens: Tensor, counts: Tensor) -> Tensor:
    """Send tokens to the workers of their experts, compute, and send the results back."""
    leaving = counts.reshape(group.size(), -1)
    arriving = torch.empty_like(leaving)
    torch.distributed.all_to_all_single(arriving, leaving, group=group)
    sent, received = (each.sum(1).tolist() for each in (leaving, arriving))
    answers = compute(all_to_all_single_autograd(tokens, received, sent, group), arriving)
    return all_to_all_single_autograd(answers, sent, received, group)
