"""Files that training tools lay beside a checkpoint: a scheduler's state, counts, RNG.

accelerate and transformers keep the scheduler in ``scheduler.bin`` or ``scheduler.pt`` and the counts in
``trainer_state.json``, Lightning both in ``meta.pt``. What of them has a place in a manifest is read into it; the
others are noted, so that leaving them behind is not silent. Files of other checkpoints of the same run, in folders of
other steps or in other tags of DeepSpeed's, belong to those and are not noted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome, not_part
from ckpt_tools.errors import FormatError, IncompleteError
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import has_several_schedulers
from ckpt_tools.trainers.names import UNREAD

if TYPE_CHECKING:
    from ckpt_tools.formats.state_dict.parse import TensorLeaf

MAX_COMPANION_BYTES = 64 << 20
"""A trainer's log of a million steps; what is larger is none of these files."""

_UNFINISHED = re.compile(r"(?i)(?:^|[._-])(?:in[_-]?progress|incomplete|unfinished)(?:[._-]|$)")
"""Markers that savers lay down first and take away last."""


ADAPTER = "adapter_config.json"

_OTHER_WEIGHTS = re.compile(r"(?:tf_model|flax_model)[\w.-]*|.*\.(?:bin|pt|pth|ckpt|gguf|npz)")
"""Files of weights in other formats, which lie beside those of safetensors or torch."""


def with_trainer_files(manifest: Manifest, source: Source, own: Collection[str] = ()) -> Manifest:
    """``manifest`` with what the trainer's files say; what the checkpoint says itself wins.

    ``own`` are files of the checkpoint that hold no tensor, such as a ZeRO-3 rank's model file: they are not noted.
    """
    extra, notes, step = dict(manifest.extra), [], manifest.step
    tensors: dict[StateKey, TensorEntry] = {}
    folders = _folders(manifest.files)
    copied = frozenset() if manifest.trainer is None else manifest.trainer.sources
    entries: set[str] = set()
    for path in _beside(manifest, source, own):
        folder, _, name = path.rpartition("/")
        if marks_unfinished(name) and folder in folders:
            raise IncompleteError("this file marks the checkpoint as unfinished; take an earlier one", path=path)
        is_one_of_several = name == _SCHEDULER and has_several_schedulers(source.files)
        if name in _READ and folder in folders and not is_one_of_several:
            found, inner, note = _read(source, path, _READ[name], extra.keys())
            if path in copied:
                entries |= found.keys()
            extra |= found
            tensors |= inner
            notes += note
        elif path == ADAPTER and manifest.format in ("safetensors", "torch"):
            notes.append(_adapter(source, path))
        elif path in copied or is_one_of_several or any(fnmatchcase(name, pattern) for pattern in UNREAD):
            notes.append(Note(Outcome.DROPPED, path, "only the trainer that wrote it reads it"))
        elif name in _READ or _is_foreign_part(path, manifest):
            notes.append(not_part(path))
        elif manifest.trainer is not None and path in manifest.trainer.unknown:
            why = f"not part of this checkpoint: {manifest.trainer.trainer} is not known to write it"
            notes.append(Note(Outcome.DROPPED, path, why))
    if step is None and type(extra.get("global_step")) is int:
        step = extra["global_step"]
    trainer = None if manifest.trainer is None else replace(manifest.trainer, entries=frozenset(entries))
    tensors = {**manifest.tensors, **tensors}
    notes = [*manifest.notes, *notes]
    return replace(manifest, tensors=tensors, extra=extra, notes=tuple(notes), step=step, trainer=trainer)


def _beside(manifest: Manifest, source: Source, own: Collection[str]) -> list[str]:
    """The files that are neither read nor noted, without those of other checkpoints of the run."""
    known = {*manifest.files, *own, *(note.what for note in manifest.notes)}
    found = [path for path in source.files if path not in known]
    if not any("/" in path for path in found):
        return found
    from ckpt_tools.core.run_folders import files_of_others
    from ckpt_tools.formats.deepspeed.names import is_deepspeeds

    others = files_of_others(source.files, manifest.files)
    has_tags = manifest.format.startswith(("zero", "universal"))
    return [path for path in found if path not in others and not (has_tags and is_deepspeeds(path))]


def marks_unfinished(name: str) -> bool:
    """Whether a file of this name says that a checkpoint is unfinished."""
    return _UNFINISHED.search(name) is not None


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


def _is_foreign_part(path: str, manifest: Manifest) -> bool:
    """Whether it is a part that a reader of another format left alone: the index of a DCP, or a model in the same
    folder, be it the same once more, as Trainer and accelerate write it with FSDP."""
    if path.rpartition("/")[2] == ".metadata":
        return manifest.format not in ("dcp", "megatron")
    return (
        manifest.format in ("safetensors", "torch") and _OTHER_WEIGHTS.fullmatch(path) is not None and "/" not in path
    )


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
        return {}, {}, [Note(Outcome.DROPPED, path, f"it cannot be read: {reason}")]


def _json(source: Source, path: str) -> Any:
    return json.loads(source.read_all(path, limit_bytes=MAX_COMPANION_BYTES))


def _read_archive(
    source: Source, path: str, meaning: Callable[[Any], Mapping[str, Any]], known: Collection[str]
) -> _Read:
    # Pickles are read for these few files alone: of other formats they are no part.
    from ckpt_tools.formats.state_dict.leaves import Place, with_references
    from ckpt_tools.serialization.torch_zip import open_archive

    archive = open_archive(lambda start, stop: source.read(path, start, stop), source.size(path), path)
    inner: dict[StateKey, TensorLeaf] = {}
    found = {
        name: with_references(value, Place(archive, path), name, inner)
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


_SCHEDULER = "scheduler.bin"

_READ: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    _SCHEDULER: _scheduler,
    "scheduler.pt": _scheduler,
    "trainer_state.json": _trainer_state,
    "meta.pt": _lightning,
}
