"""Pickles as data: opcodes interpreted into inert values."""
