"""``result.json``: settings, metrics, checkpoint and library versions of a finished run."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.process.credentials import mask_secrets

from ..checkpoints.run_folder import checkpoint_of
from ..checkpoints.storage import report_failed_writes
from ..config.references import text_of
from ..config.train_config import Settings, TrainConfig
from .evaluation import Evaluation
from .loop import EpochMetrics, FinishedRun
from .saving import SaveRecord

RESULT_NAME = "result.json"


def check_result_file(out: Path) -> None:
    """Raises DestinationExistsError if ``OUT/result.json`` exists and is not of a run, which would replace it."""
    path = out / RESULT_NAME
    if not os.path.lexists(path):
        return
    try:
        is_result = {"engine", "launcher", "history"} <= json.loads(path.read_text()).keys()
    except (OSError, ValueError, AttributeError):
        is_result = False
    if not is_result:
        raise DestinationExistsError(
            f"{path} is not the result of a run, and a run would replace it; move it away or choose another --out"
        )


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run. ``history`` has the epochs of this run only, without those before ``--resume``. ``epochs`` is the
    number of finished epochs, ``settings["epochs"]`` the length of the schedule."""

    engine: str
    strategy: str
    launcher: str
    num_workers: int
    precision: str
    dataset: str
    epochs: int
    settings: Settings
    versions: dict[str, str]
    held_out: dict[str, float]
    accuracy: float | None
    correct: int
    total: int
    checkpoint: str
    seconds: float
    history: tuple[EpochMetrics, ...]
    predicted: tuple[int, ...]
    saves: tuple[SaveRecord, ...] = ()

    @classmethod
    def from_run(cls, config: TrainConfig, trained: FinishedRun, seconds: float) -> RunResult:
        """Result of a run; its checkpoint is the one at the end position."""
        evaluation = trained.evaluation or Evaluation({})
        frameworks = {"torch", config.launcher, config.sharding.framework} & {"torch", "ray", "deepspeed"}
        versions = {name: version(name) for name in sorted(frameworks, reverse=True)}
        return cls(
            engine=config.engine or config.sharding.framework,
            strategy=config.sharding.name,
            launcher=config.launcher,
            num_workers=config.num_workers,
            precision=config.precision,
            dataset=text_of(config.dataset),
            epochs=trained.end.epoch,
            settings=config.settings,
            versions={"python": platform.python_version(), "ckpt_tools": ckpt_tools.__version__, **versions},
            held_out=dict(evaluation.values),
            accuracy=evaluation.accuracy,
            correct=evaluation.correct,
            total=evaluation.total,
            checkpoint=str(checkpoint_of(config, trained.end.name)),
            seconds=seconds,
            history=trained.history,
            predicted=evaluation.predicted,
            saves=trained.saves,
        )

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """Read what :meth:`write` wrote. JSON keeps every digit of a float."""
        values: dict[str, Any] = json.loads(path.read_text())
        history = tuple(EpochMetrics(**(epoch | {"losses": tuple(epoch["losses"])})) for epoch in values.pop("history"))
        saves = tuple(SaveRecord(**save) for save in values.pop("saves", ()))
        return cls(history=history, predicted=tuple(values.pop("predicted")), saves=saves, **values)

    def write(self, out: Path) -> None:
        """Write ``OUT/result.json`` atomically, without credentials in the URL of the checkpoint. Raises StoreError."""
        unfinished, path = out / f".{RESULT_NAME}.partial", out / RESULT_NAME
        shown = replace(self, checkpoint=mask_secrets(self.checkpoint))
        with report_failed_writes(path):
            unfinished.write_text(json.dumps(asdict(shown), indent=1) + "\n")
            unfinished.replace(path)
