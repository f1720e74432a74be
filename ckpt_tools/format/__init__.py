"""Checkpoint formats: each a reader, a writer, or both."""
