"""Whether a save of a DCP has finished: ``.metadata`` is written last, and names every file and how far it reaches."""

from __future__ import annotations

from contextlib import suppress

from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.dcp.names import DATA_FILE_NAME, is_dcp_file, is_metadata, is_rank_index
from ckpt_tools.serialization.pickle.dcp_metadata import Metadata, TensorStorageMetadata
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.stores.source import check_file_name
from ckpt_tools.trainers.saved import SavedCheckpoint, get_parent_folder

MAX_METADATA_BYTES = 4 << 30


def is_dcp(saved: SavedCheckpoint) -> bool:
    return any(is_dcp_file(name) for name in saved.file_names)


def world_size(saved: SavedCheckpoint) -> int:
    """One more than the largest rank in names of files with tensors."""
    matches = (DATA_FILE_NAME.fullmatch(name) for name in saved.file_names)
    return max((int(each[each.lastindex]) + 1 for each in matches if each and each.lastindex), default=0)


def problem(saved: SavedCheckpoint) -> str | None:
    indexes = {path for path in saved.files if is_metadata(path) or is_rank_index(path)}
    data_files = (path for path in saved.files if DATA_FILE_NAME.fullmatch(path.rpartition("/")[2]))
    if undescribed_folders := {*map(get_parent_folder, data_files)} - {*map(get_parent_folder, indexes)}:
        return f"no {f'{min(undescribed_folders)}/.metadata'.lstrip('/')}: the save did not finish"
    has_tensors = not indexes
    for path in sorted(indexes):
        metadata = loads(saved.read_file(path, MAX_METADATA_BYTES), path=path)
        if not isinstance(metadata, Metadata):
            return f"{path} is not the index of a DCP"
        if (truncation := _find_truncated_file(saved, path, metadata)) is not None:
            return truncation
        has_tensors |= any(isinstance(each, TensorStorageMetadata) for each in metadata.state_dict_metadata.values())
    if not has_tensors:
        from ckpt_tools.formats.dcp.reader import read

        # Objects may hold tensors, which the reader finds.
        with suppress(UnsupportedError):
            if not read(saved.source, ReadOptions()).tensors:
                return f"{min(indexes)} names no tensors"
    return None


def _find_truncated_file(saved: SavedCheckpoint, path: str, metadata: Metadata) -> str | None:
    file_ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        file_ends[info.relative_path] = max(file_ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in file_ends.items():
        file = f"{get_parent_folder(path)}/{check_file_name(name)}".lstrip("/")
        if file not in saved.files:
            return f"{file} is missing, which {path} names"
        if saved.files[file] < end:
            return f"{file} has {saved.files[file]:,} bytes instead of {end:,}: it is cut off"
    return None
