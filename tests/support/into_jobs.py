"""What a rank does to load a checkpoint of any format without converting it: through a StorageReader, or in place.

Module-level functions of plain arguments, for `fixtures.launch.pool(n).run`. What the run then holds, gathered by
torch itself, and its next losses are written for the test to judge.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_tools import load_into, storage_reader
from ckpt_tools.transfer.tensor_reader import TensorReader
from fixtures import fsdp2, recipe


def through_reader(kind: str, case: str, url: str, out: str) -> None:
    """`dcp.load` of the app state of an FSDP2 run."""
    run = fsdp2.Run(recipe.CASES[case], fsdp2.FLAVOURS[kind], seed=2)
    state = run.state_dict()
    dcp.load({"app": state}, storage_reader=storage_reader(url))
    run.load_state_dict(state)
    fsdp2.finished(run).write_once(Path(out))


def in_place(kind: str, case: str, url: str, out: str) -> dict[str, Any]:
    """`load_into` a run; what it returned."""
    run = fsdp2.Run(recipe.CASES[case], fsdp2.FLAVOURS[kind], seed=2)
    extras = load_into(run.model, run.optimizer, url)
    run.place(recipe.STEPS_BEFORE)
    if "lr_scheduler" in extras:
        run.schedule.load_state_dict(extras["lr_scheduler"])
    run.step, run.epoch = extras.get("global_step", run.step), extras.get("epoch", run.epoch)
    fsdp2.finished(run).write_once(Path(out))
    return extras


def bytes_read(kind: str, case: str, url: str) -> int:
    """Bytes of elements that this rank reads to load a run in place."""
    run = fsdp2.Run(recipe.CASES[case], fsdp2.FLAVOURS[kind], seed=2)
    counted = 0
    read = TensorReader.read

    def counting(
        tensor_reader: TensorReader, entry: Any, box: Any, shape: Any, start: int, stop: int, out: memoryview
    ) -> None:
        nonlocal counted
        counted += len(out)
        read(tensor_reader, entry, box, shape, start, stop, out)

    with patch.object(TensorReader, "read", counting):
        load_into(run.model, run.optimizer, url)
    return counted


class Holder(nn.Module):
    """Parameters by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


PLACEMENTS = (
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(1)),
    (Shard(0), _StridedShard(0, split_factor=2)),
)


def loads_every_placement(path: str) -> bool:
    """A model of every placement on a 2 x 2 mesh holds the pieces that torch itself would give this rank."""
    mesh = init_device_mesh("cpu", (2, 2))
    stored = torch.load(path)
    for placements in PLACEMENTS:
        want = {
            name: distribute_tensor(tensor, mesh, placements, src_data_rank=None) for name, tensor in stored.items()
        }
        model = Holder({name: torch.zeros_like(tensor) for name, tensor in want.items()})
        load_into(model, None, path)
        got = dict(model.named_parameters())
        for name, tensor in want.items():
            assert tensor.to_local().equal(got[name].to_local()), (name, placements)
    return True
