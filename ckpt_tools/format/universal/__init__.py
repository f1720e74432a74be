"""DeepSpeed universal checkpoints."""
