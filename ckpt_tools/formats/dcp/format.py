"""PyTorch Distributed Checkpoint (DCP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import WriteOptions
    from ckpt_tools.stores.source import Source


class DcpFormat(Format):
    """Reads the folder of ``.metadata``, one with such a folder below it, or with accelerate's two. Writes the whole
    training state, each weight once."""

    name = "dcp"
    about = "PyTorch Distributed Checkpoint: a .metadata file and __R_N.distcp files (FSDP2 and others)"
    holds_values = "always"
    reading_options = ("model_key", "optim_key")
    writing_options = ("model_key", "optim_key", "world_size")

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.dcp.names import is_metadata, is_rank_index
        from ckpt_tools.formats.megatron.names import find_torch_dist_folders

        found = any(is_metadata(path) or is_rank_index(path) for path in source.files)
        return found and not find_torch_dist_folders(source)

    read = import_when_called("dcp.reader:read")

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.dcp.folders import find_own_files

        found = find_own_files(source.files, () if manifest.trainer is None else manifest.trainer.parts)
        return found | (manifest.files & source.files.keys()) if found else found

    problem = import_when_called("dcp.complete:problem")
    is_named = import_when_called("dcp.complete:is_dcp")
    world_size_of = import_when_called("dcp.complete:world_size")
    layout = import_when_called("dcp.writer:layout")

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.formats.dcp.loading import build_loading_code
        from ckpt_tools.formats.state_dict.build import choose_tree

        tree = layout.tree or choose_tree(manifest, model_key=options.model_key, optim_key=options.optim_key)
        return build_loading_code(path, manifest, tree)
