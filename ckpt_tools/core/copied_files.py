"""A file that is copied as it is: a tensor of bytes in a manifest, and an output file of that one tensor."""

from __future__ import annotations

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, Payload
from ckpt_tools.core.manifest import Kind, StateKey, TensorEntry
from ckpt_tools.core.trainer_folder import FILE_SLOT, CompanionFile


def make_file_key(name: str) -> StateKey:
    """The tensor of the file that is written as ``name``."""
    return StateKey(name, FILE_SLOT)


def make_file_entry(file: CompanionFile) -> TensorEntry:
    return TensorEntry((file.num_bytes,), DType.UINT8, Kind.EXTRA, file.make_table())


def make_file_copy(name: str, file: CompanionFile) -> FileLayout:
    """The output file ``name`` with the bytes of ``file``."""
    shape = (file.num_bytes,)
    return FileLayout(name, (Payload(make_file_key(name), Box.whole(shape), shape, DType.UINT8),))
