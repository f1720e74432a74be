"""Small runs on the ranks of a pool that begin from S3."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import torch
from fsspec.core import url_to_fs

from tests.training.jobs import small_config
from training.config.train_config import TrainConfig
from training.launchers.torchrun import run_rank

EPOCHS = 3


def run(config: TrainConfig) -> None:
    config.out.mkdir(exist_ok=True)
    torch.distributed.barrier()
    run_rank(config, torch.device("cpu"))


def upload(folder: Path, url: str) -> None:
    """Once, by the first rank."""
    if torch.distributed.get_rank() == 0:
        fs, path = url_to_fs(url)
        fs.put(f"{folder}/", f"{path}/", recursive=True)
    torch.distributed.barrier()


def train_all(out: Path, url: str, environment: Mapping[str, str]) -> None:
    """``plain``: two epochs with nothing on S3, whose first is put there. ``zero3``: from there to the third epoch.
    ``again``: the third once more, from the second epoch of ``zero3`` on S3. ``environment`` says where S3 is."""
    with patch.dict(os.environ, environment):
        run(small_config(out / "plain", engine="fsdp2", epochs=EPOCHS, until=2))
        first = "plain/checkpoints/epoch_0001"
        upload(out / first, f"{url}/{first}")
        run(small_config(out / "zero3", engine="zero3", epochs=EPOCHS, resume=f"{url}/{first}"))
        upload(out / "zero3/checkpoints/epoch_0002", f"{url}/zero3")
        run(small_config(out / "again", engine="zero3", epochs=EPOCHS, resume=f"{url}/zero3"))
