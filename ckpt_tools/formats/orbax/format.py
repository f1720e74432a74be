"""Checkpoints of Orbax (JAX)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, imported

if TYPE_CHECKING:
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.stores.source import Source


class OrbaxFormat(Format):
    """Reads a local folder: one tree, or items with trees among them. tensorstore reads the arrays."""

    name = "orbax"
    about = "Orbax (JAX): a folder with _METADATA and arrays of OCDBT or Zarr; needs the extra ckpt-tools[orbax]"
    reading_options = ("model_key", "optim_key")
    holds = "weights, and the moments of Adam"

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.orbax.names import CHECKPOINT, MANIFEST, TREE

        return any(path.rpartition("/")[2] in (TREE, CHECKPOINT, MANIFEST) for path in source.files)

    read = imported("orbax.reader:read")

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.orbax.reader import own_files

        return own_files(source)

    served = imported("orbax.reader:served")
    problem = imported("orbax.complete:problem")
    is_named = imported("orbax.complete:is_orbax")
