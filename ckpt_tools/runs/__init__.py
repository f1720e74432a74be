"""Runs: the checkpoint that a path or URL means, ``ls``, ``RUN@latest`` and ``prune``."""
