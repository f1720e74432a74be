"""GGUF, the format of llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import WriteOptions
    from ckpt_tools.stores.source import Source


class GgufFormat(Format):
    """Reads one file, or a folder of one file or of all parts of one. Writes weights into one file of version 3, with
    the key-values of the GGUF that they came from."""

    name = "gguf"
    about = "a .gguf file of llama.cpp, or all its parts: tensors that are not quantized, and the key-values"
    holds_optimizer = False
    is_weights_alone = True
    kept_entries = ("gguf",)
    asks_model_type = True

    def detect(self, source: Source) -> bool:
        return any("/" not in path and path.endswith(".gguf") for path in source.files)

    read = import_when_called("gguf.files:read")

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.gguf.files import find_gguf_files

        return frozenset(find_gguf_files(source))

    is_empty = import_when_called("gguf.complete:is_empty")
    layout = import_when_called("gguf.files:layout")

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.core.loading import quote_literal

        name = path if options.file_name else f"{path}/{layout.files[0].path}"
        return f"from gguf import GGUFReader  # llama.cpp: --model FILE\nreader = GGUFReader({quote_literal(name)})"
