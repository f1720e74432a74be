"""Compares the settings of a resumed run with those in its checkpoint, once and before any worker starts.

They are in the checkpoint under ``SETTINGS_ENTRY``; reading them imports no framework. Errors about a checkpoint may
name options that the trainer does not have: they get the command that does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, UsageError

from ..config.model_names import MODELS
from ..config.options import SETTINGS, option_name
from ..config.train_config import Settings, TrainConfig
from .run_folder import describe_resume

OPTION = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*|(?:from_|model_key|optim_key|param_order|storage_options|tag)=)")
"""An option of the command line or of Python."""


@contextmanager
def hint_at_convert(checkpoint: Path | str) -> Iterator[None]:
    """Errors about ``checkpoint`` within the block name the command that has the options that they name."""
    try:
        yield
    except CkptError as error:
        if OPTION.search(error.message) is None:
            raise
        # The path of a tag's folder is enough.
        message = re.sub(r"choose one with (--tag|tag=) \(", "name the folder of one (", error.message)
        if OPTION.search(message):
            message += f" (options of `ckpt-tools convert {checkpoint}`; then resume the copy)"
        raise type(error)(message, path=error.path, key=error.key) from error


SETTINGS_ENTRY = "settings"

ORDERING = frozenset({"dataset", "dataset_arg", "data_root", "num_samples", "epoch_steps", "batch_size", "seed"})
"""Settings that determine the samples of each batch."""


def list_resume_messages(config: TrainConfig, checkpoint: Path | str | None) -> list[str]:
    """Messages about the checkpoint to resume. Raises as :func:`check_settings`."""
    lines = [describe_resume(config), None if checkpoint is None else check_settings(config, checkpoint)]
    return [line for line in lines if line is not None]


def check_settings(config: TrainConfig, checkpoint: Path | str) -> str | None:
    """Compare the run's settings with those of the checkpoint; the message to print, if any. Raises UsageError if
    ``--override`` lacks a setting that differs, CkptError if the checkpoint cannot be read."""
    with hint_at_convert(checkpoint):
        extra = ckpt_tools.open(checkpoint).manifest.extra
    recorded = read_settings(extra)
    ours = config.settings
    differing = [name for name, value in recorded.items() if value != ours[name]]
    _check_differing(config, recorded, differing)
    _check_position(config, extra, recorded, differing)
    changes = [_describe_change(config, recorded, name) for name in differing]
    changed = [f"resuming {checkpoint} with other settings: {'; '.join(changes)}"] if changes else []
    missing = [name for name in SETTINGS if name not in recorded and (name != "data_root" or ours[name] is not None)]
    if missing:
        names = ", ".join(f"--{option_name(name)}" for name in missing)
        changed.append(f"{checkpoint} does not record its run's {names}: not compared, this run uses its own")
    return "; ".join(changed) or None


def read_settings(extra: Mapping[Any, Any]) -> Settings:
    """The settings among the entries of a checkpoint that are not tensors; none if no run of ours saved it."""
    recorded = _mapping_at(extra, SETTINGS_ENTRY) or _mapping_at(_mapping_at(extra, "client_state"), SETTINGS_ENTRY)
    return {name: recorded[name] for name in SETTINGS if isinstance(recorded.get(name, ()), str | int | float | None)}


def _mapping_at(entries: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    value = entries.get(name)
    return value if isinstance(value, Mapping) else {}


def _check_differing(config: TrainConfig, recorded: Settings, differing: Iterable[str]) -> None:
    """Raises UsageError without an ``--override``. None allows another model of this package: it has other tensors."""
    ours, theirs = (settings.get("model") for settings in (config.settings, recorded))
    if theirs != ours and {theirs, ours} <= MODELS.keys():
        data = "" if recorded.get("dataset") in (None, config.dataset) else f" --dataset {recorded['dataset']}"
        raise UsageError(
            f"{_describe_change(config, recorded, 'model')}, which has other tensors: resume with --model "
            f"{theirs}{data}, or start a new run without --resume"
        )
    refused = [name for name in differing if option_name(name) not in config.override]
    if refused:
        changes = "; ".join(_describe_change(config, recorded, name) for name in refused)
        overrides = " ".join(f"--override {option_name(name)}" for name in refused)
        these = "value, or change it" if len(refused) == 1 else "values, or change them"
        raise UsageError(f"{changes}; give the checkpoint's {these} with {overrides}")


def _check_position(config: TrainConfig, extra: Mapping[Any, Any], recorded: Settings, differing: list[str]) -> None:
    """Raises UsageError if the checkpoint is within an epoch and the rest of it would have other samples."""
    try:
        recorded_progress = (RunProgress.from_entries(each) for each in (extra, _mapping_at(extra, "client_state")))
        progress = next(filter(None, recorded_progress), RunProgress())
    except AssertionError as error:
        raise FormatError("the epoch, step and batch of the checkpoint are of no position in a run") from error
    moved = [name for name in differing if name in ORDERING]
    if progress.is_within_epoch and moved:
        raise UsageError(
            f"the checkpoint was saved within an epoch, and {_describe_change(config, recorded, moved[0])}, which "
            "would change the rest of the epoch's samples; resume a checkpoint of the end of an epoch"
        )


def _describe_change(config: TrainConfig, recorded: Settings, name: str) -> str:
    here = config.data_root if name == "data_root" else config.settings[name]
    if name == "data_root" and here is None:
        return "--data-root is not given here, and was in the run of the checkpoint"
    if name == "data_root" and recorded[name] is not None:
        return f"--data-root {here} holds other samples than in the run of the checkpoint"
    shown = ("not given" if value is None else value for value in (here, recorded[name]))
    return "--{} is {} here and {} in the checkpoint".format(option_name(name), *shown)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Position of a run between two optimizer steps. ``epoch`` and ``step`` are numbers of finished ones, ``batch`` the
    number of finished global batches of the current epoch, and ``loss_sum`` the sum of their mean losses. With the seed
    these determine the next samples and random numbers. ``data``: state of an iterable dataset, as JSON."""

    epoch: int = 0
    step: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    data: str | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.epoch <= self.step or (self.epoch, self.step) == (0, 0)
        assert 0 <= self.batch <= self.step

    @property
    def is_within_epoch(self) -> bool:
        return self.batch > 0

    @property
    def name(self) -> str:
        """Name of a checkpoint at this position. Names sort by position, up to epoch 9999."""
        epoch = f"epoch_{self.epoch:04d}"
        return f"{epoch}_step_{self.step:06d}" if self.is_within_epoch else epoch

    def to_entries(self) -> dict[str, Any]:
        """Numbers and strings, which every checkpoint format keeps."""
        return asdict(self)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> RunProgress | None:
        """Progress in a checkpoint's entries; None without epoch and step. Without ``batch``: the end of an epoch."""
        epoch, step = entries.get("epoch"), entries.get("step", entries.get("global_step"))
        if type(epoch) is not int or type(step) is not int:
            return None
        batch, loss_sum, data = (entries.get(name) for name in ("batch", "loss_sum", "data"))
        return cls(
            epoch,
            step,
            batch=batch if type(batch) is int else 0,
            loss_sum=loss_sum if type(loss_sum) is float else 0.0,
            data=data if type(data) is str else None,
        )
