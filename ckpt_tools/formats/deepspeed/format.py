"""DeepSpeed: native checkpoints of each ZeRO stage, and universal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.core.wording import format_count
from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import WriteOptions
    from ckpt_tools.stores.source import Source


class UniversalFormat(Format):
    """Reads and writes a save directory with ``latest_universal``; reads a tag folder with ``zero/`` in it too."""

    name = "universal"
    about = "DeepSpeed universal: a tag folder with zero/<parameter>/fp32.pt, ..., and latest_universal"
    holds_masters = True
    reading_options = writing_options = ("tag",)

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.deepspeed.names import is_universal_source

        return is_universal_source(source.files)

    read = import_when_called("deepspeed.universal.reader:read")
    own_files = import_when_called("deepspeed.universal.reader:own_files")
    problem = import_when_called("deepspeed.complete:find_universal_problem")
    is_named = import_when_called("deepspeed.complete:has_universal_files")
    layout = import_when_called("deepspeed.universal.writer:layout")

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        config = '# engine: deepspeed.initialize, ZeRO stage 1, 2 or 3, and "checkpoint": {"load_universal": true}'
        return f"{config}\n{_make_load_checkpoint_code(path, layout)}"


def _make_load_checkpoint_code(path: str, layout: Layout) -> str:
    """With the arguments that the notes ask for."""
    from ckpt_tools.core.loading import quote_literal
    from ckpt_tools.formats.deepspeed.common.written_extras import must_skip_scheduler

    arguments = [quote_literal(path), f"tag={quote_literal(layout.files[0].path.partition('/')[0])}"]
    if any("load_optimizer_states=False" in note.why for note in layout.notes):
        arguments.append("load_optimizer_states=False")
    if must_skip_scheduler(layout.notes):
        arguments.append("load_lr_scheduler_states=False")
    return f"_, client_state = engine.load_checkpoint({', '.join(arguments)})"


class DeepSpeedFormat(Format):
    """Reads native checkpoints of every ZeRO stage and of none, as ``save_checkpoint`` writes them: a save directory
    with ``latest``, or a tag folder."""

    name = "deepspeed"
    about = "DeepSpeed in any stage, also without ZeRO; the stage is detected"
    holds = "whole state"
    holds_masters = True
    reading_options = ("tag",)

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.deepspeed.names import find_tag_folders

        return bool(find_tag_folders(source.files))

    read = import_when_called("deepspeed.zero_reader.reader:read")
    own_files = import_when_called("deepspeed.zero_reader.reader:own_files")
    problem = import_when_called("deepspeed.complete:find_native_problem")
    is_named = import_when_called("deepspeed.complete:has_native_files")
    world_size_of = import_when_called("deepspeed.complete:count_ranks")


class ZeroFormat(DeepSpeedFormat):
    """Writes what ``load_checkpoint`` resumes in ZeRO ``stage`` 1, 2 or 3; reads every stage."""

    writing_options = ("tag", "world_size")

    def __init__(self, stage: int) -> None:
        self.stage, self.name = stage, f"zero{stage}"
        files = ": a tag folder of *_model_states.pt and *_optim_states.pt, and the file latest" if stage == 1 else ""
        self.about = f"DeepSpeed ZeRO-{stage}{files}"

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        from ckpt_tools.formats.deepspeed.zero_writer.writer import layout

        return layout(manifest, options, self.stage)

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        ranks = format_count(options.world_size, "rank")
        code = _make_load_checkpoint_code(path, layout)
        return f"# engine: deepspeed.initialize, ZeRO stage {self.stage}, on {ranks}\n{code}"


ZERO1, ZERO2, ZERO3 = map(ZeroFormat, (1, 2, 3))
