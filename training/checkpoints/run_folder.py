"""The folder of a run, the checkpoints that it keeps there or in its storage, and the one that ``--resume`` means.

``OUT/checkpoints/epoch_0003``, or ``STORAGE/checkpoints/epoch_0003`` if the run has a storage, holds the shards
written after three finished epochs, whatever the launcher. ``epoch_0003_step_000070`` was written within the fourth,
after 70 steps of the run. A checkpoint is a path or, in a store, a URL.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import ckpt_tools
from ckpt_tools.errors import CkptError, DestinationExistsError, SourceNotFoundError, StoreError, UsageError

from ..config.options import RESUME_AUTO, RESUME_LATEST, is_url
from ..config.train_config import TrainConfig
from .storage import asked, check_bucket, file_system, names_below, recorded_latest

CHECKPOINTS = "checkpoints"
MAX_NAMED = 5
"""Names that an error lists, the newest first."""

_EPOCH_FOLDER = re.compile(r"epoch_\d{4,}(_step_\d{6,})?")

_SHARD = re.compile(
    r"config\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp|latest|zero_to_(fp32|torch)\.py"
    r"|[^/]+/[^/]*(model|optim)_states\.pt"
)
"""The files that PyTorch, DeepSpeed and :mod:`.model_config` write into the folder of a checkpoint."""


def is_checkpoint_name(name: str) -> bool:
    """Whether a run gives that name to a checkpoint."""
    return _EPOCH_FOLDER.fullmatch(name) is not None


def partial_folder(folder: Path, name: str) -> Path:
    """Where a checkpoint is while it is not complete."""
    return folder / f".{name}.partial"


def make_partial(folder: Path, name: str) -> Path:
    """A new, empty folder for a checkpoint that is being written; what a killed run left in its place is removed.

    Raises:
        DestinationExistsError: there are files in its place that no run wrote; nothing is removed then.
    """
    partial = partial_folder(folder, name)
    empty_partial(partial)
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def empty_partial(partial: Path) -> None:
    """Remove what a run wrote into ``partial``, the folder of an unfinished checkpoint.

    Raises:
        DestinationExistsError: there are files in it that no run wrote; nothing is removed then.
    """
    strangers = strangers_in(partial)
    if strangers or partial.is_symlink():
        raise DestinationExistsError(
            f"{partial} is where a checkpoint is written, and holds {strangers[0] if strangers else 'a link'}, which "
            "no run wrote; move it away"
        )
    for path in sorted(partial.rglob("*"), key=lambda path: -len(path.parts)):
        path.rmdir() if path.is_dir() else path.unlink()


def remove_shards(config: TrainConfig, name: str) -> None:
    """Remove what a killed run has uploaded of a checkpoint that is to be written again, perhaps by fewer ranks: files
    of ranks that are no more would stay among the new ones. Raises StoreError."""
    fs, folder = file_system(str(checkpoint_of(config, name)))
    for path in asked(config.storage or "", lambda: fs.find(folder)):
        if _SHARD.fullmatch(path.removeprefix(f"{folder}/")):
            asked(path, partial(fs.rm_file, path))


def strangers_in(folder: Path) -> list[Path]:
    """What is in the folder of a checkpoint and is not a file or folder that a run writes there."""
    found = sorted(folder.rglob("*"))
    return [path for path in found if path.is_symlink() or not (path.is_dir() or _is_shard(path, folder))]


def _is_shard(path: Path, partial: Path) -> bool:
    return _SHARD.fullmatch(path.relative_to(partial).as_posix()) is not None


def checkpoint_of(config: TrainConfig, name: str) -> Path | str:
    """Where the run keeps its checkpoint of that name."""
    return config.out / CHECKPOINTS / name if config.storage is None else f"{_stored(config.storage)}/{name}"


def make_out(out: Path) -> None:
    """Make the folder of the run, and find out whether files can be written there.

    Raises:
        DestinationExistsError: a file stands there or on the way there. StoreError: it cannot be made or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        blocking = next(path for path in (out, *out.parents) if path.exists())
        raise DestinationExistsError(f"--out {out} is to be a folder, and {blocking} is a file") from error
    except OSError as error:
        raise StoreError(f"--out {out} cannot be written to: {error.strerror}; choose another folder") from error


def saved_checkpoints(out: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first. Raises ``StoreError``."""
    return _epochs_in(out / CHECKPOINTS)


def _epochs_in(folder: Path) -> list[Path]:
    try:
        found = [path for path in folder.glob("epoch_*") if is_checkpoint_name(path.name)]
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed: {error.strerror}") from error
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def resume_folder(config: TrainConfig) -> Path | str | None:
    """The checkpoint to start from, None for a fresh run; a URL that ``--resume`` gives is not looked up.

    Raises ``SourceNotFoundError`` if there is none to resume, ``UsageError`` if it is a folder of several,
    ``DestinationExistsError`` if the run would mix its checkpoints with those of another, ``StoreError`` if its storage
    cannot be reached.
    """
    if config.storage is not None:
        check_bucket(config.storage)
    if config.resume == RESUME_LATEST:
        return _needed_latest(config)
    if config.resume == RESUME_AUTO:
        newest = newest_complete(config)
        return None if newest is None else checkpoint_of(config, newest.name)
    _check_unused(config)
    if config.resume is None or is_url(config.resume):
        return config.resume
    return _existing(Path(config.resume.removeprefix("file://")).expanduser())


def latest_checkpoint(config: TrainConfig) -> Path | str | None:
    """The run's last finished checkpoint. Raises ``CkptError`` if its storage or record cannot be read.

    In a store it is the last one in Ray's record of the run: a checkpoint that was being uploaded when the run was
    killed is not in it. In ``out`` every checkpoint got its name when it was complete.
    """
    if config.storage is not None:
        name = recorded_latest(_stored(config.storage))
        return None if name is None else checkpoint_of(config, name)
    saved = saved_checkpoints(config.out)
    return saved[-1] if saved else None


def newest_complete(config: TrainConfig) -> ckpt_tools.RunCheckpoint | None:
    """The run's newest checkpoint that is whole by its files, whoever wrote it. Raises ``StoreError``."""
    place = config.out / CHECKPOINTS if config.storage is None else _stored(config.storage)
    try:
        found = ckpt_tools.ls(place).checkpoints
    except SourceNotFoundError:
        return None
    return next((each for each in found if each.is_complete and is_checkpoint_name(each.name)), None)


def line_of_auto(config: TrainConfig) -> str | None:
    """What ``--resume auto`` does, for a person."""
    if config.resume != RESUME_AUTO:
        return None
    newest = newest_complete(config)
    if newest is None:
        return f"{config.storage or config.out} holds no complete checkpoint: a new run begins"
    return f"going on from {newest.name} ({newest.format}, {newest.world_size or 'unknown'} ranks)"


def set_aside_incomplete(config: TrainConfig) -> list[str]:
    """Rename the checkpoints in ``out`` that ``--resume auto`` passes over, whose names the run may need; the lines to
    print.

    Raises:
        DestinationExistsError: one of that name was set aside before.
    """
    newest = newest_complete(config)
    saved = saved_checkpoints(config.out)
    names = [path.name for path in saved]
    passed = saved if newest is None else saved[names.index(newest.name) + 1 :]
    return [_set_aside(path) for path in passed]


def _set_aside(checkpoint: Path) -> str:
    aside = checkpoint.with_name(f"{checkpoint.name}.incomplete")
    if os.path.lexists(aside):
        raise DestinationExistsError(f"{checkpoint} is not complete, and {aside.name} is there already; move one away")
    checkpoint.rename(aside)
    return f"{checkpoint.name} is not complete: it is called {aside.name} now"


def way_on(config: TrainConfig) -> str:
    """How to continue after a run has failed, for the end of a sentence; empty if it has saved nothing yet."""
    with suppress(CkptError):
        if latest_checkpoint(config) is not None:
            return f"; continue with --resume {RESUME_LATEST}"
    return ""


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
    return any(is_checkpoint_name(name) for name in names_below(_stored(config.storage)))


def _existing(checkpoint: Path) -> Path:
    if not _is_there(checkpoint):
        raise SourceNotFoundError(f"there is no checkpoint {checkpoint} to resume from")
    _check_single(checkpoint)
    return checkpoint.absolute()


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise StoreError(f"--resume {path} cannot be looked up: {error.strerror}") from error


def _check_single(folder: Path) -> None:
    """Raises ``UsageError`` for the folder of a run, or that of its checkpoints."""
    if epochs := saved_checkpoints(folder) or _epochs_in(folder):
        names = listed([path.name for path in reversed(epochs)])
        raise UsageError(f"--resume {folder} is a run, not a checkpoint; resume one in {epochs[-1].parent}: {names}")


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many there are more."""
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _needed_latest(config: TrainConfig) -> Path | str:
    latest = latest_checkpoint(config)
    if latest is None:
        place = config.out if config.storage is None else config.storage
        raise SourceNotFoundError(
            f"{place} holds no checkpoint to resume from; leave out --resume for a fresh run, or give the path of one"
        )
    return latest
