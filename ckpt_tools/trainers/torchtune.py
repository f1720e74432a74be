"""torchtune (0.6, training/checkpointing/_checkpointer.py): weights in ``epoch_0``, with ``recipe_state.pt``.

The optimizer in that file has the names of torchtune's modules; the weights have those of the hub, and for some models
other rows of queries and keys.
"""

from __future__ import annotations

from ckpt_tools.trainers.record import Trainer

TORCHTUNE = Trainer(
    name="torchtune",
    own=r"recipe_state\.pt",
    others=r"adapter_model\.pt|original_repo_id\.json",
    last=r"recipe_state\.pt",
)
