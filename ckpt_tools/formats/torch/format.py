"""Files of ``torch.save`` that hold a whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
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
        from ckpt_tools.formats.meta.names import find_consolidated_files
        from ckpt_tools.formats.torch.files import is_torch_file
        from ckpt_tools.trainers.names import are_rank_files

        are_others = are_rank_files(source.files) or bool(find_consolidated_files(source.files))
        return any(map(is_torch_file, source.files)) and not are_others

    read = import_when_called("torch.files:read")
    own_files = import_when_called("torch.files:own_files", takes=1)
    problem = import_when_called("torch.complete:problem")
    is_empty = import_when_called("torch.complete:is_empty")
    layout = import_when_called("torch.files:layout")
    loading = import_when_called("torch.files:loading")
