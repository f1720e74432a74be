"""Configuration of a run: its options, checked when it is built, and sent unchanged to every worker.

Imports no framework, so a mistake on the command line is answered at once.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ckpt_tools.arguments import check_not_empty
from ckpt_tools.credentials import remember
from ckpt_tools.errors import UsageError

from .combinations import broken_rule
from .hub import folder_of
from .options import (
    DATASETS,
    OPTIMIZERS,
    OVERRIDES,
    RESUME_AUTO,
    SCHEDULES,
    SETTINGS,
    Options,
    described,
    is_url,
    spelt,
)
from .references import Reference, arguments_of, check_importable, is_function, recorded_name, text_of
from .strategies import EngineName as EngineName

MAX_SEED = 2**32 - 1  # NumPy's limit; torch's is 64 bits, and the seed of an epoch is larger
Settings = dict[str, Any]
REFERENCES = ("model", "dataset", "optimizer", "schedule", "metrics", "callback")
"""Options that may be functions of the user's."""


def _kept(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return "; ".join(value) or None
    return recorded_name(value) if name in REFERENCES else value


def check_data_root(dataset: Reference, root: Path | None) -> None:
    """Raises ``UsageError`` if the dataset needs a folder and none is given."""
    if dataset == "fashion-mnist" and root is None:
        raise UsageError(f"--dataset {dataset} needs --data-root, the folder it is kept in or downloaded to")
    if dataset == "image-folder" and root is None:
        raise UsageError(f"--dataset {dataset} needs --data-root, a folder with train/CLASS and held-out/CLASS")


@cache
def _digest(root: Path, pattern: str) -> str:
    digest = blake2b(digest_size=16)
    try:
        for path in sorted(path for path in root.glob(pattern) if path.is_file()):
            content = path.read_bytes()
            digest.update(json.dumps([str(path.relative_to(root)), len(content)]).encode() + content)
    except OSError as error:
        raise UsageError(f"--data-root {root} cannot be read: {error.filename}: {error.strerror}") from error
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Options):
    """A training run. Raises ``UsageError``, with options spelled as on the command line, for invalid values."""

    def __post_init__(self) -> None:
        remember(getattr(self, field.name) for field in fields(self))
        for field in fields(self):
            value = getattr(self, field.name)
            check_not_empty(f"--{spelt(field.name)}", "" if value == Path() else value)
            if "\0" in str(value):
                raise UsageError(f"--{spelt(field.name)} has a null byte")
        self._check_choices()
        self._check_counts()
        self._check_together()
        self._check_storage()
        self._check_saving()
        self._check_min_workers()
        self._check_first_weights()
        self._check_override()

    @property
    def settings(self) -> Settings:
        """The fields of ``SETTINGS``: numbers and strings, which every checkpoint format keeps. Instead of the place
        of the data, a digest of them: they may move."""
        return {name: _kept(name, getattr(self, name)) for name in SETTINGS} | {"data_root": self._data_digest()}

    def saves_after_epoch(self, epoch: int) -> bool:
        """Whether a checkpoint is due after ``epoch`` finished epochs; the last one is always saved."""
        return epoch == self.last_epoch or epoch % self.save_every == 0

    def saves_after_step(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step`` finished steps; the last one is always saved."""
        return step == self.max_steps or (self.save_every_steps is not None and step % self.save_every_steps == 0)

    def saves_after_seconds(self, seconds: float) -> bool:
        """Whether a checkpoint is due ``seconds`` after the last one, or after the start."""
        return self.save_every_minutes is not None and seconds >= 60 * self.save_every_minutes

    def steps_per_epoch(self, num_samples: int | None) -> int:
        """Full global batches in an epoch; ``num_samples`` is None if unknown. Raises ``UsageError``."""
        if self.epoch_steps is not None:
            if num_samples is not None and num_samples < self.epoch_steps * self.batch_size:
                raise UsageError(
                    f"--epoch-steps {self.epoch_steps} with --batch-size {self.batch_size} needs more than the "
                    f"{num_samples} training samples"
                )
            return self.epoch_steps
        if num_samples is None:
            raise UsageError("the dataset has no length: say the steps of an epoch with --epoch-steps")
        if num_samples < self.batch_size:
            raise UsageError(f"{num_samples} training samples do not fill one batch; --batch-size is {self.batch_size}")
        return num_samples // self.batch_size

    def to_args(self) -> list[str]:
        """Command line of ``python -m training`` for this configuration."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        flags = [f"--{spelt(name)}" for name, value in values.items() if value is True]
        several = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
        for name in REFERENCES:
            for each in several[name]:
                check_importable(each, spelt(name))
        given = [
            (name, text_of(one) if callable(one) else one)
            for name, value in several.items()
            for one in value
            if one is not None and not isinstance(one, bool)
        ]
        return flags + [f"--{spelt(name)}={one}" for name, one in given]

    def _data_digest(self) -> str | None:
        """Digest of the names and bytes of the user's own samples, 32 hexadecimal digits; None for others."""
        patterns = {"text": "*.txt", "image-folder": "*/*/*"}
        if self.data_root is None or self.dataset not in patterns:
            return None
        return _digest(self.data_root, patterns[self.dataset])

    def _check_choices(self) -> None:
        for name, names in {"dataset": DATASETS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}.items():
            value = getattr(self, name)
            if not is_function(value) and value not in names:
                raise UsageError(f"--{name} is one of {', '.join(names)}, or a function, not {value!r}")
        for each in (self.metrics, *self.callback):
            if each is not None and not is_function(each):
                raise UsageError(f"{each!r} is not a function, as MODULE:FUNCTION or FILE.py:FUNCTION names one")
        for name in ("model_arg", "lora", "dataset_arg", "optimizer_arg", "schedule_arg"):
            arguments_of(getattr(self, name), spelt(name))
        if self.schedule_arg and not is_function(self.schedule):
            raise UsageError(f"--schedule-arg is for a function, and --schedule is {self.schedule}")
        for field, kind, _ in described():
            value = getattr(self, field.name)
            if get_origin(kind) is Literal and value is not field.default and value not in get_args(kind):
                raise UsageError(f"--{spelt(field.name)} is one of {', '.join(get_args(kind))}, not {value!r}")

    def _check_counts(self) -> None:
        for field, _, option in described():
            value = getattr(self, field.name)
            if option.least is not None and value is not None and value < option.least:
                raise UsageError(f"--{spelt(field.name)} is at least {option.least}, not {value}")
        if not 0 < self.learning_rate < math.inf:
            raise UsageError(f"--learning-rate is a number above 0, not {self.learning_rate}")
        if min(self.forward_prefetch, self.backward_prefetch) < 0:
            raise UsageError("--forward-prefetch and --backward-prefetch are numbers of blocks, at least 0")
        if self.clip_grad_norm is not None and not 0 < self.clip_grad_norm < math.inf:
            raise UsageError(f"--clip-grad-norm is a number above 0, not {self.clip_grad_norm}")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise UsageError(f"--peak-tflops is a number above 0, not {self.peak_tflops}")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"--weight-decay is a number of at least 0, not {self.weight_decay}")
        if not 0 <= self.warmup_fraction < 1:
            raise UsageError(f"--warmup-fraction is at least 0 and below 1, not {self.warmup_fraction}")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"--seed is from 0 to {MAX_SEED}, not {self.seed}")

    def _check_together(self) -> None:
        if (sentence := broken_rule(self)) is not None:
            raise UsageError(sentence)
        if self.last_epoch > self.epochs:
            raise UsageError(f"--until {self.until} lies beyond --epochs {self.epochs}")
        check_data_root(self.dataset, self.data_root)
        if self.epoch_steps is not None and not is_function(self.dataset):
            raise UsageError(f"--epoch-steps is for a dataset of your own, and --dataset is {self.dataset}")
        if self.dataset == "digits" and self.data_root is not None:
            raise UsageError("--data-root is for the other datasets; digits come with scikit-learn")

    def _check_storage(self) -> None:
        if self.storage is None:
            return
        if not is_url(self.storage):
            raise UsageError(f"--storage is a URL such as s3://bucket/run, not {self.storage!r}; a folder is --out")
        if self.launcher != "ray":
            raise UsageError(
                "--storage is Ray Train's: use --launcher ray, or convert the checkpoints to it afterwards"
            )

    def _check_saving(self) -> None:
        if self.save_every_minutes is not None and not 0 < self.save_every_minutes < math.inf:
            raise UsageError(f"--save-every-minutes is a number above 0, not {self.save_every_minutes}")
        if self.async_save and self.sharding.framework != "fsdp2":
            raise UsageError(
                f"--async-save needs --engine fsdp2: DeepSpeed saves the state of {self.sharding.name} itself"
            )
        if self.keep_best is not None and self.keep_last is None:
            raise UsageError("--keep-best is for --keep-last: without it every checkpoint is kept")
        if self.keep_last is not None and self.storage is not None:
            raise UsageError("--keep-last removes checkpoints in --out alone; for --storage use ckpt-tools prune")

    def _check_min_workers(self) -> None:
        if self.min_workers is None:
            return
        if self.launcher != "ray":
            raise UsageError("--min-workers is for --launcher ray")
        if self.max_restarts == 0:
            raise UsageError("--min-workers is for --max-restarts: without restarts a run ends with its first worker")
        if self.min_workers > self.num_workers:
            raise UsageError(f"--min-workers {self.min_workers} is more than --num-workers {self.num_workers}")
        replace(self, num_workers=self.min_workers, min_workers=None)

    def _check_first_weights(self) -> None:
        if self.init_from is not None and self.resume not in (None, RESUME_AUTO):
            raise UsageError(f"--init-from starts a new run: use it without --resume, or with --resume {RESUME_AUTO}")
        for name in ("rename", "recipe"):
            if getattr(self, name) and self.init_from is None:
                raise UsageError(f"--{name} is for --init-from")
        if self.inverse and self.recipe is None:
            raise UsageError("--inverse is for --recipe")
        if self.lora and folder_of(self.model) is None:
            raise UsageError(f"--lora is for --model hf:FOLDER, and --model is {text_of(self.model)}")
        if self.lora and self.init_from is None and self.resume in (None, RESUME_AUTO):
            raise UsageError("--lora trains beside the weights of a model: give them with --init-from")

    def _check_override(self) -> None:
        for name in self.override:
            if name not in OVERRIDES:
                raise UsageError(f"--override {name} names no setting of a run; it is one of {', '.join(OVERRIDES)}")
        if self.override and self.resume is None:
            raise UsageError("--override is for --resume: a fresh run takes all its settings from its own options")
