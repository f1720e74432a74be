"""The files that docs/training_own.md prints, and small runs with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.training.documents import PAGES
from training.config.train_config import TrainConfig

WORKERS = 2
STEPS = 6  # of two epochs
SETTINGS: dict[str, Any] = {
    "launcher": "torchrun",
    "strategy": "full_shard",
    "dataset_arg": ("count=48",),
    "batch_size": 16,
    "epochs": 2,
    "save_every_steps": 1,
    "log_every": 1,
}


def write_files(folder: Path) -> Path:
    """The files that the page prints."""
    for code in re.findall(r'```python\n(""".*?)```', PAGES["training_own.md"], re.DOTALL):
        name = re.match(r'"""(\w+[.]py):', code)
        assert name is not None, code
        (folder / name[1]).write_text(code)
    return folder


def own_config(files: Path, out: Path, **values: Any) -> TrainConfig:
    functions = {"model": f"{files}/mine.py:net", "dataset": f"{files}/mine.py:points"}
    return TrainConfig(out=out, **(SETTINGS | {"num_workers": WORKERS} | functions | values))
