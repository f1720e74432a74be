"""Native DeepSpeed ZeRO checkpoints."""
