"""Files of ``torch.save`` that hold a whole state."""

from __future__ import annotations

from contextlib import suppress
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
    their index, or with ``state="all"`` the tree ``{"model", "optim", ...}`` of ``get_state_dict`` in one file."""

    name = "torch"
    about = "a full state dict of torch.save: .pt, .pth, .bin, or .bin shards with their index"
    holds_optimizer = False
    reading_options = ("model_key", "optim_key")
    writing_options = ("max_shard_size", "config")

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.torch.files import is_own
        from ckpt_tools.trainers.names import are_those_of_ranks

        return any(map(is_own, source.files)) and not are_those_of_ranks(source.files)

    def read(self, source: Source, options: ReadOptions) -> Manifest:
        from ckpt_tools.formats.torch.files import read

        return read(source, options)

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.torch.files import own_files

        return own_files(source)

    def problem(self, saved: Saved) -> str | None:
        from ckpt_tools.errors import UnsupportedError
        from ckpt_tools.serialization.zip_archive import read_directory

        for path in saved.files:
            if path.endswith((".pt", ".pth", ".bin", ".ckpt")) and "/zero/" not in f"/{path}":
                read, size, _ = saved.part(path)
                # A zip with no directory at its end is cut off; other files say nothing.
                with suppress(UnsupportedError):
                    directory = read_directory(read, size, path, tail_bytes=4096)
                    if directory is None and read(0, min(4, size)).startswith(b"PK"):
                        return f"{path} has no end: it is cut off"
        return None

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        from ckpt_tools.formats.torch.files import layout

        return layout(manifest, options)
