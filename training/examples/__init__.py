"""Scripts that teach: FSDP2 and DeepSpeed on Ray Train by themselves, and ckpt-tools in a training loop of your own."""
