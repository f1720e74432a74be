"""Megatron-Core's ``torch_dist``. ``docs/formats/megatron.md`` says what its files hold."""
