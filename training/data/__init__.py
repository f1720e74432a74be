"""Datasets of images and text, and the order of their samples."""
