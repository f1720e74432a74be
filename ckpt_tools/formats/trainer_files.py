"""Files that training tools lay beside a checkpoint: a scheduler's state, counts, RNG.

accelerate and transformers keep the scheduler in ``scheduler.bin`` or ``scheduler.pt`` and the counts in
``trainer_state.json``, Lightning both in ``meta.pt``. What of them has a place in a manifest is read into it; the
others are noted, so that leaving them behind is not silent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.errors import FormatError, IncompleteError
from ckpt_tools.stores.source import Source

MAX_COMPANION_BYTES = 64 << 20
"""A trainer's log of a million steps; what is larger is none of these files."""

TRAINERS_OWN = ("random_states_*.pkl", "rng_state*.pth", "sampler*.bin", "dl_state_dict*.bin", "scaler.pt",
                "optimizer.pt", "optimizer.bin", "scheduler.bin", "scheduler.pt", "meta.pt")  # fmt: skip
"""Files with names that accelerate, transformers and Lightning give to nothing else."""

UNREAD = (*(name for name in TRAINERS_OWN if not name.startswith(("scheduler", "meta"))),
          "*_rank_[0-9]*.pt", "*_rank[0-9]*.bin")  # fmt: skip
"""Of accelerate, transformers and verl: each rank's own generators, samplers, optimizers that are not sharded, and the
parts of ranks."""

_UNFINISHED = re.compile(r"(?i)(?:^|[._-])(?:in[_-]?progress|incomplete|unfinished)(?:[._-]|$)")
"""Markers that savers lay down first and take away last."""


def with_trainer_files(manifest: Manifest, source: Source, own: Collection[str] = ()) -> Manifest:
    """``manifest`` with what the trainer's files say; what the checkpoint says itself wins.

    ``own`` are files of the checkpoint that hold no tensor, such as a ZeRO-3 rank's model file: they are not noted.
    """
    extra, notes, step = dict(manifest.extra), [], manifest.step
    used = manifest.files
    folders = _folders(used)
    for path in source.files:
        name = path.rpartition("/")[2]
        if path in used or path in own:
            continue
        if _UNFINISHED.search(name) is not None and path.rpartition("/")[0] in folders:
            raise IncompleteError("this file marks the checkpoint as unfinished; take an earlier one", path=path)
        if name in _READ:
            found, note = _read(source, path, _READ[name])
            extra = {**found, **extra}
            notes += note
        elif any(fnmatchcase(name, pattern) for pattern in UNREAD) or _is_foreign_part(name, manifest):
            notes.append(Note(Outcome.DROPPED, path, "it is beside the checkpoint and is not read"))
    if step is None and type(extra.get("global_step")) is int:
        step = extra["global_step"]
    return replace(manifest, extra=extra, notes=(*manifest.notes, *notes), step=step)


def _folders(files: Iterable[str]) -> set[str]:
    """The folders that hold ``files``, and those above."""
    found = {""}
    for file in files:
        parts = file.split("/")[:-1]
        found |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return found


def _is_foreign_part(name: str, manifest: Manifest) -> bool:
    """Whether it is the index of a DCP that a reader of another format left alone."""
    return name == ".metadata" and manifest.format != "dcp"


def _read(
    source: Source, path: str, meaning: Callable[[Any], Mapping[str, Any]]
) -> tuple[Mapping[str, Any], list[Note]]:
    try:
        return meaning(_content(source, path)), []
    except (FormatError, ValueError, RecursionError) as error:
        reason = error.message if isinstance(error, FormatError) else str(error)
        return {}, [Note(Outcome.DROPPED, path, f"it is beside the checkpoint and cannot be read: {reason}")]


def _content(source: Source, path: str) -> Any:
    if path.endswith(".json"):
        return json.loads(source.read_all(path, limit_bytes=MAX_COMPANION_BYTES))
    # Pickles are read for these few files alone: of other formats they are no part.
    from ckpt_tools.serialization.torch_zip import open_archive

    return open_archive(lambda start, stop: source.read(path, start, stop), source.size(path), path).value


def _scheduler(content: Any) -> Mapping[str, Any]:
    return {"lr_scheduler": content} if isinstance(content, dict) else {}


def _trainer_state(content: Any) -> Mapping[str, Any]:
    names = ("global_step", "epoch")
    return {name: content[name] for name in names if name in content} if isinstance(content, dict) else {}


def _lightning(content: Any) -> Mapping[str, Any]:
    found = dict(_trainer_state(content))
    schedulers = content.get("lr_schedulers") if isinstance(content, dict) else None
    if isinstance(schedulers, list) and len(schedulers) == 1:
        found["lr_scheduler"] = schedulers[0]
    return found


_READ: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "scheduler.bin": _scheduler,
    "scheduler.pt": _scheduler,
    "trainer_state.json": _trainer_state,
    "meta.pt": _lightning,
}
