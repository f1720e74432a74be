"""The folder of a trainer around a checkpoint: one or several checkpoints, and small files beside them.

The files, such as a scheduler or a tokenizer, are not interpreted here: a writer of the folder copies their bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, ShardTable

FILE_SLOT = "file"
"""Slot of the bytes of a file that is copied as it is."""


@dataclass(frozen=True, slots=True)
class CompanionFile:
    """A small file of a trainer's folder: its name in the source, its size, and the rank that wrote it."""

    source: str
    num_bytes: int
    rank: int | None = None

    def make_table(self) -> ShardTable:
        """The table of a tensor of the file's bytes."""
        return ShardTable.whole((self.num_bytes,), DType.UINT8, ByteRange(self.source, 0, self.num_bytes))


@dataclass(frozen=True, slots=True)
class TrainerFolder:
    """The folder of ``trainer``. ``without_ranks``, ``first_is_enough`` and ``resume`` are those of
    ``trainers.record.ResumeRules``."""

    trainer: str
    parts: Mapping[str, Collection[str]]
    """The names at the top of the tree of each checkpoint in the folder, by the folder of the checkpoint; an empty one
    is the trainer's own."""
    files: Mapping[str, CompanionFile]
    """Files that are copied as they are, by their names in the folder."""
    without_ranks: str = ""
    first_is_enough: bool = False
    unknown: frozenset[str] = frozenset()
    """Files of the source in the folder itself that the trainer is not known to write."""
    entries: frozenset[str] = frozenset()
    """Names in ``Manifest.extra`` that were read from ``files``, and are not written a second time."""
    resume: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", MappingProxyType(dict(self.parts)))
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))

    @property
    def sources(self) -> frozenset[str]:
        """The names of the files in the source."""
        return frozenset(file.source for file in self.files.values())

    def find_part(self, top: str) -> str:
        """The folder of an entry of the tree, by the name at the top of its path; the first one if none has it."""
        return next((folder for folder, tops in self.parts.items() if top in tops), next(iter(self.parts)))

    def split_files_by_fit(self, world_size: int) -> tuple[dict[str, CompanionFile], dict[str, CompanionFile]]:
        """The files of the folder for that many ranks, and those that are left out."""
        ranks = {file.rank for file in self.files.values() if file.rank is not None}
        ranks_match = ranks == set(range(world_size))

        def is_kept(file: CompanionFile) -> bool:
            return file.rank is None or ranks_match or (self.first_is_enough and file.rank == 0)

        kept_files = {name: file for name, file in self.files.items() if is_kept(file)}
        return kept_files, {name: file for name, file in self.files.items() if name not in kept_files}
