"""safetensors: one file, or Hugging Face shards with their index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.formats.base import Format, imported

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
        from ckpt_tools.formats.safetensors.files import is_own
        from ckpt_tools.trainers.torch_checkpointing import is_managed

        return any(map(is_own, source.files)) and not is_managed(source)

    read = imported("safetensors.files:read")

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.safetensors.files import own_files

        return own_files(source)

    def reading_options_of(self, manifest: Manifest) -> tuple[str, ...]:
        """The keys mean something in a file with whole state alone."""
        return () if manifest.tree is None else self.reading_options

    problem = imported("safetensors.complete:problem")
    is_empty = imported("safetensors.complete:is_empty")
    layout = imported("safetensors.files:layout")
    loading = imported("safetensors.files:loading")
