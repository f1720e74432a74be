"""``.npz`` of numpy: each member of the zip is one array."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import WriteOptions
    from ckpt_tools.stores.source import Source


class NpzFormat(Format):
    """Reads one file, or a folder of one. Writes weights as ``numpy.savez`` does."""

    name = "npz"
    about = "a .npz file of numpy or MLX: arrays that are not compressed"
    holds_optimizer = False
    is_weights_alone = True

    def detect(self, source: Source) -> bool:
        return any("/" not in path and path.endswith(".npz") for path in source.files)

    read = import_when_called("npz.files:read", takes=1)

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.npz.files import find_npz_file

        return frozenset([find_npz_file(source)])

    is_empty = import_when_called("npz.complete:is_empty")
    layout = import_when_called("npz.files:layout")

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.core.loading import quote_literal

        name = path if options.file_name else f"{path}/{layout.files[0].path}"
        return f"import numpy as np\narrays = np.load({quote_literal(name)})"
