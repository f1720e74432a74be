"""What ckpt-tools reads of a source, in full, to be compared bit by bit."""

from pathlib import Path

import torch

from ckpt_tools.core.manifest import Kind, Manifest, StateKey
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.runs.opening import open_checkpoint
from tests.support.manifests import read_bytes

Contents = dict[StateKey, tuple[str, tuple[int, ...], bytes]]
"""Dtype, shape and bytes of each tensor."""


WHOLE = ReadOptions()


def contents(path: Path, options: ReadOptions = WHOLE) -> tuple[Manifest, Contents]:
    """The manifest of ``path``, and every tensor of it but the user's own, tied ones under each of their names."""
    opened = open_checkpoint(path, options)
    source, manifest = opened.source, opened.manifest
    entries = {key: entry for key, entry in manifest.tensors.items() if entry.kind is not Kind.EXTRA}
    for alias, owner in manifest.aliases.items():
        entries |= {StateKey(alias, key.slot): entry for key, entry in entries.items() if key.fqn == owner}
    found: Contents = {}
    for key, entry in entries.items():
        found[key] = (entry.dtype.value, tuple(entry.shape), read_bytes(source.store, entry))
    return manifest, found


def of_tensor(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """The same of a tensor of torch."""
    whole = tensor.detach().cpu().contiguous()
    data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    return str(whole.dtype).removeprefix("torch."), tuple(whole.shape), data
