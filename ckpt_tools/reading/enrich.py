"""Adds to a manifest what trainers keep in small files beside the checkpoint: a scheduler, step and epoch.

The records in ``trainers`` say which files are read, and what each adds. The others are noted, so that leaving them
out is not silent. Files of other checkpoints of the same run are neither read nor noted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.notes import Note, Outcome, note_unrelated_files
from ckpt_tools.core.value_refs import iter_values
from ckpt_tools.core.values import Opaque
from ckpt_tools.errors import FormatError, IncompleteError
from ckpt_tools.stores.output_names import is_visible_file
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import SCHEDULER, has_several_schedulers
from ckpt_tools.trainers.names import find_entry_parser, is_private_trainer_file, is_unfinished_marker
from ckpt_tools.trainers.record import EntryParser
from ckpt_tools.trainers.saved import get_parent_folder, iter_folder_chain
from ckpt_tools.trainers.transformers import ADAPTER_CONFIG_FILE

if TYPE_CHECKING:
    from ckpt_tools.state_tree.leaf import TensorLeaf

MAX_COMPANION_BYTES = 64 << 20
"""A trainer's log of a million steps is smaller."""

_OTHER_WEIGHTS = re.compile(r"(?:tf_model|flax_model)[\w.-]*|.*\.(?:bin|pt|pth|ckpt|gguf|npz)")
"""Weights in other formats, beside those of safetensors or torch."""


def enrich_manifest(manifest: Manifest, source: Source, tensorless_files: Collection[str] = ()) -> Manifest:
    """``manifest`` with entries of the trainer's files, and notes; what the checkpoint says itself wins.

    ``tensorless_files`` are files of the checkpoint, such as a ZeRO-3 rank's model file: they are not noted. Each other
    file falls under the first rule that fits: an unfinished marker, read into the manifest, an adapter's settings, read
    by its trainer alone, of another format, unknown in a trainer's folder, else it goes along with the weights.

    Raises:
        IncompleteError: a file marks the checkpoint as unfinished.
    """
    extra, notes, tensors = dict(manifest.extra), list(manifest.notes), dict[StateKey, TensorEntry]()
    trainer = manifest.trainer
    folders = {"", *(each for file in manifest.files for each in iter_folder_chain(get_parent_folder(file)))}
    copied_files = frozenset() if trainer is None else trainer.sources
    entries: set[str] = set()
    companion_files: list[str] = []
    weights = (entry for key, entry in manifest.tensors.items() if key.slot == WEIGHT)
    weight_folders = {path.rpartition("/")[0] for path in {path for each in weights for path in each.shards.files}}
    # In the folder of a model are others of it, such as ``1_Pooling`` of sentence-transformers and ``onnx``.
    has_inner_folders = manifest.format == "safetensors"
    model_prefixes = tuple(f"{each}/" if each else "" for each in weight_folders)
    for path in _list_unread_files(manifest, source, tensorless_files):
        folder, _, name = path.rpartition("/")
        if is_unfinished_marker(name) and folder in folders:
            raise IncompleteError("this file marks the checkpoint as unfinished; take an earlier one", path=path)
        entry_parser = find_entry_parser(name)
        is_in_model = f"{folder}/".startswith(model_prefixes) if has_inner_folders else folder in weight_folders
        is_one_of_several = name == SCHEDULER and has_several_schedulers(source.files)
        is_private = is_private_trainer_file(name)
        if entry_parser is not None and folder in folders and not is_one_of_several:
            new_entries, new_tensors, note = _read_companion(source, path, entry_parser, extra)
            if path in copied_files:
                entries |= new_entries.keys()
            extra |= new_entries
            tensors |= new_tensors
            notes += note
        elif path == ADAPTER_CONFIG_FILE and manifest.format in ("safetensors", "torch"):
            notes.append(_note_adapter(source, path, manifest))
        elif path in copied_files or is_one_of_several or (is_private and folder in folders):
            notes.append(Note(Outcome.DROPPED, path, "only the trainer that wrote it reads it"))
        elif entry_parser is not None or is_private or _is_file_of_other_format(path, manifest):
            notes.append(note_unrelated_files(path))
        elif trainer is not None and path in trainer.unknown:
            why = f"not part of this checkpoint: {trainer.trainer} is not known to write it"
            notes.append(Note(Outcome.DROPPED, path, why))
        elif is_visible_file(path) and not name.startswith(".") and is_in_model:
            companion_files.append(path)
    step = extra.get("global_step") if manifest.step is None else manifest.step
    if step is None and manifest.extra:
        step = _read_stored_step(manifest, source)
    return replace(
        manifest,
        tensors={**manifest.tensors, **tensors} if tensors else manifest.tensors,
        extra=extra,
        notes=(*notes, *_iter_call_notes(extra)),
        step=step if type(step) is int else None,
        unread_files=tuple(companion_files),
        trainer=None if trainer is None else replace(trainer, entries=frozenset(entries)),
    )


def _read_stored_step(manifest: Manifest, source: Source) -> int | None:
    """The step that is kept as a tensor, as torchtitan keeps it."""
    from ckpt_tools.formats.dcp.reader import read_number
    from ckpt_tools.state_tree.parse import iter_step_values

    refs = (value for value in iter_step_values(manifest.extra) if isinstance(value, TensorRef))
    entries = (manifest.tensors[ref.key] for ref in refs)
    entry = next((each for each in entries if not each.shape and "int" in each.dtype.value), None)
    return None if entry is None or entry.shards.files[0] not in source.files else int(read_number(source, entry))


def _list_unread_files(manifest: Manifest, source: Source, tensorless_files: Collection[str]) -> list[str]:
    """Files that are neither read nor noted, without those of other checkpoints of the run."""
    known_files = {*manifest.files, *tensorless_files, *(note.what for note in manifest.notes)}
    unread_files = [path for path in source.files if path not in known_files]
    if not any("/" in path for path in unread_files):
        return unread_files
    from ckpt_tools.formats.deepspeed.names import is_deepspeed_file_name
    from ckpt_tools.trainers.run_folders import list_other_checkpoint_files

    foreign_files = list_other_checkpoint_files(source, manifest.files)
    if manifest.format.startswith(("zero", "universal")):  # files of other tags
        foreign_files |= set(filter(is_deepspeed_file_name, unread_files))
    return [path for path in unread_files if path not in foreign_files]


def _note_adapter(source: Source, path: str, manifest: Manifest) -> Note:
    """Note on the adapter of PEFT (0.21) that the tensors are, or that is among them."""
    from ckpt_tools.lora.names import PeftRole, parse_name

    roles = {parse_name(key.fqn).role for key in manifest.tensors}
    if roles == {PeftRole.BASE} and not any(file.startswith("adapter_") for file in manifest.files):
        return note_unrelated_files(path)
    if PeftRole.LORA in roles and any(".base_layer." in key.fqn for key in manifest.tensors):
        return Note(Outcome.DROPPED, path, "of the adapter among the tensors; copy this file beside them to use it")
    try:
        kind = _read_json(source, path).get("peft_type")
    except (FormatError, ValueError, RecursionError, AttributeError):
        kind = None
    kind_text = f" ({kind})" if isinstance(kind, str) and kind.isidentifier() else ""
    why = f"the tensors are those of an adapter{kind_text}, not a whole model; copy this file beside them to use them"
    return Note(Outcome.DROPPED, path, why)


def _is_file_of_other_format(path: str, manifest: Manifest) -> bool:
    """Whether the reader of another format ignored it: the index of a DCP, or a model in the same folder, perhaps the
    same one again, as Trainer and accelerate write it with FSDP."""
    if path.rpartition("/")[2] == ".metadata":
        return manifest.format not in ("dcp", "megatron")
    return (
        manifest.format in ("safetensors", "torch") and _OTHER_WEIGHTS.fullmatch(path) is not None and "/" not in path
    )


def _read_companion(
    source: Source, path: str, parse_entries: EntryParser, known_entries: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[StateKey, TensorEntry], list[Note]]:
    """Entries that the file at ``path`` adds to ``known_entries``, tensors that they refer to, and notes."""
    leaves: dict[StateKey, TensorLeaf] = {}
    notes: list[Note] = []
    try:
        if path.endswith(".json"):
            entries = parse_entries(_read_json(source, path))
            step = entries.get("global_step")
            own_step = known_entries.get("global_step", step)
            if own_step not in (None, step):
                both = f"it says {step}, and the checkpoint {own_step}, which is taken"
                why = f"{both}: it counts on, or is of another save"
                notes.append(Note(Outcome.DOUBTFUL, f"global_step of {path}", why))
            entries = {name: value for name, value in entries.items() if name not in known_entries}
        else:
            from ckpt_tools.serialization.torch_zip import open_torch_file
            from ckpt_tools.state_tree.leaves import ArchiveLocation, extract_tensors

            archive = open_torch_file(source, path)
            location = ArchiveLocation(archive, path)
            entries = {
                name: extract_tensors(value, location, name, leaves)
                for name, value in parse_entries(archive.value).items()
                if name not in known_entries
            }
    except (FormatError, ValueError, RecursionError) as error:
        reason = error.message if isinstance(error, FormatError) else str(error)
        return {}, {}, [Note(Outcome.DROPPED, path, f"it cannot be read: {reason}")]
    tensors = {key: TensorEntry(leaf.shape, leaf.dtype, Kind.EXTRA, leaf.shards) for key, leaf in leaves.items()}
    return entries, tensors, notes


def _read_json(source: Source, path: str) -> Any:
    return json.loads(source.read_all(path, limit_bytes=MAX_COMPANION_BYTES))


def _iter_call_notes(extra: Mapping[str, Any]) -> Iterator[Note]:
    """A note for each entry with a call that ``scan`` would list. Nothing here executes it, but a loader would."""
    for name, value in extra.items():
        from ckpt_tools.serialization.pickle.closed_list import explain_refusal

        calls = (part for part in iter_values(value) if isinstance(part, Opaque))
        call = next((each for each in calls if explain_refusal(each) is not None), None)
        if call is not None:
            why = f"it holds a call of {call.ref}, which a loader would execute; `ckpt-tools scan` tells more"
            yield Note(Outcome.KEPT, name, why)
