"""DeepSpeed universal checkpoints."""

from ckpt_tools.format.universal.reader import UniversalReader
from ckpt_tools.format.universal.writer import UniversalWriter

__all__ = ["UniversalReader", "UniversalWriter"]
