"""How far a run has come: what a checkpoint holds beside model, optimizer, scheduler and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a run between two optimizer steps.

    ``epoch`` and ``step`` count what is finished. ``batch`` is the number of global batches that the epoch after
    ``epoch`` has trained already, and ``loss_sum`` the sum of their mean losses. The order of samples depends on the
    seed and the epoch alone, so these say which samples come next. ``rng`` holds the random number generators of all
    ranks, as :mod:`.randomness` writes them.
    """

    epoch: int = 0
    step: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    rng: str | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.epoch <= self.step or (self.epoch, self.step) == (0, 0)
        assert 0 <= self.batch <= self.step

    @property
    def is_within_epoch(self) -> bool:
        return self.batch > 0

    @property
    def name(self) -> str:
        """The name of the checkpoint that is saved here. Names sort as positions do, up to epoch 9999."""
        epoch = f"epoch_{self.epoch:04d}"
        return f"{epoch}_step_{self.step:06d}" if self.is_within_epoch else epoch

    def entries(self) -> dict[str, Any]:
        """As plain numbers and words, which every checkpoint format keeps as they are."""
        return asdict(self)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Progress | None:
        """Of what a checkpoint says beside model and optimizer; None if it does not say. Other software and earlier
        versions save at the end of an epoch."""
        epoch, step = entries.get("epoch"), entries.get("step", entries.get("global_step"))
        if type(epoch) is not int or type(step) is not int:
            return None
        batch, loss_sum, rng = (entries.get(name) for name in ("batch", "loss_sum", "rng"))
        return cls(
            epoch,
            step,
            batch=batch if type(batch) is int else 0,
            loss_sum=loss_sum if type(loss_sum) is float else 0.0,
            rng=rng if type(rng) is str else None,
        )
