"""Checkpoints of Orbax (JAX)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format

if TYPE_CHECKING:
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import ReadOptions
    from ckpt_tools.stores.source import Source
    from ckpt_tools.trainers.saved import Saved


class OrbaxFormat(Format):
    """Reads a local folder: one tree, or items with trees among them. tensorstore reads the arrays."""

    name = "orbax"
    about = "Orbax (JAX): a folder with _METADATA and arrays of OCDBT or Zarr; needs the extra ckpt-tools[orbax]"
    reading_options = ("model_key", "optim_key")
    holds = "weights, and the moments of Adam"

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.orbax.names import CHECKPOINT, MANIFEST, TREE

        return any(path.rpartition("/")[2] in (TREE, CHECKPOINT, MANIFEST) for path in source.files)

    def read(self, source: Source, options: ReadOptions) -> Manifest:
        from ckpt_tools.formats.orbax.reader import read

        return read(source, options)

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.orbax.reader import own_files

        return own_files(source)

    def served(self, source: Source, manifest: Manifest) -> Source:
        from ckpt_tools.formats.orbax.reader import served

        return served(source, manifest)

    def problem(self, saved: Saved) -> str | None:
        from ckpt_tools.formats.orbax.complete import problem

        return problem(saved)

    def is_named(self, saved: Saved) -> bool:
        from ckpt_tools.formats.orbax.complete import is_orbax

        return is_orbax(saved)
