"""What a rank does to load a checkpoint of any format without converting it: through a StorageReader, or in place.

Module-level functions of plain arguments, for `fixtures.launch.pool(n).run`. What the run then holds, gathered by
torch itself, and its next losses are written for the test to judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckpt_tools.loading import load_into
from ckpt_tools.torch_reader import storage_reader
from fixtures import fsdp2, recipe


def through_reader(kind: str, case: str, url: str, out: str, without: tuple[str, ...] = ()) -> None:
    """`dcp.load` of the app state of an FSDP2 run, less the entries `without`."""
    run = fsdp2.Run(recipe.CASES[case], fsdp2.FLAVOURS[kind], seed=2)
    state = {name: value for name, value in run.state_dict().items() if name not in without}
    dcp.load({"app": state}, storage_reader=storage_reader(url))
    run.load_state_dict(state)
    _finish(run, out)


def in_place(kind: str, case: str, url: str, out: str) -> dict[str, Any]:
    """`load_into` a run; what it returned."""
    run = fsdp2.Run(recipe.CASES[case], fsdp2.FLAVOURS[kind], seed=2)
    extras = load_into(run.model, run.optimizer, url)
    run.place(recipe.STEPS_BEFORE)
    if "lr_scheduler" in extras:
        run.schedule.load_state_dict(extras["lr_scheduler"])
    run.step, run.epoch = extras.get("global_step", run.step), extras.get("epoch", run.epoch)
    _finish(run, out)
    return extras


def _finish(run: fsdp2.Run, out: str) -> None:
    truth = fsdp2._finish(run)
    if dist.get_rank() == 0:
        truth.write(Path(out))
    dist.barrier()
