"""OLMo-core: one DCP in ``model_and_optim`` (train/checkpoint.py ``Checkpointer``)."""

from __future__ import annotations

from ckpt_tools.trainers.record import ResumeRules, Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint

_REQUIRED_FILES = ("model_and_optim/.metadata", "train/rank0.pt", ".metadata.json")
"""Files that a folder needs to be taken for a checkpoint (``dir_is_checkpoint``), the last one written last."""


def _find_problem(checkpoint: SavedCheckpoint) -> str | None:
    if _REQUIRED_FILES[0] not in checkpoint.files or not any(
        path.startswith("train/rank") for path in checkpoint.files
    ):
        return None
    missing = next((path for path in _REQUIRED_FILES if path not in checkpoint.files), None)
    return None if missing is None else f"no {missing}: the save did not finish"


OLMO = Trainer(
    name="OLMo-core",
    others=r"config\.json|\.metadata\.json|data_paths\.txt|rank\d+\.pt",
    folders="model_and_optim|train",
    last=r"\.metadata\.json",
    resume_rules=ResumeRules(
        dcp_folders="model_and_optim",
        resume_code="trainer.load_checkpoint({path})",
        copied_files=(r"config\.json|\.metadata\.json|data_paths\.txt", r"train/rank(\d{1,9})\.pt"),
        note_without_rank_files="OLMo-core gives every rank the state of rank 0 then",
        is_rank0_enough=True,
    ),
    find_problem=_find_problem,
)
