"""Finds the folders of one DCP. Pure.

``.metadata`` describes the folder that holds it. accelerate keeps two of them side by side, ``pytorch_model_fsdp_0``
and ``optimizer_0`` (accelerate 1.x, utils/fsdp_utils.py ``save_fsdp_model``, ``save_fsdp_optimizer``), and so does
transformers' Trainer, which saves through it: their trees, ``{"model": ...}`` and ``{"optimizer": ...}``, are one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from ckpt_tools.core.wording import join_newest
from ckpt_tools.errors import IncompleteError, SeveralCheckpointsError
from ckpt_tools.formats.dcp.names import ALONE, DATA, METADATA, is_metadata, is_of_dcp, is_of_one_rank
from ckpt_tools.trainers.accelerate import is_model_with_optimizer


def own_files(paths: Iterable[str], parts: Iterable[str] = ()) -> frozenset[str]:
    """Files that torch writes into the folder of a checkpoint, or into the ``parts`` of a trainer's folder; empty where
    the checkpoint is in another folder."""
    folders = {f"{part}/" if part else "" for part in parts} or {""}
    split = [(path, *path.rpartition("/")) for path in paths]
    found = frozenset(path for path, *folder, name in split if "".join(folder) in folders and is_of_dcp(name))
    described = {path.rpartition("/")[0] for path in found if is_metadata(path) or is_of_one_rank(path)}
    return found if all(folder.rstrip("/") in described for folder in folders) else frozenset()


def metadata_files(paths: Iterable[str]) -> list[str]:
    """The ``.metadata`` files that describe one checkpoint together, or those of the ranks in order.

    Raises:
        SeveralCheckpointsError: there are several checkpoints. IncompleteError: a rank's file is missing, or all are.
    """
    paths = list(paths)
    found, alone = [path for path in paths if is_metadata(path)], [path for path in paths if is_of_one_rank(path)]
    if METADATA in found:
        _refuse_both(alone, "")
        return [METADATA]
    if not found and not alone:
        raise IncompleteError(f"{METADATA} is missing, which describes the other files and is written last")
    if not found:
        return _of_all_ranks(alone)
    folders = [path.rpartition("/")[0] for path in found]
    if len(found) == 1 or is_model_with_optimizer(folders):
        for folder in folders:
            _refuse_both(alone, folder)
        _refuse_undescribed(paths, {*folders, *(path.rpartition("/")[0] for path in alone)})
        return found
    raise SeveralCheckpointsError(
        f"there are several checkpoints here ({join_newest(folders)}); name the folder of one"
    )


def _refuse_both(alone: list[str], folder: str) -> None:
    """Raises SeveralCheckpointsError where ranks saved by themselves into the folder of another DCP."""
    of_ranks = [path for path in alone if path.rpartition("/")[0] == folder]
    if of_ranks:
        raise SeveralCheckpointsError(
            f"two checkpoints were saved into this folder, one with .metadata and one with {of_ranks[0]} "
            "(use_collectives=False); their data files have the same names; save them into folders of their own"
        )


def _refuse_undescribed(paths: Iterable[str], described: Container[str]) -> None:
    """Raises IncompleteError for data of a DCP in a folder without ``.metadata``: a half of the checkpoint, or another
    one whose save did not finish."""
    names = (path.rpartition("/") for path in paths)
    found = next((folder for folder, _, name in names if DATA.fullmatch(name) and folder not in described), None)
    if found is not None:
        raise IncompleteError(
            f"{METADATA} of this folder is missing, which describes its other files; if it is another checkpoint, name "
            "the folder of the one that you mean",
            path=found or ".",
        )


def _of_all_ranks(alone: list[str]) -> list[str]:
    """The files of ranks that saved without collectives, from rank 0 on."""
    folders = sorted({path.rpartition("/")[0] for path in alone})
    if len(folders) > 1:
        raise SeveralCheckpointsError(
            f"there are several checkpoints here ({join_newest(folders)}); name the folder of one"
        )
    by_rank = {int(match[1]): path for path in alone if (match := ALONE.fullmatch(path.rpartition("/")[2]))}
    missing = [rank for rank in range(max(by_rank) + 1) if rank not in by_rank]
    if missing:
        raise IncompleteError(
            f"each rank saved by itself (use_collectives=False), and __{missing[0]}.metadata of rank {missing[0]} "
            "is missing",
            path=by_rank[max(by_rank)],
        )
    return [by_rank[rank] for rank in sorted(by_rank)]
