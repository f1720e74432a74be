"""Models: their architectures, and the ``config.json`` that describes one in a checkpoint."""
