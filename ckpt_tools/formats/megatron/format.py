"""Megatron-Core ``torch_dist``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import WriteOptions
    from ckpt_tools.stores.source import Source


class MegatronFormat(Format):
    """Reads an ``iter_`` folder, the folder of the run around it, or the folder of a NeMo 2 checkpoint. Writes the
    whole training state, as the distributed optimizer keeps it if it is fully reshardable."""

    name = "megatron"
    about = "Megatron-Core torch_dist: an iter_N folder of .metadata, common.pt and __R_N.distcp files"
    holds_masters = True
    writing_options = ("world_size",)

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.megatron.names import find_torch_dist_folders, is_legacy_file

        return bool(find_torch_dist_folders(source)) or any(map(is_legacy_file, source.files))

    read = import_when_called("megatron.reader:read", takes=1)
    own_files = import_when_called("megatron.reader:own_files", takes=1)
    problem = import_when_called("megatron.complete:problem")
    is_named = import_when_called("megatron.complete:is_megatron")
    layout = import_when_called("megatron.writer:layout")

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.core.loading import quote_literal

        folder = layout.files[0].path.partition("/")[0]
        return (
            f"from megatron.core import dist_checkpointing  # Megatron-LM: --load DIR --ckpt-format torch_dist\n"
            f"state = dist_checkpointing.load(sharded_state_dict, {quote_literal(f'{path}/{folder}')})"
        )
