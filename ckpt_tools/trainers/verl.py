"""verl (0.6, utils/checkpoint/fsdp_checkpoint_manager.py): files of ranks in ``actor`` and ``critic``.

With Megatron, verl of 2026 (utils/checkpoint/megatron_checkpoint_manager.py, layout 2) has a folder for each part:
``model/huggingface`` or ``model/dist_ckpt``, ``optimizer/dist_ckpt`` and ``extra/dist_ckpt``. ``ckpt_contents.json``,
which is written last, says which part is where.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers import megatron_lm
from ckpt_tools.trainers.record import Trainer

CONTENTS = "ckpt_contents.json"

MAX_CONTENTS_BYTES = 1 << 20
"""It has some ten entries."""

CONFIG = "fsdp_config.json"
"""``{"FSDP_version": 2, "world_size": 2}``."""

HUGGING_FACE = "huggingface"
"""Folder for ``config.json`` and tokenizer."""

VERL = Trainer(
    name="verl",
    rank_file=r"(?P<item>[a-z_]+)_world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt",
    others=r"(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|fsdp_config\.json|data\.pt",
    folders=f"actor|critic|{HUGGING_FACE}",
    last=r"model_world_size_\d+_rank_\d+\.pt",
    problem=megatron_lm.problem,
)


def refuse_parts(source: Source) -> None:
    """Raises UnsupportedError, with what to name instead, if the folder is of verl's layout 2: parts of a checkpoint
    are checkpoints of their own, whose names differ where the weights are in Hugging Face's. MalformedError if the file
    of contents is not one."""
    path = next((each for each in source.files if each.rpartition("/")[2] == CONTENTS), None)
    if path is None:
        return
    folder = path.removesuffix(CONTENTS)
    contents = _contents(source, path)
    model, optimizer = (contents.get(each, {}) for each in ("model", "optimizer"))
    weights = model.get("path")
    advice = "it states no weights" if weights is None else f"name {folder}{weights} for the weights alone"
    if not optimizer:
        raise UnsupportedError(f"it lists the parts of a checkpoint of verl, one folder each; {advice}", path=path)
    names = "Hugging Face's names" if model.get("format") == "huggingface" else "Megatron-Core's names"
    raise UnsupportedError(
        f"it lists the parts of a checkpoint of verl: weights in {weights} under {names}, and the optimizer in "
        f"{optimizer.get('path')} under Megatron-Core's names; joining them is not supported; {advice}",
        path=path,
    )


def _contents(source: Source, path: str) -> Mapping[str, Mapping[str, Any]]:
    from ckpt_tools.serialization.strict_json import parse_json

    found = parse_json(source.read_all(path, limit_bytes=MAX_CONTENTS_BYTES), path)
    contents = found.get("contents") if isinstance(found, dict) else None
    if not isinstance(contents, dict) or not all(isinstance(part, dict) for part in contents.values()):
        raise MalformedError("it does not state the contents of a checkpoint of verl", path=path)
    return contents
