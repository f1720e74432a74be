"""A checkpoint that was opened, with the files around it that say what its model is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions
from ckpt_tools.trainers.transformers import ADAPTER_CONFIG_FILE, CONFIG_FILE

if TYPE_CHECKING:
    from ckpt_tools.reading.companions import Companion
    from ckpt_tools.reading.model_files import ModelFiles


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose headers were read: the shards of ``manifest`` are ranges of the files of ``source``.

    ``url`` is where it is; a name in a run (``RUN@latest``) is resolved. ``config_folder`` is the folder with the files
    of its model that the user names; by default they are looked for around the weights, when they are first needed,
    and once.
    """

    url: str | Path
    source: Source
    manifest: Manifest
    storage_options: StorageOptions = None
    config_folder: str | Path | None = None
    _found_files: dict[frozenset[str], ModelFiles | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def find_model_files(self, manifest: Manifest | None = None) -> ModelFiles | None:
        """Files in ``config_folder``, else in the nearest folder around the weights of ``manifest``, which is that of
        this checkpoint or what options made of it.

        Raises:
            UsageError: ``config_folder`` has no ``config.json`` of a model. SourceNotFoundError: there is no such
            folder. CkptError: a file that was found cannot be read.
        """
        from ckpt_tools.reading.companions import list_weight_files
        from ckpt_tools.reading.model_files import choose_model_files

        manifest = self.manifest if manifest is None else manifest
        # A selection may leave weights in one of several folders, each with a config.json of its own.
        weight_files = list_weight_files(manifest)
        own_files = weight_files.intersection(self.source.files)  # without those of other sources
        weight_files = own_files or weight_files
        if weight_files not in self._found_files:
            companions = self._iter_companions(CONFIG_FILE, weight_files)
            self._found_files[weight_files] = choose_model_files(companions, self.source, manifest, self.config_folder)
        return self._found_files[weight_files]

    def find_config(self) -> Mapping[str, Any] | None:
        """The content of the ``config.json`` that ``find_model_files`` finds; None if there is none. Raises as that."""
        model_files = self.find_model_files()
        return None if model_files is None else model_files.config

    def read_adapter_config(self) -> bytes:
        """The content of ``adapter_config.json``. Raises UsageError if there is none; CkptError if it cannot be
        read."""
        from ckpt_tools.reading.companions import list_weight_files

        companion = next(self._iter_companions(ADAPTER_CONFIG_FILE, list_weight_files(self.manifest)), None)
        if companion is None:
            folder = self.config_folder
            where = f"in {format_option('config', folder)} or " if folder is not None else ""
            raise UsageError(
                f"there is no {ADAPTER_CONFIG_FILE} {where}beside {self.url}; name the folder that has it with "
                f"{format_option('config')}"
            )
        return companion.read()

    def _iter_companions(self, name: str, weight_files: Collection[str]) -> Iterator[Companion]:
        from ckpt_tools.reading.companions import iter_companions

        return iter_companions(self.url, self.source, weight_files, name, self.config_folder, self.storage_options)
