"""A manifest that was read from a trainer's folder as the folder of that trainer again, for N ranks.

Its entries go into the DCPs that they came from, and the small files beside them are copied as they are. Files that
belong to ranks are copied where there are as many ranks as before; they say nothing of other ranks, so that otherwise
they are left out, and the note says how the trainer goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileSpec, Layout, Payload
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, StateTree, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.trainer_folder import FILE, BesideFile, TrainerFolder
from ckpt_tools.core.value_refs import references
from ckpt_tools.core.wording import count, listed
from ckpt_tools.formats.dcp.writer import dcp_files
from ckpt_tools.formats.state_dict.build import Entries, entries_of


def trainer_layout(manifest: Manifest, trainer: TrainerFolder, tree: StateTree, world_size: int) -> Layout:
    """The files of the folder; the ``.metadata`` of the first part is the last one."""
    entries = entries_of(_without(manifest, trainer.entries), tree)
    kept, left = trainer.files_for(world_size)
    files: list[FileSpec] = [_copy(name, file) for name, file in kept.items()]
    for part in [*trainer.parts][::-1]:
        files += dcp_files(manifest, _part(entries, trainer, part), world_size, part)
    copied = {_key(name): _bytes(file) for name, file in kept.items()}
    return Layout(files, (*entries.notes, *_left_out(trainer, left, world_size)), copied)


def _without(manifest: Manifest, names: Collection[str]) -> Manifest:
    """``manifest`` without these entries, which are in files that are copied, and their tensors."""
    extra = {name: value for name, value in manifest.extra.items() if name not in names}
    gone = {ref.key for name in names for ref in references(manifest.extra.get(name))}
    tensors = {key: entry for key, entry in manifest.tensors.items() if key not in gone}
    return replace(manifest, extra=extra, tensors=tensors)


def _part(entries: Entries, trainer: TrainerFolder, part: str) -> Entries:
    """The entries that lie in the folder ``part``."""
    paths = {name: path for name, path in entries.paths.items() if trainer.part_of(str(path[0])) == part}
    return Entries(
        paths,
        {name: key for name, key in entries.tensors.items() if name in paths},
        {alias: owner for alias, owner in entries.aliases.items() if alias in paths},
        {name: value for name, value in entries.objects.items() if name in paths},
        (),
    )


def _key(name: str) -> StateKey:
    return StateKey(name, FILE)


def _bytes(file: BesideFile) -> TensorEntry:
    return TensorEntry((file.num_bytes,), DType.UINT8, Kind.EXTRA, file.table())


def _copy(name: str, file: BesideFile) -> FileLayout:
    shape = (file.num_bytes,)
    return FileLayout(name, (Payload(_key(name), Box.whole(shape), shape, DType.UINT8),))


def _left_out(trainer: TrainerFolder, left: Mapping[str, BesideFile], world_size: int) -> list[Note]:
    if not left:
        return []
    ranks = len({file.rank for file in trainer.files.values() if file.rank is not None})
    why = f"each is of one rank of {ranks}, and this is for {count(world_size, 'rank')}; {trainer.without_ranks}"
    return [Note(Outcome.DROPPED, listed(sorted(left)), why, len(left), sum(file.num_bytes for file in left.values()))]
