"""Old checkpoints of a run go while it trains, by the rules of ``ckpt-tools prune``.

``ckpt_tools.prune`` decides. It removes nothing itself here, because it would have to take the run's own lock. A
checkpoint that goes is first renamed to the name of an unfinished one. So a kill in the middle of a removal leaves what
the next run removes, and nothing that looks complete.
"""

from __future__ import annotations

from pathlib import Path

import ckpt_tools
from ckpt_tools.errors import SourceNotFoundError, UsageError

from ..checkpoints.run_folder import CHECKPOINTS, empty_partial, is_checkpoint_name, partial_folder, strangers_in
from ..config.train_config import TrainConfig


def remove_old(config: TrainConfig) -> None:
    """Remove the checkpoints in ``config.out`` that are neither among the last ones nor the best one."""
    if config.keep_last is None:
        return
    try:
        report = ckpt_tools.prune(config.out, keep_last=config.keep_last, keep_best=config.keep_best)
    except (UsageError, SourceNotFoundError):
        return  # no checkpoint has been measured yet, or none is complete
    for each in reversed(report.checkpoints):
        if not each.stays:
            _remove(config.out / each.name)


def _remove(checkpoint: Path) -> None:
    """Only a folder of the run's own, which holds nothing but files of a checkpoint."""
    is_own = checkpoint.parent.name == CHECKPOINTS and is_checkpoint_name(checkpoint.name)
    if is_own and not checkpoint.is_symlink() and not strangers_in(checkpoint):
        hidden = partial_folder(checkpoint.parent, checkpoint.name)
        checkpoint.rename(hidden)
        empty_partial(hidden)
        hidden.rmdir()
