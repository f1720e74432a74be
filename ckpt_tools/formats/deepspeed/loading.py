"""Code that loads a checkpoint with DeepSpeed's engine."""

from __future__ import annotations

from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.formats.deepspeed.common.scheduler_state import must_skip_scheduler
from ckpt_tools.messages.loading_code import quote_literal
from ckpt_tools.messages.wording import format_count


def load_universal(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    config = '# engine: deepspeed.initialize, ZeRO stage 1, 2 or 3, and "checkpoint": {"load_universal": true}'
    return f"{config}\n{_make_load_checkpoint_code(path, layout)}"


def load_zero(path: str, layout: Layout, options: WriteOptions, stage: int) -> str:
    ranks = format_count(options.world_size, "rank")
    code = _make_load_checkpoint_code(path, layout)
    return f"# engine: deepspeed.initialize, ZeRO stage {stage}, on {ranks}\n{code}"


def _make_load_checkpoint_code(path: str, layout: Layout) -> str:
    """A call of ``load_checkpoint`` with the arguments that the notes of ``layout`` ask for."""
    arguments = [quote_literal(path), f"tag={quote_literal(layout.files[0].path.partition('/')[0])}"]
    if any("load_optimizer_states=False" in note.why for note in layout.notes):
        arguments.append("load_optimizer_states=False")
    if must_skip_scheduler(layout.notes):
        arguments.append("load_lr_scheduler_states=False")
    return f"_, client_state = engine.load_checkpoint({', '.join(arguments)})"
