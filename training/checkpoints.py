"""Where a run keeps its checkpoints, and which one ``--resume`` means.

``OUT/checkpoints/epoch_0003`` holds the shards written after three finished epochs, whatever the launcher.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError, SourceNotFoundError
from training.config import RESUME_LATEST, TrainConfig

CHECKPOINTS = "checkpoints"
_EPOCH_FOLDER = re.compile(r"epoch_\d{4,}")


def checkpoint_name(epoch: int) -> str:
    """The folder name of the checkpoint after ``epoch`` finished epochs; names sort as epochs do up to 9999."""
    return f"epoch_{epoch:04d}"


def saved_checkpoints(out: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [path for path in (out / CHECKPOINTS).glob("epoch_*") if _EPOCH_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("epoch_")))


def resume_folder(config: TrainConfig) -> Path | None:
    """The checkpoint to start from, None for a fresh run.

    Raises ``SourceNotFoundError`` where there is none to resume, ``DestinationExistsError`` where the run would mix
    its checkpoints with those of another.
    """
    if config.resume == RESUME_LATEST:
        return _latest(config.out)
    _check_unused(config.out)
    return _existing(Path(config.resume.removeprefix("file://")).expanduser()) if config.resume is not None else None


def _check_unused(out: Path) -> None:
    if saved_checkpoints(out):
        raise DestinationExistsError(
            f"{out} already holds checkpoints of a run; continue it with --resume {RESUME_LATEST} "
            f"or choose another --out"
        )


def _existing(checkpoint: Path) -> Path:
    if not checkpoint.exists():
        raise SourceNotFoundError(f"there is no checkpoint {checkpoint} to resume from")
    return checkpoint.absolute()


def _latest(out: Path) -> Path:
    found = saved_checkpoints(out)
    if not found:
        raise SourceNotFoundError(f"{out} holds no checkpoint to resume from; leave out --resume for a fresh run")
    return found[-1]
