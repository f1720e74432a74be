"""Which folders make up one DCP. Pure.

``.metadata`` describes the folder it lies in. accelerate keeps two of them side by side, ``pytorch_model_fsdp_0`` and
``optimizer_0`` (accelerate 1.x, utils/fsdp_utils.py ``save_fsdp_model``, ``save_fsdp_optimizer``), and so does
transformers' Trainer, which saves through it: their trees, ``{"model": ...}`` and ``{"optimizer": ...}``, are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tools.core.wording import newest
from ckpt_tools.errors import SeveralCheckpointsError, UnsupportedError

METADATA = ".metadata"

_ALONE = re.compile(r"__\d+\.metadata")
_DATA = re.compile(r"__\d+_\d+\.distcp")
_MODEL = re.compile(r"pytorch_model_fsdp_(\d+)")
_OPTIM = re.compile(r"optimizer_(\d+)")


def is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == METADATA


def is_of_one_rank(path: str) -> bool:
    """Whether it is a rank's own ``__<rank>.metadata``, as ``dcp.save(use_collectives=False)`` leaves."""
    return _ALONE.fullmatch(path.rpartition("/")[2]) is not None


def own_files(paths: Iterable[str]) -> frozenset[str]:
    """Those that torch writes into the folder of a checkpoint; none where it lies in another folder."""
    found = frozenset(path for path in paths if _is_own(path))
    return found if METADATA in found else frozenset()


def _is_own(path: str) -> bool:
    return path == METADATA or _ALONE.fullmatch(path) is not None or _DATA.fullmatch(path) is not None


def metadata_files(paths: Iterable[str]) -> list[str]:
    """The ``.metadata`` files that describe one checkpoint together.

    Raises:
        UnsupportedError: there are several checkpoints, or every rank saved by itself.
    """
    found = [path for path in paths if is_metadata(path)]
    if METADATA in found:
        return [METADATA]
    if not found:
        raise UnsupportedError(
            "each rank saved separately (use_collectives=False), which is not supported; save with use_collectives=True"
        )
    folders = [path.rpartition("/")[0] for path in found]
    if len(found) == 1 or _is_one_of_accelerates(folders):
        return found
    raise SeveralCheckpointsError(f"there are several checkpoints here ({newest(folders)}); name the folder of one")


def _is_one_of_accelerates(folders: list[str]) -> bool:
    """One model and its one optimizer in the same folder."""
    parents = {folder.rpartition("/")[0] for folder in folders}
    names = [folder.rpartition("/")[2] for folder in folders]
    models = [match[1] for name in names if (match := _MODEL.fullmatch(name))]
    optims = [match[1] for name in names if (match := _OPTIM.fullmatch(name))]
    return len(parents) == 1 and len(names) == 2 and len(models) == 1 and optims == models
