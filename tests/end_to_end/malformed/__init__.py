"""Damaged and hostile checkpoints by class, made from genuine small ones, for ``test_malformed.py``."""
