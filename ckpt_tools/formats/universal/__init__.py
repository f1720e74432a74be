"""DeepSpeed universal checkpoints."""

from ckpt_tools.formats.universal.reader import UniversalReader

__all__ = ["UniversalReader"]
