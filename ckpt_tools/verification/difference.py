"""One tensor or other entry that differs, and in which way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.showing import Shown
from ckpt_tools.verification.deviation import Deviation


class Aspect(Enum):
    """The way in which a tensor or another entry differs."""

    MISSING = "missing"
    """Only the first side has it."""
    UNEXPECTED = "unexpected"
    """Only the second side has it."""
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"
    DIGEST = "digest"
    """Its elements do not have their recorded digest."""
    CHECKSUM = "checksum"
    """A stored record does not match the checksum stored with it."""
    ENTRY = "entry"
    """It is not a tensor: a hyperparameter, the step, an entry of the user's. Its value differs."""


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Shown):
    """One tensor that is not the same. ``deviation`` says how far its elements are apart, if they were compared."""

    SHOWN: ClassVar[tuple[str, ...]] = ("key", "aspect", "what")

    key: StateKey
    aspect: Aspect
    what: str
    deviation: Deviation | None = None
