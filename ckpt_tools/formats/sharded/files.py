"""The files of ranks as a format. Whatever reads them is imported when there are any: any ``.pt`` could be one."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.formats.sharded.detection import looks_sharded
from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True)
class ShardedReader:
    """Reads the folder that holds the files of all ranks, or one with such a folder below it."""

    name: str = "sharded"

    def detect(self, source: Source) -> bool:
        return looks_sharded(source)

    def read_manifest(self, source: Source, options: ReadOptions) -> Manifest:
        from ckpt_tools.formats.sharded.reader import read_manifest

        return read_manifest(source, options, self.name)

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        from ckpt_tools.formats.sharded.reader import own_files

        return own_files(source, manifest)
