"""ckpt-tools."""
