"""Names of the files of a DCP, and the folders of one DCP.

``.metadata`` describes the folder that holds it. accelerate keeps two of them side by side, ``pytorch_model_fsdp_0``
and ``optimizer_0`` (accelerate 1.x, utils/fsdp_utils.py ``save_fsdp_model``, ``save_fsdp_optimizer``), and so does
transformers' Trainer, which saves through it: their trees, ``{"model": ...}`` and ``{"optimizer": ...}``, are one.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from ckpt_tools.errors import IncompleteError, SeveralCheckpointsError
from ckpt_tools.formats.megatron.names import find_torch_dist_folders
from ckpt_tools.messages.wording import join_newest
from ckpt_tools.trainers.accelerate import is_model_with_optimizer

if TYPE_CHECKING:
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.stores.source import Source

METADATA = ".metadata"

RANK_INDEX_NAME = re.compile(r"__(\d{1,9})\.metadata")
"""A rank's own index, as ``dcp.save(use_collectives=False)`` leaves it."""
DATA_FILE_NAME = re.compile(r"__(\d+)_\d+\.distcp")

FILE_NAME_PATTERN = r"\.metadata(?:\.tmp)?|__\d+\.metadata|__\d+_\d+\.distcp"
"""A pattern of all of them, with the index while it is written."""


def is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == METADATA


def is_rank_index(path: str) -> bool:
    """Whether it is a rank's own ``__<rank>.metadata``."""
    return RANK_INDEX_NAME.fullmatch(path.rpartition("/")[2]) is not None


def is_dcp_file(name: str) -> bool:
    """Whether torch names the files of a DCP so."""
    return name == METADATA or RANK_INDEX_NAME.fullmatch(name) is not None or DATA_FILE_NAME.fullmatch(name) is not None


def detect(source: Source) -> bool:
    found = any(is_metadata(path) or is_rank_index(path) for path in source.files)
    return found and not find_torch_dist_folders(source)


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    """Files that torch writes into the folder of a checkpoint, or into the parts of a trainer's folder; empty where the
    checkpoint is in another folder."""
    parts = () if manifest.trainer is None else manifest.trainer.parts
    folders = {f"{part}/" if part else "" for part in parts} or {""}
    split_paths = [(path, *path.rpartition("/")) for path in source.files]
    dcp_files = frozenset(
        path for path, *folder, name in split_paths if "".join(folder) in folders and is_dcp_file(name)
    )
    described_folders = {path.rpartition("/")[0] for path in dcp_files if is_metadata(path) or is_rank_index(path)}
    if not dcp_files or not all(folder.rstrip("/") in described_folders for folder in folders):
        return frozenset()
    return dcp_files | (manifest.files & source.files.keys())


def find_metadata_files(paths: Iterable[str]) -> list[str]:
    """The ``.metadata`` files that describe one checkpoint together, or those of the ranks in order.

    Raises:
        SeveralCheckpointsError: there are several checkpoints. IncompleteError: a rank's file is missing, or all are.
    """
    paths = list(paths)
    metadata_paths = [path for path in paths if is_metadata(path)]
    rank_indexes = [path for path in paths if is_rank_index(path)]
    if METADATA in metadata_paths:
        _refuse_mixed_saves(rank_indexes, "")
        return [METADATA]
    if not metadata_paths and not rank_indexes:
        raise IncompleteError(f"{METADATA} is missing, which describes the other files and is written last")
    if not metadata_paths:
        return _order_rank_indexes(rank_indexes)
    folders = [path.rpartition("/")[0] for path in metadata_paths]
    if len(metadata_paths) == 1 or is_model_with_optimizer(folders):
        for folder in folders:
            _refuse_mixed_saves(rank_indexes, folder)
        _refuse_folders_without_metadata(paths, {*folders, *(path.rpartition("/")[0] for path in rank_indexes)})
        return metadata_paths
    raise SeveralCheckpointsError.of(join_newest(folders))


def _refuse_mixed_saves(rank_indexes: list[str], folder: str) -> None:
    """Raises SeveralCheckpointsError where ranks saved by themselves into the folder of another DCP."""
    indexes_here = [path for path in rank_indexes if path.rpartition("/")[0] == folder]
    if indexes_here:
        raise SeveralCheckpointsError(
            f"two checkpoints were saved into this folder, one with .metadata and one with {indexes_here[0]} "
            "(use_collectives=False); their data files have the same names; save them into folders of their own"
        )


def _refuse_folders_without_metadata(paths: Iterable[str], described_folders: Container[str]) -> None:
    """Raises IncompleteError for data of a DCP in a folder without ``.metadata``: a half of the checkpoint, or another
    one whose save did not finish."""
    names = (path.rpartition("/") for path in paths)
    undescribed_folder = next(
        (folder for folder, _, name in names if DATA_FILE_NAME.fullmatch(name) and folder not in described_folders),
        None,
    )
    if undescribed_folder is not None:
        raise IncompleteError(
            f"{METADATA} of this folder is missing, which describes its other files; if it is another checkpoint, name "
            "the folder of the one that you mean",
            path=undescribed_folder or ".",
        )


def _order_rank_indexes(rank_indexes: list[str]) -> list[str]:
    """The files of ranks that saved without collectives, from rank 0 on."""
    folders = sorted({path.rpartition("/")[0] for path in rank_indexes})
    if len(folders) > 1:
        raise SeveralCheckpointsError.of(join_newest(folders))
    by_rank = {
        int(match[1]): path for path in rank_indexes if (match := RANK_INDEX_NAME.fullmatch(path.rpartition("/")[2]))
    }
    missing = [rank for rank in range(max(by_rank) + 1) if rank not in by_rank]
    if missing:
        raise IncompleteError(
            f"each rank saved by itself (use_collectives=False), and __{missing[0]}.metadata of rank {missing[0]} "
            "is missing",
            path=by_rank[max(by_rank)],
        )
    return [by_rank[rank] for rank in sorted(by_rank)]
