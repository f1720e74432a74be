"""Megatron-LM: the folder of a run with ``latest_checkpointed_iteration.txt``; its checkpoints are a format."""

from __future__ import annotations

from ckpt_tools.trainers.record import Trainer
from ckpt_tools.trainers.saved import Saved

TRACKER = "latest_checkpointed_iteration.txt"
"""File of the run with the number of the last save that finished. verl writes it too."""


def problem(saved: Saved) -> str | None:
    """verl and Megatron-LM's older format have no other marker than the tracker."""
    if saved.step is None or "metadata.json" in saved.files or (text := saved.text_beside(TRACKER)) is None:
        return None
    if not text.isdecimal() or saved.step <= int(text):
        return None
    return f"{TRACKER} names step {text}: this save did not finish, or the run went back to that step"


MEGATRON_LM = Trainer(
    name="Megatron-LM",
    others=r"integrity\.json|run_config\.yaml|modelopt_run_config\.yaml|(?:latest_)?train_state\.pt",
    problem=problem,
)
