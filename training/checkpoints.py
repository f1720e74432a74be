"""Where a run keeps its checkpoints, and which one ``--resume`` means.

``OUT/checkpoints/epoch_0003``, or ``STORAGE/checkpoints/epoch_0003`` where the run has a storage, holds the shards
written after three finished epochs, whatever the launcher. A checkpoint is a path or, in a store, a URL.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError, SourceNotFoundError

from .config import RESUME_LATEST, TrainConfig, is_url
from .storage import check_bucket, names_below, recorded_latest

CHECKPOINTS = "checkpoints"
_EPOCH_FOLDER = re.compile(r"epoch_\d{4,}")

_SHARD = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|latest|zero_to_fp32\.py|[^/]+/[^/]*(model|optim)_states\.pt")
"""The files that PyTorch and DeepSpeed write into the folder of a checkpoint."""


def checkpoint_name(epoch: int) -> str:
    """The folder name of the checkpoint after ``epoch`` finished epochs; names sort as epochs do up to 9999."""
    return f"epoch_{epoch:04d}"


def make_partial(folder: Path, name: str) -> Path:
    """A new, empty folder for a checkpoint that is being written; what a killed run left in its place is removed.

    Raises:
        DestinationExistsError: there are files in its place that no run wrote; nothing is removed then.
    """
    partial = folder / f".{name}.partial"
    found = sorted(partial.rglob("*"), key=lambda path: -len(path.parts))
    strangers = [path for path in found if path.is_symlink() or not (path.is_dir() or _is_shard(path, partial))]
    if strangers or partial.is_symlink():
        raise DestinationExistsError(
            f"{partial} is where a checkpoint is written, and holds {strangers[0] if strangers else 'a link'}, which "
            "no run wrote; move it away"
        )
    for path in found:
        path.rmdir() if path.is_dir() else path.unlink()
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def _is_shard(path: Path, partial: Path) -> bool:
    return _SHARD.fullmatch(path.relative_to(partial).as_posix()) is not None


def checkpoint_of(config: TrainConfig, name: str) -> Path | str:
    """Where the run keeps its checkpoint of that name."""
    return config.out / CHECKPOINTS / name if config.storage is None else f"{_stored(config.storage)}/{name}"


def saved_checkpoints(out: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [path for path in (out / CHECKPOINTS).glob("epoch_*") if _EPOCH_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("epoch_")))


def resume_folder(config: TrainConfig) -> Path | str | None:
    """The checkpoint to start from, None for a fresh run; a URL that ``--resume`` gives is not looked up.

    Raises ``SourceNotFoundError`` where there is none to resume, ``DestinationExistsError`` where the run would mix
    its checkpoints with those of another, ``StoreError`` where its storage cannot be reached.
    """
    if config.storage is not None:
        check_bucket(config.storage)
    if config.resume == RESUME_LATEST:
        return _latest(config.out) if config.storage is None else _latest_stored(config.storage)
    _check_unused(config)
    if config.resume is None or is_url(config.resume):
        return config.resume
    return _existing(Path(config.resume.removeprefix("file://")).expanduser())


def _stored(storage: str) -> str:
    return f"{storage.rstrip('/')}/{CHECKPOINTS}"


def _check_unused(config: TrainConfig) -> None:
    if _holds_checkpoints(config):
        place, option = (config.out, "--out") if config.storage is None else (config.storage, "--storage")
        raise DestinationExistsError(
            f"{place} already holds checkpoints of a run; continue it with --resume {RESUME_LATEST} "
            f"or choose another {option}"
        )


def _holds_checkpoints(config: TrainConfig) -> bool:
    if config.storage is None:
        return bool(saved_checkpoints(config.out))
    return any(_EPOCH_FOLDER.fullmatch(name) for name in names_below(_stored(config.storage)))


def _existing(checkpoint: Path) -> Path:
    if not checkpoint.exists():
        raise SourceNotFoundError(f"there is no checkpoint {checkpoint} to resume from")
    return checkpoint.absolute()


def _latest(out: Path) -> Path:
    found = saved_checkpoints(out)
    if not found:
        raise _nothing_in(out)
    return found[-1]


def _latest_stored(storage: str) -> str:
    """As Ray's record says: a checkpoint that was being uploaded when the run was killed is not in it."""
    name = recorded_latest(_stored(storage))
    if name is None:
        raise _nothing_in(storage)
    return f"{_stored(storage)}/{name}"


def _nothing_in(place: Path | str) -> SourceNotFoundError:
    return SourceNotFoundError(f"{place} holds no checkpoint to resume from; leave out --resume for a fresh run")
