"""Names of Meta's files, and the axis along which ranks cut each tensor of Llama. Pure.

Sources: ``llama/model.py`` and ``models/llama3/reference_impl/model.py`` of Meta's llama and llama-models, and
transformers 4.57, ``models/llama/convert_llama_weights_to_hf.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from ckpt_tools.core.boxes import Shape
from ckpt_tools.errors import IncompleteError, UnsupportedError

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source
    from ckpt_tools.trainers.saved import SavedCheckpoint

PARAMS_FILE = "params.json"
EMBEDDING = "tok_embeddings.weight"
LAST_NORM = "norm.weight"

_CONSOLIDATED_FILE = re.compile(r"consolidated\.([0-9]{2,4})\.pth")

_CUT_AXES = {
    "wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0,
    "wo": 1, "w2": 1,
}  # fmt: skip
"""``ColumnParallelLinear`` cuts rows of the weight, ``RowParallelLinear`` its columns."""

_REPLICATED_MODULES = ("norm", "attention_norm", "ffn_norm", "rope")
"""Modules that every rank has whole."""


def make_file_name(rank: int) -> str:
    return f"consolidated.{rank:02d}.pth"


def find_consolidated_files(paths: Collection[str]) -> tuple[str, ...]:
    """The files at the top, by rank."""
    files_by_rank = [
        (int(match[1]), path) for path in paths if (match := _CONSOLIDATED_FILE.fullmatch(path)) is not None
    ]
    return tuple(path for _, path in sorted(files_by_rank))


def has_consolidated_files(source: Source | SavedCheckpoint) -> bool:
    return bool(find_consolidated_files(source.files))


def check_all_ranks(files: Collection[str]) -> None:
    """Raises IncompleteError if ranks are missing in the names."""
    missing_rank = next((rank for rank, path in enumerate(files) if path != make_file_name(rank)), None)
    if missing_rank is not None:
        raise IncompleteError(f"{make_file_name(missing_rank)} is missing, and there are files of later ranks")


def find_cut_axis(name: str, shape: Shape, width: int | None) -> int | None:
    """The axis along which ranks cut a tensor; None if each rank has the whole. ``shape`` is that of one rank's part.
    ``width`` is that of the model: Llama 1 and 2 cut columns of the embedding, and Llama 3 its rows.

    Raises:
        UnsupportedError: the name is none of Llama's.
    """
    module = name.split(".")[-2] if "." in name else name
    if module in _REPLICATED_MODULES:
        return None
    if name == EMBEDDING and width is not None and len(shape) > 1:
        return 0 if shape[1] == width else 1
    axis = _CUT_AXES.get(module)
    if axis is None or len(shape) < 2 or not name.endswith(".weight"):
        raise UnsupportedError("it is none of Llama's, so it is not known how ranks cut it", key=name)
    return axis
