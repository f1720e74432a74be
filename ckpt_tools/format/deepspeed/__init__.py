"""Native DeepSpeed ZeRO checkpoints."""

from ckpt_tools.format.deepspeed.reader import DeepSpeedReader

__all__ = ["DeepSpeedReader"]
