"""The training of this project: metrics in ``result.json`` and ``metrics.jsonl`` of the run's folder.

The checkpoints are ``checkpoints/epoch_0003``. ``metrics.jsonl`` has a line for each epoch as it ends, and lines about
other things.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckpt_tools.errors import FormatError
from ckpt_tools.trainers.record import MetricItems, Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint


def _read_metrics(checkpoint: SavedCheckpoint) -> MetricItems:
    match = re.fullmatch(r"epoch_0*(\d+)", checkpoint.base_name)
    if match is None:
        return
    if (path := _find_run_file(checkpoint, "result.json")) is not None:
        yield from _read_epoch_metrics(checkpoint.read_json_object(path).get("history"), int(match[1]))
    if (path := _find_run_file(checkpoint, "metrics.jsonl")) is not None:
        for each in _read_json_lines(checkpoint, path):
            if each.get("epoch") == int(match[1]):
                yield from each.items()


def _find_run_file(checkpoint: SavedCheckpoint, name: str) -> str | None:
    folder = checkpoint.name.rpartition("/")[0]
    paths = (f"{folder.rpartition('/')[0]}/{name}".lstrip("/"), f"{folder}/{name}".lstrip("/"))
    return next((each for each in paths if each in checkpoint.run.files), None)


def _read_epoch_metrics(history: Any, epoch: int) -> MetricItems:
    for each in history if isinstance(history, list) else ():
        if isinstance(each, dict) and each.get("epoch") == epoch:
            yield from each.items()
            if (losses := each.get("losses")) and isinstance(losses, list):
                yield "loss", sum(losses) / len(losses)
            if isinstance(each.get("correct"), int) and each.get("total"):
                yield "accuracy", each["correct"] / each["total"]


def _read_json_lines(checkpoint: SavedCheckpoint, path: str) -> Iterator[Mapping[str, Any]]:
    """Lines that are objects: a kill cuts off the last one of a record that a run appends to."""
    from ckpt_tools.serialization.strict_json import parse_json

    for line in checkpoint.read_run_file(path).splitlines():
        with suppress(FormatError):
            record = parse_json(line, path)
            if isinstance(record, dict):
                yield record


OURS = Trainer(name="ckpt-tools", read_metrics=_read_metrics)
