"""Writes a DCP, or the folder of the trainer that the manifest was read from, for N ranks.

A trainer's entries go into the DCPs that they came from, and the small files beside them are copied as they are. Files
that belong to ranks are copied if there are as many ranks as before; else they are left out, and the note says how the
trainer resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpt_tools.core.layout import FileSpec, Layout, make_file_copy, make_file_entry, make_file_key
from ckpt_tools.core.manifest import Manifest, StateTree
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.core.trainer_folder import CompanionFile, TrainerFolder
from ckpt_tools.core.value_refs import iter_tensor_refs
from ckpt_tools.formats.dcp.files import build_dcp_files
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.state_tree.build import Entries, choose_tree, entries_of
from ckpt_tools.state_tree.read_back import build_checked_entries


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    tree = choose_tree(manifest, model_key=options.model_key, optim_key=options.optim_key)
    if manifest.trainer is not None:
        return _layout_trainer_folder(manifest, manifest.trainer, tree, options.world_size)
    entries, notes = build_checked_entries(
        manifest, tree, is_source_tree=manifest.format == "dcp" and tree is manifest.tree
    )
    if tree.changed:
        why = "it is written as get_state_dict and dcp.load have it by default"
        notes += (Note(Outcome.DROPPED, f"the form of {join_names(tree.changed)}", why, len(tree.changed)),)
    return Layout(build_dcp_files(manifest, entries, options.world_size), (*entries.notes, *notes), tree=entries.tree)


def _layout_trainer_folder(manifest: Manifest, trainer: TrainerFolder, tree: StateTree, world_size: int) -> Layout:
    """The files of the folder; the ``.metadata`` of the first part is the last one."""
    # Without the entries of files that are copied, and their tensors.
    dropped_keys = {ref.key for name in trainer.entries for ref in iter_tensor_refs(manifest.extra.get(name))}
    written = replace(
        manifest,
        extra={name: value for name, value in manifest.extra.items() if name not in trainer.entries},
        tensors={key: entry for key, entry in manifest.tensors.items() if key not in dropped_keys},
    )
    entries = entries_of(written, tree)
    kept_files, left_files = trainer.split_files_by_fit(world_size)
    files: list[FileSpec] = [make_file_copy(name, file) for name, file in kept_files.items()]
    for part in [*trainer.parts][::-1]:
        files += build_dcp_files(manifest, _select_part(entries, trainer, part), world_size, part)
    copied_entries = {make_file_key(name): make_file_entry(file) for name, file in kept_files.items()}
    return Layout(
        files, (*entries.notes, *_note_left_out_files(trainer, left_files, world_size)), copied_entries, tree=tree
    )


def _select_part(entries: Entries, trainer: TrainerFolder, part_folder: str) -> Entries:
    """The entries that lie in the folder ``part_folder``."""
    paths = {name: path for name, path in entries.paths.items() if trainer.find_part(str(path[0])) == part_folder}
    return Entries(
        paths,
        {name: key for name, key in entries.tensors.items() if name in paths},
        {alias: owner for alias, owner in entries.aliases.items() if alias in paths},
        {name: value for name, value in entries.objects.items() if name in paths},
        (),
    )


def _note_left_out_files(
    trainer: TrainerFolder, left_files: Mapping[str, CompanionFile], world_size: int
) -> list[Note]:
    if not left_files:
        return []
    num_ranks = len({file.rank for file in trainer.files.values() if file.rank is not None})
    why = (
        f"each is of one rank of {num_ranks}, and this is for {format_count(world_size, 'rank')}; "
        f"{trainer.without_ranks}"
    )
    return [Note(Outcome.DROPPED, name, why, num_bytes=file.num_bytes) for name, file in sorted(left_files.items())]
