"""Engines of DeepSpeed with settings that the fixtures do not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fixtures import zero


@dataclass(frozen=True, slots=True)
class Changed(zero.Flavour):
    """A flavour with other settings of ``zero_optimization``."""

    changes: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        config = zero.Flavour.config(self)
        return config | {"zero_optimization": config["zero_optimization"] | self.changes}
