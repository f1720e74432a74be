"""Names, mesh and small files of a checkpoint that was read, for writing it again for other ranks.

They are literal files of the manifest, which other formats' writers ignore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt_tools.core.literals import make_literal_file_name
from ckpt_tools.core.manifest import Manifest

FSDP_DIM = "fsdp"
"""The dim of verl's mesh."""

GENERATOR_NAMES = ("rng", "rng_state", "rng_states", "cpu_rng_state", "cuda_rng_state")
"""Entries with the states of a rank's random number generators. They are neither read nor written: ranks of another
run cannot use them, and verl's loader restores its own from ``rng``."""

_ORIGIN_FILE = make_literal_file_name("sharded.json")
_COMPANION_PREFIX = make_literal_file_name("beside/")


@dataclass(frozen=True, slots=True)
class Origin:
    """``templates`` are names of files, with ``{rank}`` and ``{world}`` in place of the numbers, by the entry at the
    top of the tree that they hold; ``""`` is for the rest, or for all. ``names`` are those of all files.
    ``is_numbered`` says that the optimizer knew its parameters by number. ``whole`` are weights that every rank had
    whole. ``beside`` are small files to be written again."""

    templates: Mapping[str, str]
    names: tuple[str, ...] = ()
    is_numbered: bool = False
    device_type: str | None = None
    dim_name: str | None = None
    whole: tuple[str, ...] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)

    def to_literals(self) -> dict[str, bytes]:
        content = {name: value for name, value in asdict(self).items() if name != "beside"}
        return {_ORIGIN_FILE: json.dumps(content).encode()} | {
            _COMPANION_PREFIX + path: data for path, data in self.beside.items()
        }


def read_origin(manifest: Manifest) -> Origin | None:
    """The origin of a manifest that was read from files of ranks; None for others."""
    if _ORIGIN_FILE not in manifest.literals:
        return None
    content: dict[str, Any] = json.loads(manifest.literals[_ORIGIN_FILE])
    companion_files = {
        n.removeprefix(_COMPANION_PREFIX): data
        for n, data in manifest.literals.items()
        if n.startswith(_COMPANION_PREFIX)
    }
    return Origin(
        **{**content, "whole": tuple(content["whole"]), "names": tuple(content["names"])}, beside=companion_files
    )
