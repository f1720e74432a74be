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
from ckpt_tools.trainers.record import Metrics, Trainer
from ckpt_tools.trainers.saved import Saved


def _metrics(saved: Saved) -> Metrics:
    match = re.fullmatch(r"epoch_0*(\d+)", saved.title)
    if match is None:
        return
    if (path := _in_folder_of_run(saved, "result.json")) is not None:
        yield from _of_history(saved.object_at(path).get("history"), int(match[1]))
    if (path := _in_folder_of_run(saved, "metrics.jsonl")) is not None:
        for each in _lines(saved, path):
            if each.get("epoch") == int(match[1]):
                yield from each.items()


def _in_folder_of_run(saved: Saved, name: str) -> str | None:
    folder = saved.name.rpartition("/")[0]
    paths = (f"{folder.rpartition('/')[0]}/{name}".lstrip("/"), f"{folder}/{name}".lstrip("/"))
    return next((each for each in paths if each in saved.run.files), None)


def _of_history(history: Any, epoch: int) -> Metrics:
    for each in history if isinstance(history, list) else ():
        if isinstance(each, dict) and each.get("epoch") == epoch:
            yield from each.items()
            if (losses := each.get("losses")) and isinstance(losses, list):
                yield "loss", sum(losses) / len(losses)
            if isinstance(each.get("correct"), int) and each.get("total"):
                yield "accuracy", each["correct"] / each["total"]


def _lines(saved: Saved, path: str) -> Iterator[Mapping[str, Any]]:
    """Lines that are objects: a kill cuts off the last one of a record that a run appends to."""
    from ckpt_tools.serialization.strict_json import parse_json

    for line in saved.text(path).splitlines():
        with suppress(FormatError):
            found = parse_json(line, path)
            if isinstance(found, dict):
                yield found


OURS = Trainer(name="ckpt-tools", metrics=_metrics)
