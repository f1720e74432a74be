"""Built-in formats by name: the module of each, the signs of its files, and the endings of single files.

Start-up and detection take them from here, so that no format is imported before it is needed. Adding a format adds an
entry here and a folder in ``ckpt_tools/formats``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class BuiltinFormat(NamedTuple):
    """Place of a format: ``MODULE:OBJECT`` below ``ckpt_tools.formats``.

    ``signs`` are endings of file names; every source of the format has a file with one. ``suffixes`` are endings of
    destinations that are one file of the format.
    """

    object_path: str
    signs: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()


BUILTIN_FORMATS: Mapping[str, BuiltinFormat] = {
    "megatron": BuiltinFormat(
        "megatron.format:MegatronFormat", ("common.pt", "metadata.json", "_rng.pt", "distrib_optim.pt")
    ),
    "dcp": BuiltinFormat("dcp.format:DcpFormat", (".metadata",)),
    "orbax": BuiltinFormat("orbax.format:OrbaxFormat", ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")),
    "nanotron": BuiltinFormat("nanotron.format:NanotronFormat", ("checkpoint_metadata.json",)),
    "universal": BuiltinFormat("deepspeed.format:UniversalFormat", ("/fp32.pt",)),
    "deepspeed": BuiltinFormat("deepspeed.format:DeepSpeedFormat", ("_states.pt",)),
    "zero1": BuiltinFormat("deepspeed.format:ZERO1"),
    "zero2": BuiltinFormat("deepspeed.format:ZERO2"),
    "zero3": BuiltinFormat("deepspeed.format:ZERO3"),
    "safetensors": BuiltinFormat(
        "safetensors.format:SafetensorsFormat", (".safetensors", ".safetensors.index.json"), (".safetensors",)
    ),
    "meta": BuiltinFormat("meta.format:MetaFormat", (".pth",)),
    "sharded": BuiltinFormat("sharded.format:ShardedFormat", (".pt", ".pth", ".bin", ".ckpt")),
    "torch": BuiltinFormat(
        "torch.format:TorchFormat", (".pt", ".pth", ".bin", ".ckpt", ".bin.index.json"), (".pt", ".pth", ".bin")
    ),
    "peft": BuiltinFormat("peft.format:PeftFormat"),
    "gguf": BuiltinFormat("gguf.format:GgufFormat", (".gguf",), (".gguf",)),
    "npz": BuiltinFormat("npz.format:NpzFormat", (".npz",), (".npz",)),
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
