"""Native DeepSpeed ZeRO checkpoints, written for any number of ranks."""
