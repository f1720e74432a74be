"""Whether a tree of state that is about to be written is read back with the same model. Pure.

Such a tree does not say which of its mappings is the model: readers find it by the names that the optimizer knows, by
its own name and by its size (``prefixes.find_prefixes``). Tensors among the user's own entries could be taken for it.
Readers also take the order of the weights for the model's when an optimizer numbers its parameters. The weights of a
source in another order could be taken for parameters that the numbers do not mean.
"""

from __future__ import annotations

from ckpt_tools.core.manifest import Kind, Manifest, StateTree, TreePath, join_path
from ckpt_tools.core.names import is_extra_state
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.state_tree.build import APP_TREE, Entries, entries_of
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.parse import TreeLeaves, is_matched_by_number
from ckpt_tools.state_tree.prefixes import StateRole, TreePrefixes, WeightRole, find_prefixes, find_role


def build_checked_entries(
    manifest: Manifest, tree: StateTree, *, is_source_tree: bool, whole_values: bool = False
) -> tuple[Entries, tuple[Note, ...]]:
    """Entries as of ``entries_of``, for a tree whose model a reader finds, and notes. ``is_source_tree`` says that the
    source had this tree; it is kept with a note on the key to read it with, unless its model is at the root.

    Raises:
        UnsupportedError: as ``entries_of`` does, or a reader would take something else for the model, or the
        optimizer's numbers for parameters that nothing proves.
    """
    entries = entries_of(manifest, tree, whole_values=whole_values)
    _check_numbered_optimizer(manifest, entries, tree)
    model_key_option = format_option("model_key", join_path(tree.model))
    if is_source_tree and manifest.select_kinds(Kind.EXTRA) and _find_reader_prefixes(manifest, entries) is None:
        note = Note(
            Outcome.KEPT, "the model's place in the tree", f"a reader asks for it; read it with {model_key_option}"
        )
        return entries, (note,)
    wrong_model = _find_wrong_model(manifest, entries)
    if wrong_model is None:
        return entries, ()
    if not is_source_tree:
        raise UnsupportedError(
            f"the user's own tensors in {_describe_prefix(wrong_model)} would be read as the model's weights; convert "
            f"the weights alone with {format_option('state', 'model')}, or the whole state to safetensors or universal"
        )
    if not tree.model:
        why = (
            f"at the root, as in the source, the user's own tensors in {_describe_prefix(wrong_model)} would be "
            f"read as weights"
        )
        note = Note(Outcome.DEFAULTED, f"the model's place {join_path(APP_TREE.model)}", why)
        return build_checked_entries(manifest, APP_TREE, is_source_tree=False, whole_values=whole_values)[0], (note,)
    why = (
        f"a reader would find the user's own tensors in {_describe_prefix(wrong_model)}; read it with "
        f"{model_key_option}"
    )
    return entries, (Note(Outcome.KEPT, "the model's place in the tree", why),)


def _describe_prefix(prefix: TreePath) -> str:
    return join_path(prefix) or "the root of the tree"


def _find_wrong_model(manifest: Manifest, entries: Entries) -> TreePath | None:
    """The place where a reader would find other weights or optimizer state than are meant; None if it finds what is
    meant, or asks the user."""
    kinds = {name: manifest.tensors[key].kind for name, key in entries.tensors.items()}
    reader_prefixes = _find_reader_prefixes(manifest, entries) if Kind.EXTRA in kinds.values() else None
    if reader_prefixes is None:
        return None
    paths = {name: entries.paths[name] for name in kinds if not any(map(is_extra_state, entries.paths[name]))}
    is_meant = all(_is_intended_role(path, reader_prefixes, kinds[name], manifest) for name, path in paths.items())
    return None if is_meant else reader_prefixes.model


def _find_reader_prefixes(manifest: Manifest, entries: Entries) -> TreePrefixes | None:
    """Keys where a reader finds model and optimizer; None if the user has to name them."""
    numels = {name: manifest.tensors[key].numel for name, key in entries.tensors.items()}
    integers = {name for name, key in entries.tensors.items() if not manifest.tensors[key].dtype.is_floating}
    try:
        return find_prefixes(entries.paths, numels, model_key=None, optim_key=None, integer_names=integers)
    except UnsupportedError:
        return None


def _check_numbered_optimizer(manifest: Manifest, entries: Entries, tree: StateTree) -> None:
    """Raises UnsupportedError if a reader would place an optimizer by number among the user's own entries. Numbers that
    the tree keeps are read as they were in the source."""
    if tree.numbers or not manifest.select_kinds(Kind.EXTRA):
        return
    reader_prefixes = _find_reader_prefixes(manifest, entries)
    tensors = {name: manifest.tensors[key] for name, key in entries.tensors.items()}
    leaves = {name: TensorLeaf(each.shape, each.dtype, each.shards) for name, each in tensors.items()}
    if reader_prefixes is None or reader_prefixes.model != tree.model or reader_prefixes.optim is None:
        return
    if is_matched_by_number(TreeLeaves(entries.paths, leaves, entries.objects), reader_prefixes):
        raise UnsupportedError(
            f"the optimizer in {_describe_prefix(reader_prefixes.optim)} numbers its parameters, and a reader would "
            "find them by the order of the weights, which is not proved to be the model's; say which they are with "
            f"{format_option('param_order')}, or convert the weights alone with {format_option('state', 'model')}"
        )


def _is_intended_role(path: TreePath, tree: TreePrefixes, kind: Kind, manifest: Manifest) -> bool:
    role = find_role(path, tree, is_tensor=True)
    if isinstance(role, StateRole):
        return kind is Kind.STATE or role.fqn.isdecimal()
    if kind is Kind.STATE:
        return not manifest.groups
    return isinstance(role, WeightRole) is (kind in (Kind.PARAMETER, Kind.BUFFER))
