"""Native DeepSpeed ZeRO checkpoints."""

from ckpt_tools.formats.deepspeed.reader import DeepSpeedReader

__all__ = ["DeepSpeedReader"]
