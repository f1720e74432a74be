"""A nested state dict and the manifest of it, both ways: DCP, torch files and safetensors share it."""
