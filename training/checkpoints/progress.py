"""Position of a run, which is saved in each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
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

    def entries(self) -> dict[str, Any]:
        """Numbers and strings, which every checkpoint format keeps."""
        return asdict(self)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Progress | None:
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
