"""Names of files that training tools lay beside a checkpoint, and give to nothing else."""

from __future__ import annotations

from fnmatch import fnmatchcase

OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
"""Of accelerate and transformers: the optimizer of a model that lies beside it (``formats.huggingface``)."""

OPTIMIZER_HALF = "optim/.metadata"
"""Of NeMo Automodel: the optimizer of a model that lies in a folder beside it (``formats.halves``)."""

_UNREAD_OWN = (
    "random_states_*.pkl",
    "rng_state*.pth",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "scaler.pt",
    *OPTIMIZERS,
    "optimizer_[0-9]*.bin",
    "scheduler_[0-9]*.bin",
    "custom_checkpoint_*.pkl",
    "training_args.bin",
)

TRAINERS_OWN = (*_UNREAD_OWN, "scheduler.bin", "scheduler.pt", "meta.pt")
"""Files with names that accelerate, transformers and Lightning give to nothing else."""

UNREAD = (*_UNREAD_OWN, "*_rank_[0-9]*.pt", "*_rank[0-9]*.bin")
"""Of accelerate, transformers and verl: each rank's own generators, samplers, further optimizers, arguments, and the
parts of ranks."""

READ = ("scheduler.bin", "scheduler.pt", "trainer_state.json", "meta.pt")
"""Of accelerate, transformers and Lightning: what is read into a manifest (``reading.trainer_files``)."""


def is_beside(name: str) -> bool:
    """Whether a file of this name lies beside a model and is none."""
    return name in READ or any(fnmatchcase(name, pattern) for pattern in UNREAD)
