"""Expert parallelism: the experts of a layer dealt out over workers, and each token sent to those of its own."""

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
    """Those of a layer that has any."""
    return block.feed_forward.experts if isinstance(block, MixtureBlock) else None


def deal_out_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Each worker of ``mesh`` keeps as many experts as the others, all of which drew the same weights."""
    for name, weight in list(experts.named_parameters()):
        kept = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(kept))
    experts.weights = partial(_here, experts.weights, mesh.size())  # type: ignore[method-assign]
    # Around forward, not around the module: names of parameters stay as they are.
    experts.forward = partial(_exchanged, experts.forward, mesh.get_group())  # type: ignore[method-assign]


def _here(weights: Callable[[], Sequence[Tensor]], workers: int) -> list[Tensor]:
    """This worker's experts. Their gradients come from the tokens of all workers of the mesh: the mean over them, as
    FSDP2 takes it over the others. FSDP2's own divisor would not do: on a mesh of one worker it divides twice."""
    return [_with_mean_gradient(weight, workers) for weight in weights()]


def _with_mean_gradient(weight: Tensor, workers: int) -> Tensor:
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / workers)
    return local


def _exchanged(compute: Compute, group: ProcessGroup, tokens: Tensor, counts: Tensor) -> Tensor:
    """Send tokens to the workers of their experts, compute, and send the answers back."""
    leaving = counts.reshape(group.size(), -1)
    arriving = torch.empty_like(leaving)
    torch.distributed.all_to_all_single(arriving, leaving, group=group)
    sent, received = (each.sum(1).tolist() for each in (leaving, arriving))
    answers = compute(all_to_all_single_autograd(tokens, received, sent, group), arriving)
    return all_to_all_single_autograd(answers, sent, received, group)
