"""The options of a run, and what follows from them. ``training.config`` checks them, by ``training.combinations`` too.

Nothing here imports torch, so a mistake on the command line is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .strategies import EngineName, Strategy, StrategyName, chosen_strategy

LauncherName = Literal["ray", "torchrun"]
Precision = Literal["fp32", "bf16", "fp16"]
DatasetName = Literal["digits", "fashion-mnist", "image-folder", "text"]
PipelineScheduleName = Literal["gpipe", "1f1b"]
ScheduleName = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user can choose, with the defaults. Nothing is checked here; a run is a :class:`.config.TrainConfig`.

    ``batch_size`` is global: each step uses that many samples over all workers. ``epochs`` is the length of the
    learning rate schedule; a run that ends earlier, after epoch ``until`` or step ``max_steps``, can be resumed on the
    same schedule. ``storage`` is the URL of a store that takes the checkpoints in the place of ``out``. ``override``
    names settings, spelt as options, that may differ from those of the run whose checkpoint is resumed.
    """

    out: Path
    strategy: StrategyName | None = None
    engine: EngineName | None = None
    model: str = "vit"
    launcher: LauncherName = "ray"
    num_workers: int = 2
    epochs: int = 12
    until: int | None = None
    max_steps: int | None = None
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    schedule: ScheduleName = "cosine"
    warmup_fraction: float = 0.1
    clip_grad_norm: float | None = None
    gradient_accumulation: int = 1
    seed: int = 0
    precision: Precision = "fp32"
    shard_size: int | None = None
    tp: int = 1
    pp: int = 1
    pp_schedule: PipelineScheduleName | None = None
    ep: int = 1
    cpu_offload: bool = False
    reshard_after_forward: int | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    activation_checkpointing: bool = False
    compile: bool = False
    deepspeed_config: Path | None = None
    dataset: DatasetName = "digits"
    data_root: Path | None = None
    num_samples: int | None = None
    save_every: int = 1
    save_every_steps: int | None = None
    save_every_minutes: float | None = None
    async_save: bool = False
    keep_last: int | None = None
    keep_best: str | None = None
    max_restarts: int = 0
    min_workers: int | None = None
    init_from: str | None = None
    rename: tuple[str, ...] = ()
    export: str | None = None
    storage: str | None = None
    resume: str | None = None
    override: tuple[str, ...] = ()
    log_every: int = 10
    tensorboard: bool = False
    profile: bool = False

    @property
    def sharding(self) -> Strategy:
        """What ``strategy`` and ``engine`` mean together."""
        return chosen_strategy(self.strategy, self.engine)

    @property
    def data_workers(self) -> int:
        """Workers, or groups of workers under ``tp`` and ``pp``, that see samples of their own."""
        return self.num_workers // (self.tp * self.pp)

    @property
    def last_epoch(self) -> int:
        """The number of finished epochs at which this run ends."""
        return self.epochs if self.until is None else self.until
