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
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.errors import FormatError, IncompleteError
from ckpt_tools.formats.foreign import rank_in_name
from ckpt_tools.formats.trainer_names import UNREAD
from ckpt_tools.stores.source import Source

if TYPE_CHECKING:
    from ckpt_tools.formats.state_dict.parse import TensorLeaf

MAX_COMPANION_BYTES = 64 << 20
"""A trainer's log of a million steps; what is larger is none of these files."""

_UNFINISHED = re.compile(r"(?i)(?:^|[._-])(?:in[_-]?progress|incomplete|unfinished)(?:[._-]|$)")
"""Markers that savers lay down first and take away last."""


ADAPTER = "adapter_config.json"

_WEIGHTS_IN_TORCH = re.compile(r"pytorch_model[\w.-]*\.(?:bin|pt)|(?:tf_model|flax_model)[\w.-]*")


def with_trainer_files(manifest: Manifest, source: Source, own: Collection[str] = ()) -> Manifest:
    """``manifest`` with what the trainer's files say; what the checkpoint says itself wins.

    ``own`` are files of the checkpoint that hold no tensor, such as a ZeRO-3 rank's model file: they are not noted.
    """
    extra, notes, step = dict(manifest.extra), [], manifest.step
    tensors: dict[StateKey, TensorEntry] = {}
    used = manifest.files
    folders = _folders(used)
    noted = {note.what for note in manifest.notes}
    copied = frozenset() if manifest.trainer is None else manifest.trainer.sources
    entries: set[str] = set()
    for path in source.files:
        name = path.rpartition("/")[2]
        if path in used or path in own or path in noted:
            continue
        if marks_unfinished(name) and path.rpartition("/")[0] in folders:
            raise IncompleteError("this file marks the checkpoint as unfinished; take an earlier one", path=path)
        if name in _READ:
            found, inner, note = _read(source, path, _READ[name], extra.keys())
            if path in copied:
                entries |= found.keys()
            extra |= found
            tensors |= inner
            notes += note
        elif path == ADAPTER and manifest.format in ("safetensors", "torch"):
            notes.append(_adapter(source, path))
        elif (
            path in copied or any(fnmatchcase(name, pattern) for pattern in UNREAD) or _is_foreign_part(name, manifest)
        ):
            notes.append(Note(Outcome.DROPPED, path, "it is beside the checkpoint and is not read"))
        elif manifest.trainer is not None and path in manifest.trainer.unknown:
            why = f"it is beside the checkpoint, and {manifest.trainer.trainer} is not known to write it"
            notes.append(Note(Outcome.DROPPED, path, why))
    if step is None and type(extra.get("global_step")) is int:
        step = extra["global_step"]
    trainer = None if manifest.trainer is None else replace(manifest.trainer, entries=frozenset(entries))
    tensors = {**manifest.tensors, **tensors}
    notes = [*manifest.notes, *notes]
    return replace(manifest, tensors=tensors, extra=extra, notes=tuple(notes), step=step, trainer=trainer)


def marks_unfinished(name: str) -> bool:
    """Whether a file of this name says that a checkpoint is unfinished."""
    return _UNFINISHED.search(name) is not None


def is_beside(path: str) -> bool:
    """Whether a file in the form of ``torch.save`` is one that lies beside a model, by its name."""
    name = path.rpartition("/")[2]
    is_rank = rank_in_name(name) is not None
    return not is_rank and (name in _READ or any(fnmatchcase(name, pattern) for pattern in UNREAD))


def with_scheduler(manifest: Manifest) -> Manifest:
    """``manifest`` with the scheduler of Lightning, which keeps a list of them, under the name that others give it."""
    schedulers = manifest.extra.get("lr_schedulers")
    is_lightning = "pytorch-lightning_version" in manifest.extra and "lr_scheduler" not in manifest.extra
    if not is_lightning or not isinstance(schedulers, list) or len(schedulers) != 1:
        return manifest
    extra = {name: value for name, value in manifest.extra.items() if name != "lr_schedulers"}
    return replace(manifest, extra={**extra, "lr_scheduler": schedulers[0]})


def _folders(files: Iterable[str]) -> set[str]:
    """The folders that hold ``files``, and those above."""
    found = {""}
    for file in files:
        parts = file.split("/")[:-1]
        found |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return found


def _adapter(source: Source, path: str) -> Note:
    """About a folder of PEFT (0.21), whose tensors are no model."""
    try:
        kind = _json(source, path).get("peft_type")
    except (FormatError, ValueError, RecursionError, AttributeError):
        kind = None
    known = f" ({kind})" if isinstance(kind, str) and kind.isidentifier() else ""
    why = f"the tensors are those of an adapter{known}, not a whole model; copy this file beside them to use them"
    return Note(Outcome.DROPPED, path, why)


def _is_foreign_part(name: str, manifest: Manifest) -> bool:
    """Whether it is a part that a reader of another format left alone: the index of a DCP, or the same model once more,
    as Trainer and accelerate write it with FSDP."""
    if name == ".metadata":
        return manifest.format not in ("dcp", "megatron")
    return manifest.format == "safetensors" and _WEIGHTS_IN_TORCH.fullmatch(name) is not None


_Read = tuple[Mapping[str, Any], Mapping[StateKey, TensorEntry], list[Note]]
"""What a file adds: entries, the tensors to which these refer, and notes."""


def _read(source: Source, path: str, meaning: Callable[[Any], Mapping[str, Any]], known: Collection[str]) -> _Read:
    """What the file at ``path`` says, without the entries that are ``known``."""
    try:
        if path.endswith(".json"):
            said = meaning(_json(source, path))
            return {name: value for name, value in said.items() if name not in known}, {}, []
        return _read_archive(source, path, meaning, known)
    except (FormatError, ValueError, RecursionError) as error:
        reason = error.message if isinstance(error, FormatError) else str(error)
        return {}, {}, [Note(Outcome.DROPPED, path, f"it is beside the checkpoint and cannot be read: {reason}")]


def _json(source: Source, path: str) -> Any:
    return json.loads(source.read_all(path, limit_bytes=MAX_COMPANION_BYTES))


def _read_archive(
    source: Source, path: str, meaning: Callable[[Any], Mapping[str, Any]], known: Collection[str]
) -> _Read:
    # Pickles are read for these few files alone: of other formats they are no part.
    from ckpt_tools.formats.torch_leaves import with_references
    from ckpt_tools.serialization.torch_zip import open_archive

    archive = open_archive(lambda start, stop: source.read(path, start, stop), source.size(path), path)
    inner: dict[StateKey, TensorLeaf] = {}
    found = {
        name: with_references(value, archive, path, name, inner)
        for name, value in meaning(archive.value).items()
        if name not in known
    }
    return found, {key: TensorEntry(leaf.shape, leaf.dtype, Kind.EXTRA, leaf.shards) for key, leaf in inner.items()}, []


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
