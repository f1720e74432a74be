"""Writes a DCP, or the folder of the trainer that the manifest was read from."""

from __future__ import annotations

from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.formats.dcp.files import dcp_files
from ckpt_tools.formats.state_dict.build import chosen_tree
from ckpt_tools.formats.state_dict.read_back import entries_of_own_tree, entries_read_back


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    tree = chosen_tree(manifest, model_key=options.model_key, optim_key=options.optim_key)
    if manifest.trainer is not None:
        from ckpt_tools.formats.dcp.trainer_writer import trainer_layout

        return trainer_layout(manifest, manifest.trainer, tree, options.world_size)
    is_own = manifest.format == "dcp" and tree is manifest.tree
    entries, notes = entries_of_own_tree(manifest, tree) if is_own else (entries_read_back(manifest, tree), ())
    return Layout(dcp_files(manifest, entries, options.world_size), (*entries.notes, *notes))
