"""What a format must be able to do: read headers into a manifest, or lay a manifest out in files.

No reader knows a writer. Both are pure but for the header reads of a reader, and neither touches a tensor's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckpt_tools.layout import Layout
from ckpt_tools.manifest import Manifest
from ckpt_tools.stores.base import Source


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a user may have to tell a reader. ``tag`` chooses one of several checkpoints of a DeepSpeed folder; the
    keys say where model and optimizer live in a DCP tree (``app.model``)."""

    tag: str | None = None
    model_key: str | None = None
    optim_key: str | None = None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How an output is cut, for the writers that it concerns.

    ``file_name`` is set where the destination is a single file; sizes are in bytes. ``tag`` names the folder of a
    DeepSpeed checkpoint, ``model_key`` and ``optim_key`` where a DCP keeps model and optimizer (``app.model``); None
    leaves it to the writer.
    """

    file_name: str | None = None
    max_shard_bytes: int | None = None
    world_size: int = 1
    tag: str | None = None
    model_key: str | None = None
    optim_key: str | None = None


class Reader(Protocol):
    """One format, to read."""

    @property
    def name(self) -> str:
        """The format's name on the command line."""

    def detect(self, source: Source) -> bool:
        """Whether ``source`` looks like this format; cheap, and never an error."""

    def read_manifest(self, source: Source, options: ReadOptions) -> Manifest:
        """The checkpoint as a manifest, from headers alone.

        Raises:
            FormatError: it cannot be read; SourceNotFoundError: there is no such tag; UnsafeError: it names files
            outside.
        """

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        """The files of ``source`` that are those of the checkpoint ``manifest``, which was read without options.

        They are named as the format names its files, or are named by such a file. None where the checkpoint does not
        lie in ``source`` itself, but in a folder below it. Raises as ``read_manifest``.
        """


class Writer(Protocol):
    """One format, to write."""

    @property
    def name(self) -> str:
        """The format's name on the command line."""

    @property
    def holds_optimizer(self) -> bool:
        """Whether it is a format of whole states. One of models holds the rest too, where that is asked for."""

    @property
    def holds_masters(self) -> bool:
        """Whether it keeps fp32 masters beside the model's own weights; one that does not is given one copy."""

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        """The files of ``manifest`` in this format.

        Raises:
            UnsupportedError: a tensor has no form here.
        """
