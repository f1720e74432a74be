"""Native DeepSpeed ZeRO checkpoints, written for any number of ranks."""

from ckpt_tools.format.zero_writer.writer import ZeroWriter

__all__ = ["ZeroWriter"]
