"""verl (0.6, utils/checkpoint/fsdp_checkpoint_manager.py): files of ranks in ``actor`` and ``critic``.

With Megatron, verl of 2026 (utils/checkpoint/megatron_checkpoint_manager.py, layout 2) has a folder for each part:
``model/huggingface`` or ``model/dist_ckpt``, ``optimizer/dist_ckpt`` and ``extra/dist_ckpt``. ``ckpt_contents.json``,
which is written last, says which part is where.
"""

from __future__ import annotations

from typing import Any

from ckpt_tools.errors import MalformedError, SeveralCheckpointsError, UnsupportedError
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers import megatron_lm
from ckpt_tools.trainers.record import CheckpointHalves, Trainer

CONTENTS_FILE = "ckpt_contents.json"

_MAX_CONTENTS_BYTES = 1 << 20
"""It has some ten entries."""

FSDP_CONFIG_FILE = "fsdp_config.json"
"""``{"FSDP_version": 2, "world_size": 2}``."""

HUGGING_FACE_FOLDER = "huggingface"
"""Folder for ``config.json`` and tokenizer."""

_FORMAT_OF_TERM = {"huggingface": "safetensors", "megatron_dist_checkpoint": "megatron"}
"""The format of a part by verl's term for it."""


def _find_halves(source: Source, format_name: str | None) -> CheckpointHalves | None:
    """The parts of a checkpoint of verl's layout 2; None if ``source`` is not one.

    Raises:
        SeveralCheckpointsError: there are several. MalformedError: the file of contents is not one.
        UnsupportedError: there are no weights, weights of an adapter, or weights of an unknown format.
    """
    contents_paths = [each for each in source.files if each.rpartition("/")[2] == CONTENTS_FILE]
    if not contents_paths:
        return None
    if len(contents_paths) > 1:
        names = ", ".join(each.rpartition("/")[0] or "the folder itself" for each in sorted(contents_paths))
        raise SeveralCheckpointsError.of(names)
    (path,) = contents_paths
    step, contents = _read_contents(source, path)
    model_part, optimizer_part = contents.get("model"), contents.get("optimizer")
    if not model_part:
        raise UnsupportedError("it states no weights, and parts of a checkpoint of verl are read with them", path=path)
    weights_folder, format_term = _find_part_folder(source, path, model_part), model_part.get("format")
    if format_term not in _FORMAT_OF_TERM:
        raise UnsupportedError(f"weights of the format {format_term!r:.80} are not supported", path=path)
    if "peft_adapters" in contents:
        advice = f"name {weights_folder} for the weights of the base model alone"
        raise UnsupportedError(
            f"the optimizer is that of an adapter of PEFT, which is not supported; {advice}", path=path
        )
    optimizer_folder = _find_part_folder(source, path, optimizer_part) if optimizer_part else None
    if format_name not in (None, "megatron"):
        raise UnsupportedError("it lists the parts of a checkpoint of verl, which are read as megatron", path=path)
    return CheckpointHalves(
        format="megatron",
        index_path=path,
        base_folder=path.removesuffix(CONTENTS_FILE),
        weights_folder=weights_folder,
        weights_format=_FORMAT_OF_TERM[format_term],
        optimizer_folder=optimizer_folder,
        step=step,
    )


def _find_part_folder(source: Source, path: str, part: dict[str, Any]) -> str:
    """The folder of a part of the file of contents at ``path``. Raises MalformedError if there is none."""
    home, name = path.removesuffix(CONTENTS_FILE), part.get("path")
    folder = f"{home}{name}/"
    if not isinstance(name, str) or not any(each.startswith(folder) for each in source.files):
        raise MalformedError(f"it states a part in {name!r:.80}, and there is no such folder", path=path)
    return folder


def _read_contents(source: Source, path: str) -> tuple[int | None, dict[str, dict[str, Any]]]:
    """The step and the parts."""
    from ckpt_tools.serialization.strict_json import parse_json

    document = parse_json(source.read_all(path, limit_bytes=_MAX_CONTENTS_BYTES), path)
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, dict) or not all(isinstance(part, dict) for part in contents.values()):
        raise MalformedError("it does not state the contents of a checkpoint of verl", path=path)
    step = document.get("global_step")
    return step if type(step) is int and step >= 0 else None, contents


VERL = Trainer(
    name="verl",
    rank_file=r"(?P<item>[a-z_]+)_world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt",
    others=r"(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|fsdp_config\.json|data\.pt",
    folders=f"actor|critic|{HUGGING_FACE_FOLDER}",
    last=r"model_world_size_\d+_rank_\d+\.pt",
    find_halves=_find_halves,
    find_problem=megatron_lm.find_problem,
)
