"""Runs: which checkpoint a path or URL means, ``ls`` and ``prune``."""
