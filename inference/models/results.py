"""What a model answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer for one input.

    A model that tells classes apart gives the number of the most probable ``label`` and the probability of each class
    in order. A model that writes gives a ``text``. ``embedding`` is what the model makes of the input before its head,
    for a model that has no classes.
    """

    label: int | None = None
    probabilities: tuple[float, ...] | None = None
    text: str | None = None
    embedding: tuple[float, ...] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Between processes; what a dataclass does without it takes six times as long."""
        return Prediction, (self.label, self.probabilities, self.text, self.embedding)

    def __post_init__(self) -> None:
        assert (self.label is None) == (self.probabilities is None)
        assert self.label is not None or self.text is not None or self.embedding is not None
