"""DCP to a manifest.

Tensors come from the index alone. Objects (``lr``, ``betas``, an epoch, a scheduler) are items of their own, a
kilobyte each, and are read and interpreted here, since they are the checkpoint's small print and not its bulk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.containers.torch_zip import open_archive
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.base import ReadOptions
from ckpt_tools.formats.dcp.folders import is_metadata, metadata_files
from ckpt_tools.formats.dcp.index import Index, read_index
from ckpt_tools.manifest import ByteRange, Manifest
from ckpt_tools.stores.base import Source
from ckpt_tools.tree import Leaves, manifest_of


@dataclass(frozen=True, slots=True)
class DcpReader:
    """Reads the folder that holds ``.metadata``, or a folder with one such folder below it, or with accelerate's two."""

    name: str = "dcp"

    def detect(self, source: Source) -> bool:
        return any(is_metadata(path) for path in source.files)

    def read_manifest(self, source: Source, options: ReadOptions) -> Manifest:
        index = _joined({path: read_index(source, path) for path in metadata_files(source.files)})
        objects = {fqn: _read_object(source, fqn, at) for fqn, at in index.objects.items()}
        return manifest_of(
            Leaves(index.paths, index.tensors, objects),
            format_name="dcp",
            model_key=options.model_key,
            optim_key=options.optim_key,
            world_size=index.num_ranks,
        )


def _joined(indexes: Mapping[str, Index]) -> Index:
    """The trees of several folders as one. Raises MalformedError where they share a name."""
    first, *others = indexes.values()
    for path, other in zip(list(indexes)[1:], others, strict=True):
        twice = first.paths.keys() & other.paths.keys()
        if twice:
            raise MalformedError(
                "another folder of the checkpoint has an entry of this name", path=path, key=min(twice)
            )
        first = Index(
            {**first.tensors, **other.tensors}, {**first.objects, **other.objects}, {**first.paths, **other.paths}
        )
    return first


def _read_object(source: Source, fqn: str, at: ByteRange) -> Any:
    def read(start: int, stop: int) -> bytes:
        return source.read(at.file, at.start + start, at.start + stop)

    return open_archive(read, at.stop - at.start, f"{at.file}: {fqn}").value
