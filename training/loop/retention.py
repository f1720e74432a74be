"""Removal of old checkpoints during a run (``--keep-last``, ``--keep-best``).

``ckpt_tools.prune`` selects them, as a dry run, because it would need the run's own lock. Before its
removal a checkpoint gets the name of an unfinished one, so after a kill the next run removes the rest.
"""

from __future__ import annotations

from pathlib import Path

import ckpt_tools
from ckpt_tools.errors import SourceNotFoundError, UsageError

from ..checkpoints.run_folder import CHECKPOINTS, empty_partial, is_checkpoint_name, partial_folder, strangers_in
from ..config.train_config import TrainConfig


def remove_old(config: TrainConfig) -> None:
    """Remove the checkpoints in ``config.out`` that are neither among the newest nor the best."""
    if config.keep_last is None:
        return
    try:
        report = ckpt_tools.prune(config.out, keep_last=config.keep_last, keep_best=config.keep_best)
    except (UsageError, SourceNotFoundError):
        return  # none is measured or complete yet
    for each in reversed(report.checkpoints):
        if not each.stays:
            _remove(config.out / each.name)


def _remove(checkpoint: Path) -> None:
    """Remove a folder of this run that holds only files of a checkpoint."""
    is_own = checkpoint.parent.name == CHECKPOINTS and is_checkpoint_name(checkpoint.name)
    if is_own and not checkpoint.is_symlink() and not strangers_in(checkpoint):
        hidden = partial_folder(checkpoint.parent, checkpoint.name)
        checkpoint.rename(hidden)
        empty_partial(hidden)
        hidden.rmdir()
