"""Scripts that show FSDP2 and DeepSpeed on Ray Train, and ckpt-tools in a training loop of your own."""
