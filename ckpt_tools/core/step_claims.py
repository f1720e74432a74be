"""Claims of single files about the step of their run. Files of two saves make different claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeGuard

from ckpt_tools.errors import MalformedError

OPTIMIZER = "step of the optimizer"
"""The counter of a claim that repeats what state of the optimizer says."""


@dataclass(frozen=True, slots=True)
class StepClaim:
    """``file`` says that ``counter`` is ``number``; if it is ``of_rank``, all ranks of a save say the same."""

    counter: str
    number: float
    file: str
    of_rank: bool = False


def rank_claims(file: str, values: Mapping[Any, Any], counters: Iterable[str]) -> list[StepClaim]:
    """Claims of a rank's file by those of ``values`` that are numbers."""
    found = ((name, values.get(name)) for name in counters)
    return [StepClaim(name, value, file, of_rank=True) for name, value in found if is_count(value)]


def is_count(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and isfinite(value)


def refuse_two_saves(claims: Iterable[StepClaim]) -> None:
    """Raises MalformedError where two ranks of one save make different claims."""
    first: dict[str, StepClaim] = {}
    for claim in claims:
        other = first.setdefault(claim.counter, claim) if claim.of_rank else claim
        if other.number != claim.number:
            why = f"its {claim.counter} is {claim.number:.15g}, but that of {other.file} is {other.number:.15g}"
            raise MalformedError(f"{why}: they are of two saves; take all files from one", path=claim.file)
