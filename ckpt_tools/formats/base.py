"""The base class of every format, built in or of a plug-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ckpt_tools.errors import UnsupportedError

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import ReadOptions, WriteOptions
    from ckpt_tools.stores.source import Source
    from ckpt_tools.trainers.saved import SavedCheckpoint

READING_OPTIONS = ("tag", "model_key", "optim_key")
"""The options that a format may take for reading, by their names in ``ReadOptions``."""

WRITING_OPTIONS = ("tag", "model_key", "optim_key", "world_size", "max_shard_size", "config", "quantize")
"""The options that a format may take for writing; ``max_shard_size`` arrives as ``WriteOptions.max_shard_bytes``.
``config`` is for folders that ``from_pretrained`` opens: ``config.json`` and the like are copied into them."""


class DeltaFolderError(UnsupportedError):
    """A folder holds changes of an earlier version of a model, which is another folder."""


class Format:
    """A format of checkpoints: headers to a manifest, or a manifest to a layout of files.

    It is read if ``read`` is overridden, and written if ``layout`` is. Neither reads the bytes of a tensor. Modules
    that take time to import are imported inside the methods.
    """

    name: str = ""
    """What ``--to`` and ``--from`` take."""
    about: str = ""
    """Description in the table of ``ckpt-tools formats``."""
    holds_optimizer: bool = True
    """Whether the whole state is written by default; otherwise weights alone, unless ``state="all"`` asks for more."""
    holds_masters: bool = False
    """Whether fp32 masters are kept beside the model's own weights; otherwise each weight is written once."""
    is_weights_alone: bool = False
    """Whether only a model's weights can be written, so that ``state="all"`` is refused."""
    reading_options: tuple[str, ...] = ()
    """The part of ``READING_OPTIONS`` that the format takes; any other option of them is an error."""
    writing_options: tuple[str, ...] = ()
    """The part of ``WRITING_OPTIONS`` that the format takes; any other option of them is an error."""
    holds_values: Literal["never", "with state", "always"] = "never"
    """When ``Manifest.values`` have a place; a conversion leaves them out or refuses them where they have none."""
    kept_entries: tuple[str, ...] = ()
    """Top-level names of ``Manifest.extra`` that are written with weights alone, because they describe the model."""
    keeps_every_dtype: bool = False
    """Whether dtypes that torch does not have, such as float6, have a place; otherwise they are refused."""
    asks_model_type: bool = False
    """Whether ``layout`` uses ``WriteOptions.model_config`` or ``model_type``, for which ``config.json`` is read."""

    asks_adapter_config: bool = False
    """Whether ``layout`` uses ``WriteOptions.adapter_config``. No other file that describes a model is then written."""

    @property
    def reads(self) -> bool:
        return type(self).read is not Format.read

    @property
    def writes(self) -> bool:
        return type(self).layout is not Format.layout

    @property
    def holds(self) -> str:
        """Text of the column "holds" in the table of formats. A format that is only read overrides it."""
        if self.is_weights_alone:
            return "weights"
        if not self.writes:
            return ""
        return "whole state" if self.holds_optimizer else "weights; whole state on request"

    def detect(self, source: Source) -> bool:
        """Whether ``source`` looks like this format; cheap, and never an error."""
        return False

    def read(self, source: Source, options: ReadOptions) -> Manifest:
        """The checkpoint as a manifest, from headers alone.

        Raises:
            FormatError: it cannot be read. SourceNotFoundError: there is no such tag. UnsafeError: it names files
            outside.
        """
        raise NotImplementedError

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        """The files of ``source`` that belong to the checkpoint ``manifest``, which was read from it.

        By default those that hold tensors. A format with more files, such as an index, adds them: ``--overwrite``
        refuses to replace a folder that holds any other file. Empty if the checkpoint is in a folder below ``source``.
        Raises as ``read``.
        """
        return manifest.stored_files

    def served(self, source: Source, manifest: Manifest) -> Source:
        """``source`` with one more file for each tensor that is not a range of a stored file because its elements must
        be decoded. The file has the elements row-major, decoded as they are read. The shards of ``manifest`` name these
        files."""
        return source

    def reading_options_of(self, manifest: Manifest) -> tuple[str, ...]:
        """The part of ``reading_options`` that has an effect on ``manifest``, which was read from this format."""
        return self.reading_options

    def problem(self, saved: SavedCheckpoint) -> str | None:
        """Why a checkpoint of this format in a run is not complete, from names and headers; None if it looks complete.

        Raises:
            CkptError: a header cannot be read.
        """
        return None

    def is_empty(self, saved: SavedCheckpoint, path: str) -> bool:
        """True if a file of a checkpoint in a run has an ending of this format, and its header lists no tensor.

        Raises:
            CkptError: the header cannot be read.
        """
        return False

    def is_named(self, saved: SavedCheckpoint) -> bool:
        """Whether names of files tell that a checkpoint in a run is in this format; endings of single files apart."""
        return False

    def world_size_of(self, saved: SavedCheckpoint) -> int:
        """The number of ranks that wrote a checkpoint in a run, by names of files; 0 if they tell none."""
        return 0

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        """The files of ``manifest`` in this format.

        Raises:
            UnsupportedError: a tensor has no form here.
        """
        raise NotImplementedError

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        """Python code that loads the files of ``layout`` with the framework that the format is for: at most five lines.
        ``path`` is the local file or folder, ``manifest`` and ``options`` are those that ``layout`` was made from. The
        code takes ``model`` and ``optimizer`` as defined. What is not Python, such as an option of a command, is a
        comment."""
        from ckpt_tools.messages.loading_code import make_open_snippet

        return make_open_snippet(path)
