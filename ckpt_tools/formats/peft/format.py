"""Folders of PEFT: an adapter alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import WriteOptions


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

    read = import_when_called("safetensors.files:read")
    layout = import_when_called("peft.files:layout")

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.core.loading import quote_literal

        return f"from peft import PeftModel\nmodel = PeftModel.from_pretrained(base_model, {quote_literal(path)})"
