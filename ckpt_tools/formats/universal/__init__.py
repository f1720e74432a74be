"""DeepSpeed universal checkpoints."""

from ckpt_tools.formats.universal.reader import UniversalReader
from ckpt_tools.formats.universal.writer import UniversalWriter

__all__ = ["UniversalReader", "UniversalWriter"]
