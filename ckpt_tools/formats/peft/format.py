"""Folders of PEFT: an adapter alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.core.manifest import HEADER_ENTRY
from ckpt_tools.formats.base import Format

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import ReadOptions, WriteOptions
    from ckpt_tools.stores.source import Source


class PeftFormat(Format):
    """Writes the adapter of a training state as PEFT's ``save_pretrained`` does. Such a folder is safetensors, and is
    detected as that."""

    name = "peft"
    about = "a folder for PeftModel.from_pretrained: the adapter alone, out of a training state"
    holds_optimizer = False
    is_weights_alone = True
    writing_options = ("config",)
    asks_adapter_config = True
    kept_entries = (HEADER_ENTRY,)

    def read(self, source: Source, options: ReadOptions) -> Manifest:
        from ckpt_tools.formats.safetensors.files import read

        return read(source, options)

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        from ckpt_tools.formats.peft.files import layout

        return layout(manifest, options)

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.core.loading import quoted

        return f"from peft import PeftModel\nmodel = PeftModel.from_pretrained(base_model, {quoted(path)})"
