"""Checkpoints of Orbax (JAX)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source


class OrbaxFormat(Format):
    """Reads a local folder: one tree, or items with trees among them. tensorstore reads the arrays."""

    name = "orbax"
    about = "Orbax (JAX): a folder with _METADATA and arrays of OCDBT or Zarr; needs the extra ckpt-tools[orbax]"
    reading_options = ("model_key", "optim_key")
    holds = "weights, and the moments of Adam"

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.orbax.names import CHECKPOINT_FILE, OCDBT_MANIFEST, TREE_FILE

        return any(path.rpartition("/")[2] in (TREE_FILE, CHECKPOINT_FILE, OCDBT_MANIFEST) for path in source.files)

    read = import_when_called("orbax.reader:read")
    own_files = import_when_called("orbax.reader:own_files", takes=1)
    served = import_when_called("orbax.reader:served")
    problem = import_when_called("orbax.complete:problem")
    is_named = import_when_called("orbax.complete:is_orbax")
