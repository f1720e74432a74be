"""What a format must be able to do: read headers into a manifest, or lay a manifest out in files.

No reader knows a writer. Both are pure but for the header reads of a reader, and neither touches a tensor's bytes.

``Reader`` and ``Writer`` are what the rest of the package asks for. ``ReadableFormat`` and ``WritableFormat`` are the
same with defaults, for formats that plug-ins add; a format that is read and written inherits both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import ReadOptions, WriteOptions
    from ckpt_tools.stores.source import Source


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
        """The files of ``source`` that are those of the checkpoint ``manifest``, which was read from it.

        They are named as the format names its files, or are named by such a file. None where the checkpoint does not
        lie in ``source`` itself, but in a folder below it. Raises as ``read_manifest``.
        """


@runtime_checkable
class Serving(Protocol):
    """A reader of tensors that are no ranges of stored files, because their elements have to be decoded."""

    def served(self, source: Source, manifest: Manifest) -> Source:
        """``source`` with a file more for each such tensor: its elements, row-major, decoded as they are read. The
        shards of ``manifest``, which was read from ``source``, name these files."""


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


@runtime_checkable
class KeepsEntries(Protocol):
    """A writer of weights that takes some entries of the checkpoint along with them."""

    @property
    def kept_entries(self) -> tuple[str, ...]:
        """Their names at the top of ``Manifest.extra``: what says something of the model itself."""


@runtime_checkable
class AsksModelType(Protocol):
    """A writer that is told ``WriteOptions.model_type``, which takes a look for the source's ``config.json``."""

    @property
    def asks_model_type(self) -> bool:
        """True."""


def kept_entries(writer: Writer) -> tuple[str, ...]:
    """The entries that ``writer`` writes with weights alone."""
    return writer.kept_entries if isinstance(writer, KeepsEntries) else ()


READING_OPTIONS = ("tag", "model_key", "optim_key")
"""The options that a reader may take, by their names in ``ReadOptions``."""

WRITING_OPTIONS = ("tag", "model_key", "optim_key", "world_size", "max_shard_size")
"""The options that a writer may take; ``max_shard_size`` arrives as ``WriteOptions.max_shard_bytes``."""


class Format:
    """What ``ckpt-tools formats`` says of a format. ``name`` is the one that ``--to`` and ``--from`` take."""

    name: str
    about: str
    holds_optimizer: bool = True


class ReadableFormat(Format, ABC):
    """A ``Reader`` with defaults."""

    reading_options: tuple[str, ...] = ()
    """Those of ``READING_OPTIONS`` that mean something here. The user gets an error for any other."""

    @abstractmethod
    def detect(self, source: Source) -> bool:
        """As ``Reader.detect``."""

    @abstractmethod
    def read_manifest(self, source: Source, options: ReadOptions) -> Manifest:
        """As ``Reader.read_manifest``."""

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        """As ``Reader.own_files``: the files that hold tensors. A format that has more files, such as an index, adds
        them; ``--overwrite`` refuses to replace a folder that holds any file not named here."""
        return manifest.files - manifest.literals.keys()


class WritableFormat(Format, ABC):
    """A ``Writer`` with defaults: of whole states, with one copy of each weight."""

    holds_masters: bool = False
    writing_options: tuple[str, ...] = ()
    """Those of ``WRITING_OPTIONS`` that mean something here. The user gets an error for any other."""

    @abstractmethod
    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        """As ``Writer.layout``."""
