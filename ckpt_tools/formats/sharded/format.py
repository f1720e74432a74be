"""Files of ranks, each with its part of every tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import ReadOptions, WriteOptions
    from ckpt_tools.stores.source import Source
    from ckpt_tools.trainers.saved import Saved


class ShardedFormat(Format):
    """Reads the folder that holds the files of all ranks, or one with such a folder below it. Writes the whole training
    state, each weight once."""

    name = "sharded"
    about = "a torch file a rank with its part of each tensor (DTensor): verl, SkyRL, accelerate, FSDP2"
    holds_values = "always"
    reading_options = ("model_key", "optim_key")
    writing_options = ("world_size",)

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.sharded.detection import looks_sharded

        return looks_sharded(source)

    def read(self, source: Source, options: ReadOptions) -> Manifest:
        from ckpt_tools.formats.sharded.reader import read

        return read(source, options)

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.sharded.reader import own_files

        return own_files(source, manifest)

    def problem(self, saved: Saved) -> str | None:
        from ckpt_tools.formats.sharded.complete import problem

        return problem(saved)

    def is_named(self, saved: Saved) -> bool:
        from ckpt_tools.formats.sharded.complete import is_sharded

        return is_sharded(saved)

    def world_size_of(self, saved: Saved) -> int:
        from ckpt_tools.formats.sharded.complete import world_size

        return world_size(saved)

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        from ckpt_tools.formats.sharded.writer import layout

        return layout(manifest, options)

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.formats.sharded.writer import loading

        return loading(path, manifest, layout, options)
