"""lerobot (0.6, common/train_utils.py ``save_checkpoint``): ``pretrained_model`` and ``training_state`` in ``005000``.

The optimizer is a file of safetensors with names such as ``state/0/exp_avg``, and its groups are JSON. A sharded run
saves through accelerate: the optimizer is a DCP in ``training_state/optimizer_0``, and the model is whole or a DCP too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import UnsupportedError
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers import accelerate
from ckpt_tools.trainers.halves import find_weights_beside_dcp, make_halves_of_files
from ckpt_tools.trainers.record import CheckpointHalves, Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint

MODEL_FOLDER, STATE_FOLDER = accelerate.LEROBOT_FOLDERS

OPTIMIZER_FILE = "optimizer_state.safetensors"
GROUPS_FILE = "optimizer_param_groups.json"

PROCESSOR_FILE = re.compile(r"policy_(?:pre|post)processor_step_\d+_\w+\.safetensors")
"""Statistics beside a policy, which do not belong to its model."""

_OPTIMIZER_MARK = re.compile(rf"{STATE_FOLDER}/(?:\w+/)?(?:{re.escape(GROUPS_FILE)}|\.metadata)")


def _find_halves(source: Source, format_name: str | None) -> CheckpointHalves | None:
    """Raises UnsupportedError if there are several optimizers."""
    state_files = [path.rpartition(f"{STATE_FOLDER}/") for path in source.files if path.endswith(f"/{OPTIMIZER_FILE}")]
    several = [each for each in state_files if each[1] and "/" in each[2]]
    if several:
        base_folder, _, path = several[0]
        raise UnsupportedError(
            "each part of the policy has an optimizer of its own, which is not supported; name "
            f"{base_folder}{MODEL_FOLDER} for the weights alone",
            path=f"{base_folder}{STATE_FOLDER}/{path}",
        )
    bases = [base_folder for base_folder, folder, _ in state_files if folder]
    if len(bases) == 1 and format_name in (None, "safetensors"):
        return make_halves_of_files(source, bases[0], f"{MODEL_FOLDER}/", f"{STATE_FOLDER}/{OPTIMIZER_FILE}")
    return find_weights_beside_dcp(
        source, format_name, weights_folder=f"{MODEL_FOLDER}/", optimizer_folder=f"{STATE_FOLDER}/optimizer_0/"
    )


def _find_problem(checkpoint: SavedCheckpoint) -> str | None:
    is_lerobot = f"{MODEL_FOLDER}/train_config.json" in checkpoint.files
    if not is_lerobot or any(map(_OPTIMIZER_MARK.fullmatch, checkpoint.files)):
        return None
    return f"no optimizer in {STATE_FOLDER}, which is written after {MODEL_FOLDER}: the save did not finish"


def _parse_step(content: Any) -> Mapping[str, Any]:
    return {"global_step": content["step"]} if isinstance(content, dict) and "step" in content else {}


LEROBOT = Trainer(
    name="lerobot",
    entry_parsers={"training_step.json": _parse_step, "scheduler_state.json": accelerate.parse_scheduler},
    own=rf"rng_state\.safetensors|{PROCESSOR_FILE.pattern}",
    optimizer=re.escape(OPTIMIZER_FILE),
    others=r"optimizer_param_groups\.json|train_config\.json|policy_(?:pre|post)processor\.json",
    folders=f"{MODEL_FOLDER}|{STATE_FOLDER}",
    last=re.escape(GROUPS_FILE),
    find_halves=_find_halves,
    find_problem=_find_problem,
)
