"""Files of ``torch.save`` that hold a whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import ReadOptions, WriteOptions
    from ckpt_tools.stores.source import Source
    from ckpt_tools.trainers.saved import Saved


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

    def read(self, source: Source, options: ReadOptions) -> Manifest:
        from ckpt_tools.formats.torch.files import read

        return read(source, options)

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.torch.files import own_files

        return own_files(source)

    def problem(self, saved: Saved) -> str | None:
        from ckpt_tools.formats.torch.complete import problem

        return problem(saved)

    def is_empty(self, saved: Saved, path: str) -> bool:
        from ckpt_tools.formats.torch.complete import is_empty

        return is_empty(saved, path)

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        from ckpt_tools.formats.torch.files import layout

        return layout(manifest, options)

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.formats.torch.files import loading

        return loading(path, manifest, layout, options)
