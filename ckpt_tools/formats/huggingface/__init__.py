"""Folders of transformers and accelerate, in which weights and optimizer are in files of their own."""
