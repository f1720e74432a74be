"""Configuration of a run: its options, checked when it is built, and sent unchanged to every worker.

Imports no framework, so a mistake on the command line is answered at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ckpt_tools.arguments import check_not_empty
from ckpt_tools.errors import UsageError
from ckpt_tools.process.credentials import remember_secrets

from .combinations import find_broken_rule
from .options import DATASETS, OPTIMIZERS, SCHEDULES, SETTINGS, RunOptions, describe_options, option_name
from .options import EngineName as EngineName
from .references import check_importable, is_function, parse_arguments, recorded_name, text_of

Settings = dict[str, Any]
REFERENCES = ("model", "dataset", "optimizer", "schedule", "metrics", "callback")
"""Options that may be functions of the user's."""


def _recorded_value(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return "; ".join(value) or None
    return recorded_name(value) if name in REFERENCES else value


@cache
def _digest_files(root: Path, pattern: str) -> str:
    digest = blake2b(digest_size=16)
    try:
        for path in sorted(path for path in root.glob(pattern) if path.is_file()):
            content = path.read_bytes()
            digest.update(json.dumps([str(path.relative_to(root)), len(content)]).encode() + content)
    except OSError as error:
        raise UsageError(f"--data-root {root} cannot be read: {error.filename}: {error.strerror}") from error
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RunOptions):
    """A training run. Raises ``UsageError``, with options spelled as on the command line, for invalid values."""

    def __post_init__(self) -> None:
        remember_secrets(getattr(self, field.name) for field in fields(self))
        for field in fields(self):
            value = getattr(self, field.name)
            check_not_empty(f"--{option_name(field.name)}", "" if value == Path() else value)
            if "\0" in str(value):
                raise UsageError(f"--{option_name(field.name)} has a null byte")
        self._check_choices()
        if (sentence := find_broken_rule(self)) is not None:
            raise UsageError(sentence)
        if self.min_workers is not None:
            replace(self, num_workers=self.min_workers, min_workers=None)

    @property
    def settings(self) -> Settings:
        """The options of ``SETTINGS``: numbers and strings, which every checkpoint format keeps. Instead of the place
        of the data, a digest of them: they may move."""
        return {name: _recorded_value(name, getattr(self, name)) for name in SETTINGS} | {
            "data_root": self._data_digest()
        }

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
        flags = [f"--{option_name(name)}" for name, value in values.items() if value is True]
        several = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
        for name in REFERENCES:
            for each in several[name]:
                check_importable(each, option_name(name))
        options = [
            (name, text_of(one) if callable(one) else one)
            for name, value in several.items()
            for one in value
            if one is not None and not isinstance(one, bool)
        ]
        return flags + [f"--{option_name(name)}={one}" for name, one in options]

    def _data_digest(self) -> str | None:
        """Digest of the names and bytes of the user's own samples, 32 hexadecimal digits; None for others."""
        patterns = {"text": "*.txt", "image-folder": "*/*/*"}
        if self.data_root is None or self.dataset not in patterns:
            return None
        return _digest_files(self.data_root, patterns[self.dataset])

    def _check_choices(self) -> None:
        for name, names in {"dataset": DATASETS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}.items():
            value = getattr(self, name)
            if not is_function(value) and value not in names:
                raise UsageError(f"--{name} is one of {', '.join(names)}, or a function, not {value!r}")
        for each in (self.metrics, *self.callback):
            if each is not None and not is_function(each):
                raise UsageError(f"{each!r} is not a function, as MODULE:FUNCTION or FILE.py:FUNCTION names one")
        for name in ("model_arg", "lora", "dataset_arg", "optimizer_arg", "schedule_arg"):
            parse_arguments(getattr(self, name), option_name(name))
        for field, kind, option in describe_options():
            value = getattr(self, field.name)
            if get_origin(kind) is Literal and value is not field.default and value not in get_args(kind):
                raise UsageError(f"--{option_name(field.name)} is one of {', '.join(get_args(kind))}, not {value!r}")
            if kind in (int, float) and value is not None and not option.is_in_range(value):
                raise UsageError(f"--{option_name(field.name)} is {option.range}, not {value}")
