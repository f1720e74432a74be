"""Datasets of images and text, and the order of their samples."""

from .datasets import load_dataset

__all__ = ["load_dataset"]
