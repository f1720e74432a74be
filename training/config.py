"""What a run is asked to do: one frozen value, checked where it is built, sent unchanged to every worker."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from ckpt_tools.errors import UsageError

from .data import DATASETS, DatasetName

EngineName = Literal["fsdp2", "zero1", "zero2", "zero3"]
LauncherName = Literal["ray", "torchrun"]
Precision = Literal["fp32", "bf16"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
LAUNCHERS: tuple[LauncherName, ...] = get_args(LauncherName)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

RESUME_LATEST = "latest"


def is_url(text: str) -> bool:
    """Whether ``text`` names something in a store that is not local."""
    return "://" in text and not text.startswith("file://")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run. Raises ``UsageError`` for values that do not fit together.

    ``batch_size`` is global: each step uses that many samples over all workers. ``epochs`` is the length of the
    learning rate schedule; a run that ends earlier, after epoch ``until``, can be resumed on the same schedule.
    ``storage`` is the URL of a store that takes the checkpoints in the place of ``out``.
    """

    out: Path
    engine: EngineName
    launcher: LauncherName = "ray"
    num_workers: int = 2
    epochs: int = 12
    until: int | None = None
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_fraction: float = 0.1
    seed: int = 0
    precision: Precision = "fp32"
    dataset: DatasetName = "digits"
    data_root: Path | None = None
    num_samples: int | None = None
    save_every: int = 1
    storage: str | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_counts()
        self._check_together()
        self._check_storage()

    @property
    def last_epoch(self) -> int:
        """The number of finished epochs at which this run ends."""
        return self.epochs if self.until is None else self.until

    def saves_after(self, epoch: int) -> bool:
        """Whether a checkpoint is written once ``epoch`` epochs are finished; the last is always written."""
        return epoch == self.last_epoch or epoch % self.save_every == 0

    def steps_per_epoch(self, num_samples: int) -> int:
        """Full global batches in an epoch. Raises ``UsageError`` where there is none."""
        if num_samples < self.batch_size:
            raise UsageError(f"{num_samples} training samples do not fill one batch of {self.batch_size}")
        return num_samples // self.batch_size

    def to_args(self) -> list[str]:
        """The command line of ``python -m training`` that gives this configuration."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]

    def _check_choices(self) -> None:
        for name, choices in (
            ("engine", ENGINES),
            ("launcher", LAUNCHERS),
            ("precision", PRECISIONS),
            ("dataset", DATASETS),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")

    def _check_counts(self) -> None:
        for name in ("num_workers", "epochs", "until", "batch_size", "num_samples", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, not {value}")
        if self.learning_rate <= 0 or self.weight_decay < 0:
            raise UsageError("learning_rate is above 0 and weight_decay is not below it")
        if not 0 <= self.warmup_fraction < 1:
            raise UsageError(f"warmup_fraction is in [0, 1), not {self.warmup_fraction}")

    def _check_together(self) -> None:
        if self.batch_size % self.num_workers:
            raise UsageError(
                f"the global batch of {self.batch_size} does not divide over {self.num_workers} workers; "
                f"choose --batch-size a multiple of --num-workers"
            )
        if self.last_epoch > self.epochs:
            raise UsageError(f"--until {self.until} lies beyond --epochs {self.epochs}")

    def _check_storage(self) -> None:
        if self.storage is None:
            return
        if not is_url(self.storage):
            raise UsageError(f"--storage is a URL such as s3://bucket/run, not {self.storage!r}; a folder is --out")
        if self.launcher != "ray":
            raise UsageError(
                "--storage is Ray Train's: use --launcher ray, or convert the checkpoints to it afterwards"
            )
