"""safetensors: one file, or Hugging Face shards with their index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.stores.source import Source


class SafetensorsFormat(Format):
    """Reads a file, or a folder with an index or a complete set of shards, whole tensors or pieces in each. Writes a
    model, or with ``state="all"`` the whole state in tensors and the metadata of the first file."""

    name = "safetensors"
    about = "one .safetensors file, or Hugging Face shards with their index"
    holds_optimizer = False
    holds_values = "with state"
    reading_options = ("model_key", "optim_key")
    writing_options = ("max_shard_size", "config")
    kept_entries = (HEADER_ENTRY,)
    keeps_every_dtype = True

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.safetensors.files import is_safetensors_file
        from ckpt_tools.trainers.torch_checkpointing import has_index

        return any(map(is_safetensors_file, source.files)) and not has_index(source)

    read = import_when_called("safetensors.files:read")
    own_files = import_when_called("safetensors.files:own_files", takes=1)

    def reading_options_of(self, manifest: Manifest) -> tuple[str, ...]:
        """The keys mean something in a file with whole state alone."""
        return () if manifest.tree is None else self.reading_options

    problem = import_when_called("safetensors.complete:problem")
    is_empty = import_when_called("safetensors.complete:is_empty")
    layout = import_when_called("safetensors.files:layout")
    loading = import_when_called("safetensors.files:loading")
