"""Files of ranks, each with its part of every tensor."""

from __future__ import annotations

from ckpt_tools.formats.base import Format, import_when_called


class ShardedFormat(Format):
    """Reads the folder that holds the files of all ranks, or one with such a folder below it. Writes the whole training
    state, each weight once."""

    name = "sharded"
    about = "a torch file a rank with its part of each tensor (DTensor): verl, SkyRL, accelerate, FSDP2"
    holds_values = "always"
    reading_options = ("model_key", "optim_key")
    writing_options = ("world_size",)

    detect = import_when_called("sharded.detection:looks_sharded")
    read = import_when_called("sharded.reader:read")
    own_files = import_when_called("sharded.reader:own_files")
    problem = import_when_called("sharded.complete:problem")
    is_named = import_when_called("sharded.complete:is_sharded")
    world_size_of = import_when_called("sharded.complete:world_size")
    layout = import_when_called("sharded.writer:layout")
    loading = import_when_called("sharded.writer:loading")
