"""The code that loads a DCP with torch into a model and its optimizer. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import Kind, Manifest, StateTree, TreePath, join_path
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.messages.loading_code import make_load_into_snippet, quote_literal
from ckpt_tools.messages.wording import escape_unprintable, join_names
from ckpt_tools.state_tree.build import choose_tree, is_model_only
from ckpt_tools.state_tree.from_deepspeed import collect_user_entries


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    """``dcp.load`` of ``path`` with the tree that was written; the state dicts have the form of ``get_state_dict``."""
    tree = layout.tree or choose_tree(manifest, model_key=options.model_key, optim_key=options.optim_key)
    checkpoint_id = f"checkpoint_id={quote_literal(path)}"
    if manifest.trainer is not None:
        return manifest.trainer.resume.format(path=quote_literal(path))
    import_line, comment = "import torch.distributed.checkpoint as dcp", _comment_on_tree(manifest, tree)
    if not manifest.groups and not manifest.select_kinds(Kind.STATE):
        return (
            f"{import_line}\ndcp.load({_format_tree_literal({tree.model: 'model.state_dict()'})}, "
            f"{checkpoint_id}){comment}"
        )
    if tree.optim is None or tree.numbers or (tree.is_flattened and not manifest.groups):
        return make_load_into_snippet(path)
    sd_options = ", options=sd.StateDictOptions(flatten_optimizer_state_dict=True)" if tree.is_flattened else ""
    optim_targets = {tree.optim: "optim"} if manifest.groups else {(*tree.optim, "state"): 'optim["state"]'}
    return (
        f"{import_line}, torch.distributed.checkpoint.state_dict as sd\n"
        f"weights, optim = sd.get_state_dict(model, optimizer{sd_options})\n"
        f"dcp.load({_format_tree_literal({tree.model: 'weights', **optim_targets})}, {checkpoint_id})\n"
        f"sd.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim{sd_options}){comment}"
    )


def _comment_on_tree(manifest: Manifest, tree: StateTree) -> str:
    """A comment on the user's entries, and on the option that names another tree."""
    names = collect_user_entries(manifest)[0]
    paths = [join_path(tree.extras.get(name, (*tree.model[:-1], name))) for name in names]
    entry_notes = [f"also in the tree: {escape_unprintable(join_names(paths))}"] if paths else []
    has_other_tree = manifest.tree is None and not is_model_only(manifest)
    tree_notes = [f"for another tree: {format_option('model_key')}"] if has_other_tree else []
    return f"\n# {'; '.join([*entry_notes, *tree_notes])}" if entry_notes or tree_notes else ""


def _format_tree_literal(values: Mapping[TreePath, str]) -> str:
    """A dict of dicts, as a literal, with an expression at each path."""
    subtrees: dict[str | int, dict[TreePath, str]] = {}
    unpacked_values = [f"**{value}" for path, value in values.items() if not path]
    if unpacked_values and len(values) == 1:
        return unpacked_values[0][2:]
    for path, value in values.items():
        if path:
            subtrees.setdefault(path[0], {})[path[1:]] = value
    parts = unpacked_values + [
        f"{quote_literal(str(key))}: {_format_tree_literal(inner)}" for key, inner in subtrees.items()
    ]
    return f"{{{', '.join(parts)}}}"
