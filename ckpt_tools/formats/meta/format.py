"""Meta's files of Llama, one for each rank of model parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import WriteOptions
    from ckpt_tools.stores.source import Source
    from ckpt_tools.trainers.saved import SavedCheckpoint


class MetaFormat(Format):
    """Reads all ``consolidated.NN.pth`` of a folder as one model. Writes weights into as many of them as there are
    ranks, and ``params.json``."""

    name = "meta"
    about = "Meta's consolidated.NN.pth of Llama, a file for each rank of model parallelism, with params.json"
    holds_optimizer = False
    is_weights_alone = True
    writing_options = ("world_size",)
    asks_model_type = True

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.meta.names import find_consolidated_files

        return bool(find_consolidated_files(source.files))

    def is_named(self, saved: SavedCheckpoint) -> bool:
        from ckpt_tools.formats.meta.names import find_consolidated_files

        return bool(find_consolidated_files(saved.files))

    read = import_when_called("meta.reader:read")

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.meta.names import PARAMS_FILE, find_consolidated_files

        return frozenset([*find_consolidated_files(source.files), *({PARAMS_FILE} & {*source.files})])

    layout = import_when_called("meta.writer:layout")

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.core.loading import escape_braces, quote_literal

        name, ranks = quote_literal(f"{path}/consolidated.00.pth"), ""
        if options.world_size > 1:
            name = f"f{quote_literal(f'{escape_braces(path)}/consolidated.{{rank:02d}}.pth')}"
            ranks = f"  # rank is 0 to {options.world_size - 1}"
        return f"import torch\nstate_dict = torch.load({name}, weights_only=True){ranks}"
