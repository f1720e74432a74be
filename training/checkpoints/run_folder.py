"""Checkpoints in the folder of a run or in its storage, and the one that ``--resume`` selects.

``OUT/checkpoints/epoch_0003`` or ``STORAGE/checkpoints/epoch_0003`` holds the shards after three finished epochs,
``epoch_0003_step_000070`` those within the fourth, after 70 steps of the run. A checkpoint is a path or a URL.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import ckpt_tools
from ckpt_tools.errors import CkptError, DestinationExistsError, SourceNotFoundError

from ..config.model_names import COMPANIONS
from ..config.options import RESUME_AUTO, RESUME_LATEST, is_url
from ..config.train_config import TrainConfig
from .storage import check_storage, file_system, report_failed_requests, report_failed_writes

CHECKPOINTS = "checkpoints"
_EPOCH_FOLDER = re.compile(r"epoch_\d{4,}(_step_\d{6,})?")

_SHARD = re.compile(
    rf"(adapter_)?config\.json|{COMPANIONS}"
    r"|\.metadata(\.tmp)?|__\d+_\d+\.distcp|latest|zero_to_(fp32|torch)\.py"
    r"|[^/]+/[^/]*(model|optim)_states\.pt"
)
"""Files in a checkpoint of PyTorch, DeepSpeed and :mod:`training.models.config_json`."""


def is_checkpoint_name(name: str) -> bool:
    """Whether it is a name that a run gives to a checkpoint."""
    return _EPOCH_FOLDER.fullmatch(name) is not None


def partial_folder(folder: Path, name: str) -> Path:
    return folder / f".{name}.partial"


def make_partial(folder: Path, name: str) -> Path:
    """Make an empty folder for a checkpoint; raises as :func:`empty_partial`."""
    partial = partial_folder(folder, name)
    empty_partial(partial)
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def empty_partial(partial: Path) -> None:
    """Remove the files of an unfinished checkpoint. Raises DestinationExistsError if it holds a file of others."""
    strangers = find_unknown_files(partial)
    if strangers or partial.is_symlink():
        raise DestinationExistsError(
            f"{partial} is where a checkpoint is written, and holds {strangers[0] if strangers else 'a link'}, which "
            "no run wrote; move it away"
        )
    for path in sorted(partial.rglob("*"), key=lambda path: -len(path.parts)):
        path.rmdir() if path.is_dir() else path.unlink()


def remove_shards(config: TrainConfig, name: str) -> None:
    """Remove a killed run's uploads of this checkpoint: fewer ranks would not replace all. StoreError."""
    fs, folder = file_system(str(checkpoint_of(config, name)))
    with report_failed_requests(config.storage or ""):
        for path in fs.find(folder):
            if _SHARD.fullmatch(path.removeprefix(f"{folder}/")):
                fs.rm_file(path)


def find_unknown_files(folder: Path) -> list[Path]:
    """Paths in the folder of a checkpoint that no run writes there."""

    def is_own(path: Path) -> bool:
        return path.is_dir() or _SHARD.fullmatch(path.relative_to(folder).as_posix()) is not None

    return [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not is_own(path)]


def _checkpoints_location(config: TrainConfig) -> Path | str:
    """The folder or URL of the run's checkpoints."""
    return config.out / CHECKPOINTS if config.storage is None else f"{config.storage.rstrip('/')}/{CHECKPOINTS}"


def checkpoint_of(config: TrainConfig, name: str) -> Path | str:
    place = _checkpoints_location(config)
    return place / name if isinstance(place, Path) else f"{place}/{name}"


def make_out(out: Path) -> None:
    """Make the folder of the run. Raises DestinationExistsError for a file, StoreError if it cannot be written to."""
    with report_failed_writes(out):
        for blocking in (each for each in (out, *out.parents) if each.is_file()):
            raise DestinationExistsError(f"--out {out} is to be a folder, and {blocking} is a file")
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass


def list_saved_checkpoints(out: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    folders = [path for path in (out / CHECKPOINTS).glob("epoch_*") if is_checkpoint_name(path.name)]
    return sorted(folders, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def find_resume_checkpoint(config: TrainConfig) -> Path | str | None:
    """The checkpoint to resume, None for a new run; a path or URL in ``--resume`` is not looked up. Raises CkptError,
    as if a new run would mix its checkpoints with those of another."""
    if config.storage is not None:
        check_storage(config.storage)
    if resumes_own(config):
        newest = find_newest_complete(config)
        if newest is None and config.resume == RESUME_LATEST:
            raise SourceNotFoundError(
                f"{config.storage or config.out} holds no checkpoint to resume from; leave out --resume for a fresh "
                "run, or give the path of one"
            )
        return None if newest is None else checkpoint_of(config, newest.name)
    if list_saved_checkpoints(config.out) if config.storage is None else _list_checkpoints(config):
        raise DestinationExistsError(
            f"{config.storage or config.out} already holds checkpoints of a run; continue it with --resume "
            f"{RESUME_LATEST} or choose another {'--out' if config.storage is None else '--storage'}"
        )
    if config.resume is None or is_url(config.resume):
        return config.resume
    return Path(config.resume.removeprefix("file://")).expanduser().absolute()


def resumes_own(config: TrainConfig) -> bool:
    """Whether the run resumes its own newest complete checkpoint."""
    return config.resume in (RESUME_LATEST, RESUME_AUTO)


def config_after_failure(config: TrainConfig) -> TrainConfig:
    """The run after a failure: it resumes its own newest complete checkpoint. Without one it begins as before, with the
    checkpoint of ``--resume``, if any."""
    begins_anew = config.resume is not None and find_newest_complete(config) is None
    return config if begins_anew else replace(config, resume=RESUME_AUTO)


def find_newest_complete(config: TrainConfig) -> ckpt_tools.RunCheckpoint | None:
    """The run's newest checkpoint with complete files. Raises ``StoreError``."""
    return next((each for each in _list_checkpoints(config) if each.is_complete), None)


def _list_checkpoints(config: TrainConfig) -> list[ckpt_tools.RunCheckpoint]:
    """Checkpoints of the run, newest first, also incomplete ones."""
    try:
        return [
            each for each in ckpt_tools.ls(_checkpoints_location(config)).checkpoints if is_checkpoint_name(each.name)
        ]
    except SourceNotFoundError:
        return []


def describe_resume(config: TrainConfig) -> str | None:
    """Message about the choice of ``--resume latest`` and ``--resume auto``."""
    if not resumes_own(config):
        return None
    newest = find_newest_complete(config)
    if newest is None:
        return f"{config.storage or config.out} holds no complete checkpoint: a new run begins"
    return f"resuming {newest.name} ({newest.format}, {newest.world_size or 'unknown'} ranks)"


def set_aside_incomplete(config: TrainConfig) -> None:
    """Rename the incomplete checkpoints in ``out`` after the one that is resumed, because the run may need their names,
    and print so. Raises DestinationExistsError if a new name exists."""
    newest, saved = find_newest_complete(config), list_saved_checkpoints(config.out)
    begin = 0 if newest is None else [path.name for path in saved].index(newest.name) + 1
    for path in saved[begin:]:
        aside = path.with_name(f"{path.name}.incomplete")
        if os.path.lexists(aside):
            raise DestinationExistsError(f"{path} is not complete, and {aside.name} exists already; move one away")
        path.rename(aside)
        print(f"{path.name} is not complete: renamed to {aside.name}", flush=True)


def resume_hint(config: TrainConfig) -> str:
    """End of a message, about how to resume a failed run; empty if it has saved nothing."""
    with suppress(CkptError):
        if find_newest_complete(config) is not None:
            return f"; continue with --resume {RESUME_LATEST}"
    return ""
