"""OLMo-core: one DCP in ``model_and_optim`` (train/checkpoint.py ``Checkpointer``)."""

from __future__ import annotations

from ckpt_tools.trainers.record import Returned, Trainer
from ckpt_tools.trainers.saved import Saved

_NEEDED = ("model_and_optim/.metadata", "train/rank0.pt", ".metadata.json")
"""Files that a folder needs to be taken for a checkpoint (``dir_is_checkpoint``), the last one written last."""


def _problem(saved: Saved) -> str | None:
    if _NEEDED[0] not in saved.files or not any(path.startswith("train/rank") for path in saved.files):
        return None
    missing = next((path for path in _NEEDED if path not in saved.files), None)
    return None if missing is None else f"no {missing}: the save did not finish"


OLMO = Trainer(
    name="OLMo-core",
    others=r"config\.json|\.metadata\.json|data_paths\.txt|rank\d+\.pt",
    folders="model_and_optim|train",
    last=r"\.metadata\.json",
    returned=Returned(
        parts="model_and_optim",
        resume="trainer.load_checkpoint({path})",
        files=(r"config\.json|\.metadata\.json|data_paths\.txt", r"train/rank(\d{1,9})\.pt"),
        without_ranks="OLMo-core gives every rank the state of rank 0 then",
        first_is_enough=True,
    ),
    problem=_problem,
)
