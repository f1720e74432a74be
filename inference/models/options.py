"""Options of a loaded model, equal in the process that asks for it and in the one that loads it; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckpt_tools.errors import UsageError

from ..common.name_options import AS_IT_IS, Reading
from .architectures import Architecture

Exact = Literal["buckets", "full", "off"]
"""``full``: every pass has the full size. ``buckets``: also smaller ones that were found equal. ``off``: any size."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Arguments of ``load_predictor``. Without a ``device``, the first GPU if there is one, else the CPU."""

    architecture: str | None = None
    device: str | None = None
    reading: Reading = AS_IT_IS
    exact: Exact = "full"
    max_batch: int | None = None
    dtype: str | None = None
    embeddings: bool = False
    max_new_tokens: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.exact not in get_args(Exact):
            raise UsageError(f"exact is buckets, full or off, not {self.exact}")
        if self.max_batch is not None and self.max_batch < 1:
            raise UsageError(f"a forward pass has at least one row, not {self.max_batch}")
        if self.max_pixels is not None and self.max_pixels < 1:
            raise UsageError(f"an image has at least one pixel, so that --max-pixels is not {self.max_pixels}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(f"at least one token is generated, not {self.max_new_tokens}")
        if self.architecture is not None:
            Architecture.parse(self.architecture)

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> ModelOptions:
        """Take these options out of a command's ``options``."""
        names = cls.__dataclass_fields__.keys() & options.keys()
        return cls(reading=Reading.taken_from(options), **{name: options.pop(name) for name in names})


DEFAULTS = ModelOptions()
