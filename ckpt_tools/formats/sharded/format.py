"""Files of ranks, each with its part of every tensor."""

from __future__ import annotations

from ckpt_tools.formats.base import Format, imported


class ShardedFormat(Format):
    """Reads the folder that holds the files of all ranks, or one with such a folder below it. Writes the whole training
    state, each weight once."""

    name = "sharded"
    about = "a torch file a rank with its part of each tensor (DTensor): verl, SkyRL, accelerate, FSDP2"
    holds_values = "always"
    reading_options = ("model_key", "optim_key")
    writing_options = ("world_size",)

    detect = imported("sharded.detection:looks_sharded")
    read = imported("sharded.reader:read")
    own_files = imported("sharded.reader:own_files")
    problem = imported("sharded.complete:problem")
    is_named = imported("sharded.complete:is_sharded")
    world_size_of = imported("sharded.complete:world_size")
    layout = imported("sharded.writer:layout")
    loading = imported("sharded.writer:loading")
