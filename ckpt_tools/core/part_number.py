"""The share of one process in a conversion that several make together: ``3/64``, or ``auto`` from the job's
environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError

AUTO = "auto"

_JOB_VARIABLES = (
    ("RANK", None, "WORLD_SIZE"),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT"),
    ("SLURM_PROCID", None, "SLURM_NTASKS"),
)
"""A process's number, the least one if that is not 0, and how many there are: torchrun's, those of SLURM's arrays and
of its tasks. The innermost launcher comes first."""


@dataclass(frozen=True, slots=True)
class PartNumber:
    """Part ``number`` of ``count``, counted from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> PartNumber:
        """The part that ``text`` or the environment names. Raises UsageError."""
        if text == AUTO:
            return cls._of_job(environment)
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        part = None if match is None else cls(int(match[1]), int(match[2]))
        if part is None or not 1 <= part.number <= part.count:
            raise UsageError.of(
                "part", f"{format_option('part', text)} is not a part; write for example 1/64, up to 64/64, or {AUTO}"
            )
        return part

    @classmethod
    def _of_job(cls, environment: Mapping[str, str]) -> PartNumber:
        for variable, least_variable, count_variable in _JOB_VARIABLES:
            if variable in environment and count_variable in environment:
                texts = (environment[variable], environment[count_variable], environment.get(least_variable or "", "0"))
                if not all(text.isdecimal() for text in texts):
                    raise UsageError.of("part", f"{variable} and {count_variable} are not numbers: {', '.join(texts)}")
                number, count, least = map(int, texts)
                return cls.parse(f"{number - least + 1}/{count}", environment)
        raise UsageError.of(
            "part",
            f"{format_option('part', AUTO)} finds no number of this process in the environment (torchrun's, or SLURM's "
            "arrays and tasks); in an indexed job of Kubernetes write $((JOB_COMPLETION_INDEX + 1))/N",
        )
