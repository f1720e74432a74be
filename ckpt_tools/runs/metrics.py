"""The metrics of a checkpoint, by the record that its trainer keeps.

transformers' Trainer logs them in ``trainer_state.json``, Ray Train in its record of the run, NeMo Automodel in
``losses.json``, ckpt-tools' own training in ``metrics.jsonl`` and ``result.json``. Lightning keeps a monitored value in
each checkpoint and often in its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckpt_tools.core.run_folders import parent_of
from ckpt_tools.core.values import Opaque, StoredTensor
from ckpt_tools.errors import FormatError
from ckpt_tools.runs.completeness import MAX_JSON_BYTES, RECORD, Saved, trainer_state
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.stores.source import Source

_IN_NAME = re.compile(r"([A-Za-z][\w/]*)=(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")
_COUNTS = frozenset(("epoch", "step", "global_step", "total_flos", "learning_rate"))


def metrics_of(saved: Saved) -> Mapping[str, float]:
    """Metrics by name; of the same name, what the checkpoint itself says wins. Raises StoreError."""
    found: dict[str, float] = {}
    for record in (_ours, _rays, _in_name, _losses, _lightnings, _trainers):
        try:
            found |= {name: float(value) for name, value in record(saved) if _is_metric(name, value)}
        except FormatError:
            continue  # a record that cannot be read says nothing
    return found


def _is_metric(name: object, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(name, str) and name not in _COUNTS and is_number


def _trainers(saved: Saved) -> Iterator[tuple[str, Any]]:
    """Of the Trainer's log, the last values up to this step."""
    state = trainer_state(saved)
    for entry in state.get("log_history", ()) if isinstance(state.get("log_history"), list) else ():
        if isinstance(entry, dict):
            step = entry.get("step")
            if not isinstance(step, int) or saved.step is None or step <= saved.step:
                yield from entry.items()


def _rays(saved: Saved) -> Iterator[tuple[str, Any]]:
    path = saved.beside(RECORD)
    found = _json(saved.run, path) if path is not None else {}
    results = found.get("checkpoint_results")
    for each in results if isinstance(results, list) else ():
        if isinstance(each, dict) and each.get("checkpoint_dir_name") == saved.title:
            metrics = each.get("metrics")
            yield from metrics.items() if isinstance(metrics, dict) else ()


def _losses(saved: Saved) -> Iterator[tuple[str, Any]]:
    if "losses.json" in saved.files:
        yield from _flat(_json(saved.run, saved.path("losses.json")))


def _ours(saved: Saved) -> Iterator[tuple[str, Any]]:
    """``result.json`` and ``metrics.jsonl`` lie in the folder of the run, which holds ``checkpoints/epoch_0003``. The
    second has a line for each epoch as it ends, and lines about other things."""
    match = re.fullmatch(r"epoch_0*(\d+)", saved.title)
    if match is None:
        return
    if (path := _in_folder_of_run(saved, "result.json")) is not None:
        yield from _of_history(_json(saved.run, path).get("history"), int(match[1]))
    if (path := _in_folder_of_run(saved, "metrics.jsonl")) is not None:
        for each in _json_lines(saved.run, path):
            if each.get("epoch") == int(match[1]):
                yield from each.items()


def _in_folder_of_run(saved: Saved, name: str) -> str | None:
    folder = parent_of(saved.name)
    paths = (f"{parent_of(folder)}/{name}".lstrip("/"), f"{folder}/{name}".lstrip("/"))
    return next((each for each in paths if each in saved.run.files), None)


def _of_history(history: Any, epoch: int) -> Iterator[tuple[str, Any]]:
    for each in history if isinstance(history, list) else ():
        if isinstance(each, dict) and each.get("epoch") == epoch:
            yield from each.items()
            if (losses := each.get("losses")) and isinstance(losses, list):
                yield "loss", sum(losses) / len(losses)
            if isinstance(each.get("correct"), int) and each.get("total"):
                yield "accuracy", each["correct"] / each["total"]


def _in_name(saved: Saved) -> Iterator[tuple[str, Any]]:
    for name, value in _IN_NAME.findall(saved.title):
        yield name, float(value)


def _lightnings(saved: Saved) -> Iterator[tuple[str, Any]]:
    """``callbacks`` of a ``.ckpt`` or of ``meta.pt``: the monitored value of each ModelCheckpoint."""
    path = saved.title if saved.title in saved.files else "meta.pt"
    if path not in saved.files or not path.endswith((".ckpt", "meta.pt")):
        return
    archive = open_archive(*saved.part(path))
    callbacks = archive.value.get("callbacks") if isinstance(archive.value, dict) else None
    for each in callbacks.values() if isinstance(callbacks, dict) else ():
        state = each.attributes if isinstance(each, Opaque) else each
        if isinstance(state, dict) and isinstance(state.get("monitor"), str):
            yield state["monitor"], _number(state.get("current_score"), archive, saved, path)


def _number(value: Any, archive: TorchArchive, saved: Saved, path: str) -> Any:
    """A number, or the one element of a tensor."""
    if not isinstance(value, StoredTensor) or value.numel != 1 or value.storage is None:
        return value
    import numpy as np

    start, _ = archive.storage_range(value.storage.key)
    start += value.storage_offset * value.dtype.item_bytes
    data = saved.run.read(saved.path(path), start, start + value.dtype.item_bytes)
    kind = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "int64": "<i8"}.get(value.dtype.value)
    return None if kind is None else np.frombuffer(data, kind)[0].item()


def _json(source: Source, path: str) -> Mapping[str, Any]:
    found = parse_json(source.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
    return found if isinstance(found, dict) else {}


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict) and not prefix:
            yield from _flat(value, f"{name}.")
        else:
            yield f"{prefix}{name}", value


def _json_lines(source: Source, path: str) -> Iterator[Mapping[str, Any]]:
    """Lines that are objects: a kill cuts off the last one of a record that a run appends to."""
    for line in source.read_all(path, limit_bytes=MAX_JSON_BYTES).splitlines():
        with suppress(FormatError):
            found = parse_json(line, path)
            if isinstance(found, dict):
                yield found
