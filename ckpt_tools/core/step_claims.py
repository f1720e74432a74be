"""Claims of single files about the step of their run. Files of two saves make different claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeGuard

from ckpt_tools.errors import MalformedError

OPTIMIZER_STEP_COUNTER = "step of the optimizer"
"""The counter of a claim that repeats the step in the optimizer's state."""


@dataclass(frozen=True, slots=True)
class StepClaim:
    """``file`` states that ``counter`` is ``number``; if ``of_rank``, all ranks of a save state the same."""

    counter: str
    number: float
    file: str
    of_rank: bool = False


def make_rank_claims(file: str, values: Mapping[Any, Any], counters: Iterable[str]) -> list[StepClaim]:
    """Claims of a rank's file: one for each of ``counters`` whose value in ``values`` is a number."""
    counter_values = ((name, values.get(name)) for name in counters)
    return [StepClaim(name, value, file, of_rank=True) for name, value in counter_values if is_finite_number(value)]


def is_finite_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and isfinite(value)


def check_same_save(claims: Iterable[StepClaim]) -> None:
    """Raises MalformedError where two ranks of one save make different claims."""
    first_claims: dict[str, StepClaim] = {}
    for claim in claims:
        earlier_claim = first_claims.setdefault(claim.counter, claim) if claim.of_rank else claim
        if earlier_claim.number != claim.number:
            raise MalformedError(
                f"its {claim.counter} is {claim.number:.15g}, but that of {earlier_claim.file} is "
                f"{earlier_claim.number:.15g}: they are of two saves; take all files from one",
                path=claim.file,
            )
