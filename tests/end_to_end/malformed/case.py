"""What a malformed checkpoint is: its files, and what may come of reading it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ckpt_tools.errors import CkptError, FormatError
from tests.end_to_end.fuzzing.seeds import SEEDS

Files = Mapping[str, bytes]
Errors = tuple[type[CkptError], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """``family`` names the judge: the library that reads the same files; ``errors`` are those that may be raised.

    What is read in spite of the damage has to be what the judge reads, unless ``must_fail``.
    """

    family: str
    rule: str
    name: str
    files: Files = field(repr=False)
    errors: Errors = (FormatError,)
    must_fail: bool = True

    def __str__(self) -> str:
        return f"{self.family}: {self.rule}: {self.name}"


@cache
def seed(name: str) -> Files:
    return SEEDS[name]()


def family_of(name: str) -> str:
    """``safetensors``, ``torch``, ``dcp``, ``zero`` or ``universal``."""
    return name.partition("_")[0].rstrip("123")


NUMBERS = (-1, -(2**31), -(2**63), 2**31, 2**32, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64, 10**400)
"""Counts that nobody has, or that overflow something."""

ODDITIES: tuple[Any, ...] = (None, True, 0, -1, 2**62, 0.5, float("nan"), "x", "", [], [[]], {}, (), {"a": 1}, b"x")
"""Values in the place of others."""

HOSTILE_NAMES = (
    "..", "../x", "../../x.safetensors", "a/../../x", "/etc/passwd", "//x", "C:\\x", "C:x", "c:/x", "a\\b", "..\\x",
    "a\0b", "\0", "http://host/x", "file:///etc/passwd", "s3://bucket/x", "hf://x/y", "x/..", "a/b/../../../c",
)  # fmt: skip
"""Names that lead out of a folder somewhere."""

Made = Callable[[], bytes]
