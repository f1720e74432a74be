"""Built-in formats by name: the signs of their files, and the endings of single files.

The command line takes them from here, because it imports no format at its start. Adding a format adds an entry here, a
class in ``ckpt_tools/formats/builtin.py`` and its modules in ``ckpt_tools/formats``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class FileEndings(NamedTuple):
    """``signs`` are endings of file names; every source of the format has a file with one. ``suffixes`` are endings of
    destinations that are one file of the format."""

    signs: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()


BUILTIN_FORMATS: Mapping[str, FileEndings] = {
    "megatron": FileEndings(("common.pt", "metadata.json", "_rng.pt", "distrib_optim.pt")),
    "dcp": FileEndings((".metadata",)),
    "orbax": FileEndings(("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")),
    "nanotron": FileEndings(("checkpoint_metadata.json",)),
    "universal": FileEndings(("/fp32.pt",)),
    "deepspeed": FileEndings(("_states.pt",)),
    "zero1": FileEndings(),
    "zero2": FileEndings(),
    "zero3": FileEndings(),
    "safetensors": FileEndings((".safetensors", ".safetensors.index.json"), (".safetensors",)),
    "meta": FileEndings((".pth",)),
    "sharded": FileEndings((".pt", ".pth", ".bin", ".ckpt", "metadata.pkl")),
    "torch": FileEndings((".pt", ".pth", ".bin", ".ckpt", ".bin.index.json"), (".pt", ".pth", ".bin")),
    "peft": FileEndings(),
    "gguf": FileEndings((".gguf",), (".gguf",)),
    "npz": FileEndings((".npz",), (".npz",)),
}
"""In the order of detection, the most telling first. A format without signs is read by its name alone."""

REPORTED_FORMAT_ALIASES = {"zero0": "deepspeed"}
"""Names that a checkpoint may report and that have no entry: DeepSpeed without ZeRO."""

FORMAT_BY_FILE_SUFFIX = {suffix: name for name, entry in BUILTIN_FORMATS.items() for suffix in entry.suffixes}
"""Endings of destinations that are one file, and the format that each implies."""

HEADER_ENTRY = "safetensors_metadata"
"""The entry of ``Manifest.extra`` that holds the ``__metadata__`` of a safetensors file: texts by name."""

DESCRIPTION_ENTRIES = (HEADER_ENTRY, "gguf")
"""Entries of formats that say how the tensors are meant."""
