"""Megatron-LM: the folder of a run with ``latest_checkpointed_iteration.txt``; its checkpoints are a format."""

from __future__ import annotations

from ckpt_tools.trainers.record import Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""File of the run with the number of the last save that finished. verl writes it too."""


def find_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why the checkpoint is not complete: verl and Megatron-LM's older format have no other marker than the tracker."""
    if (
        checkpoint.step is None
        or "metadata.json" in checkpoint.files
        or (text := checkpoint.read_sibling_line(TRACKER_FILE)) is None
    ):
        return None
    if not text.isdecimal() or checkpoint.step <= int(text):
        return None
    return f"{TRACKER_FILE} names step {text}: this save did not finish, or the run went back to that step"


MEGATRON_LM = Trainer(
    name="Megatron-LM",
    others=r"integrity\.json|run_config\.yaml|modelopt_run_config\.yaml|(?:latest_)?train_state\.pt",
    find_problem=find_problem,
)
