"""Megatron-Core's ``torch_dist``. ``docs/formats/megatron.md`` describes its files."""
