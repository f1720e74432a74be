"""Files of ``torch.save`` that hold a whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, imported

if TYPE_CHECKING:
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.stores.source import Source


class TorchFormat(Format):
    """Reads a file, or a folder with one or with an index. Writes a model's state dict, in one file or in shards with
    their index, or with ``state="all"`` in one file the tree of a source in this format, and of any other the tree
    ``{"model", "optim", ...}`` of ``get_state_dict``."""

    name = "torch"
    about = "a full state dict of torch.save: .pt, .pth, .bin, or .bin shards with their index"
    holds_optimizer = False
    holds_values = "always"
    reading_options = ("model_key", "optim_key")
    writing_options = ("max_shard_size", "config")

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.meta.names import files_of
        from ckpt_tools.formats.torch.files import is_own
        from ckpt_tools.trainers.names import are_those_of_ranks

        are_others = are_those_of_ranks(source.files) or bool(files_of(source.files))
        return any(map(is_own, source.files)) and not are_others

    read = imported("torch.files:read")

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.torch.files import own_files

        return own_files(source)

    problem = imported("torch.complete:problem")
    is_empty = imported("torch.complete:is_empty")
    layout = imported("torch.files:layout")
    loading = imported("torch.files:loading")
