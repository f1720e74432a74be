"""Whether files are those of ranks: by their names, by an index beside them, or by the classes that a pickle names."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tools.errors import CkptError
from ckpt_tools.serialization.torch_zip import read_pickle
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.names import are_rank_files, is_rank_file_candidate, match_rank_file
from ckpt_tools.trainers.saved import get_parent_folder
from ckpt_tools.trainers.torch_checkpointing import INDEX, has_index

_PROTOCOL_2_CLASSES = (b"DTensor\n", b"ShardedTensor\n")
"""The classes in a pickle of protocol 2, as ``torch.save`` writes them."""

_PROTOCOL_4_CLASSES = (b"\x07DTensor\x94", b"\rShardedTensor\x94")
"""The same in protocol 4 and later."""

MAX_INSPECTED_FILES = 8
"""Files that are opened to see whether any holds a part of a tensor."""


def detect(source: Source) -> bool:
    """Whether a file of ``source`` holds a part of a tensor, or its files have names of ranks."""
    rank_folders = find_rank_folders(source)
    top_files = [path for path in source.files if "/" not in path and is_rank_file_candidate(path)]
    if has_index(source):
        return True
    if are_rank_files(source.files):
        return True
    return any(has_tensor_parts(source, path) for path in pick_samples(top_files)) or bool(
        rank_folders and rank_folders != [""]
    )


def find_rank_folders(source: Source) -> list[str]:
    """Folders that hold files of ranks, by names and indexes."""
    indexed_folders = [get_parent_folder(path) for path in source.files if path.rpartition("/")[2] == INDEX]
    named_folders = (get_parent_folder(path) for path in source.files if match_rank_file(path))
    return list(dict.fromkeys([*named_folders, *(each for each in indexed_folders if has_index(source, each))]))


def pick_samples(paths: Iterable[str]) -> list[str]:
    path_by_form = {"".join("#" if c.isdigit() else c for c in path): path for path in paths}
    return list(path_by_form.values())[:MAX_INSPECTED_FILES]


def has_tensor_parts(source: Source, path: str) -> bool:
    """Whether the pickle of a file names a class of parts of tensors."""
    try:
        pickle = read_pickle(lambda start, stop: source.read(path, start, stop), source.size(path), path)
    except CkptError:
        return False
    return any(sign in pickle for sign in (*_PROTOCOL_2_CLASSES, *_PROTOCOL_4_CLASSES))
