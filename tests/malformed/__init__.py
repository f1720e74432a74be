"""Damaged and hostile checkpoints by class, made from genuine small ones; ``tests/test_malformed.py`` reads them."""
