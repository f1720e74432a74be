"""Names of nanotron's files (huggingface/nanotron 2411b02, serialize/utils.py, optimizer.py, metadata.py)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source
    from ckpt_tools.trainers.saved import SavedCheckpoint

METADATA_FILE = "checkpoint_metadata.json"
"""Of a checkpoint; written last."""

OPTIMIZER_CONFIG = "optimizer/optimizer_config.json"

LATEST_FILE = "latest.txt"
"""Beside the checkpoints of a run, which are folders named by their steps: the step of the last one."""

SUPPORTED_VERSIONS = ("1.2", "1.3", "1.4", "1.5")
"""Versions of a checkpoint, whose tensors state their boxes; older ones do not."""

_RANK_SUFFIX = (
    r"_pp-rank-(?P<pp>\d{1,6})-of-\d{1,6}_tp-rank-(?P<tp>\d{1,6})-of-\d{1,6}(?:_exp-rank-(?P<exp>\d{1,6})-of-\d{1,6})?"
)
_WEIGHT_PATH = re.compile(rf"model/(?P<folder>.+)/model_(?P<last>(?:(?!_pp-)[\w-])+)(?:{_RANK_SUFFIX})?\.safetensors")
_OPTIMIZER_PATH = re.compile(
    r"optimizer/optimizer_pp-(?P<pp>\d{1,6})-of-(?P<pps>\d{1,6})(?:_dp-(?P<dp>\d{1,6})-of-(?P<dps>\d{1,6}))?"
    r"_tp-(?P<tp>\d{1,6})-of-(?P<tps>\d{1,6})_exp-(?P<exp>\d{1,6})-of-(?P<exps>\d{1,6})\.pt"
)


class WeightFile(NamedTuple):
    """The tensor in a file. A rank is None where all ranks of its kind have the whole tensor."""

    name: str
    tp: int | None
    exp: int | None


class OptimizerFile(NamedTuple):
    """The ranks of a file of the optimizer, and how many there are. ``dp`` is None without ZeRO-1."""

    pp: int
    tp: int
    exp: int
    dp: int | None
    sizes: tuple[int, int, int, int | None]


def detect(source: Source) -> bool:
    return any(path.rpartition("/")[2] == METADATA_FILE for path in source.files)


def is_nanotron(saved: SavedCheckpoint) -> bool:
    return METADATA_FILE in saved.files


def problem(saved: SavedCheckpoint) -> str | None:
    is_begun = any(path.startswith("model/") for path in saved.files) and "model_config.json" in saved.files
    return f"no {METADATA_FILE}: the save did not finish" if is_begun and METADATA_FILE not in saved.files else None


def parse_weight_path(path: str) -> WeightFile | None:
    """``path`` is relative to the checkpoint's folder. None for another file."""
    match = _WEIGHT_PATH.fullmatch(path)
    if match is None:
        return None
    name = f"{match['folder'].replace('/', '.')}.{match['last']}"
    tp, exp = (None if match[each] is None else int(match[each]) for each in ("tp", "exp"))
    return WeightFile(name, tp, exp)


def parse_optimizer_path(path: str) -> OptimizerFile | None:
    """``path`` is relative to the checkpoint's folder. None for another file."""
    match = _OPTIMIZER_PATH.fullmatch(path)
    if match is None:
        return None
    dp, dps = (None if match[each] is None else int(match[each]) for each in ("dp", "dps"))
    sizes = (int(match["pps"]), int(match["tps"]), int(match["exps"]), dps)
    return OptimizerFile(int(match["pp"]), int(match["tp"]), int(match["exp"]), dp, sizes)
