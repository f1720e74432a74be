"""Formats by the ending of a file's name. Imports nothing."""

from __future__ import annotations

SINGLE_FILES = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".gguf": "gguf",
    ".npz": "npz",
}
"""Endings of destinations that are one file, and the format that each implies."""
