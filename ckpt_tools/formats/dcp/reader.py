"""DCP to a manifest.

Tensors come from the index alone. Objects (``lr``, ``betas``, an epoch, a scheduler) are items of their own, a
kilobyte each, and are read and interpreted here, since they are the checkpoint's small print and not its bulk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt_tools.containers.torch_zip import open_archive
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.base import ReadOptions
from ckpt_tools.formats.dcp.index import read_index
from ckpt_tools.manifest import ByteRange, Manifest
from ckpt_tools.stores.base import Source
from ckpt_tools.tree import Leaves, manifest_of

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class DcpReader:
    """Reads the folder that holds ``.metadata``, or a folder with one such folder below it."""

    name: str = "dcp"

    def detect(self, source: Source) -> bool:
        return any(_is_metadata(path) for path in source.files)

    def read_manifest(self, source: Source, options: ReadOptions) -> Manifest:
        index = read_index(source, _metadata_path(source))
        objects = {fqn: _read_object(source, fqn, at) for fqn, at in index.objects.items()}
        return manifest_of(
            Leaves(index.paths, index.tensors, objects),
            format_name="dcp",
            model_key=options.model_key,
            optim_key=options.optim_key,
            world_size=index.num_ranks,
        )


def _is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == METADATA


def _metadata_path(source: Source) -> str:
    found = [path for path in source.files if _is_metadata(path)]
    if METADATA in found or len(found) == 1:
        return METADATA if METADATA in found else found[0]
    folders = ", ".join(path.rpartition("/")[0] for path in found[:5])
    raise UnsupportedError(f"several checkpoints lie here ({folders}); name the folder of one")


def _read_object(source: Source, fqn: str, at: ByteRange) -> Any:
    def read(start: int, stop: int) -> bytes:
        return source.read(at.file, at.start + start, at.start + stop)

    return open_archive(read, at.stop - at.start, f"{at.file}: {fqn}").value
