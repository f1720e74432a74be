"""Joins a model with the optimizer in a file: ``optimizer.bin``, ``optimizer.pt`` or ``optimizer_state.safetensors``.

accelerate (1.15, checkpointing.py ``save_accelerator_state``, utils/fsdp_utils.py ``save_fsdp_optimizer``) and the
Trainer of transformers (5.x, trainer.py ``_save_optimizer_and_scheduler``) write it beside ``model.safetensors`` or
``pytorch_model*.bin``. With FSDP the parameters are known by name, without it by number.
lerobot has a file of safetensors and one of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.manifest import MOMENTS, Kind, Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import FormatError, MalformedError, UnsupportedError
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import read_manifest
from ckpt_tools.formats.safetensors.files import read_safetensors_header
from ckpt_tools.formats.torch.files import read_torch_tree
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.leaves import LeafCollector, iter_tree_leaves
from ckpt_tools.state_tree.parse import TreeLeaves, build_manifest
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.lerobot import GROUPS_FILE, OPTIMIZER_FILE

Value = TypeVar("Value")

JOINABLE_FORMATS = ("safetensors", "torch")
"""Formats of a model that can have its optimizer in another file."""

_MAX_GROUPS_BYTES = 64 << 20
"""Numbers of parameters, of which a model has some thousands."""

MODEL_KEY, OPTIMIZER_KEY = "model", "optimizer"
"""Keys of both in the joined tree."""


def read_model_and_optimizer(reader: Format, source: Source, file: str, options: ReadOptions) -> tuple[Manifest, bool]:
    """The manifest of ``source`` with the optimizer of ``file``, and whether that was joined: an optimizer in the
    checkpoint itself wins.

    Raises:
        CkptError: as the reader; the file cannot be read, or is of another model.
    """
    model = read_manifest(reader, source, replace(options, model_key=None, optim_key=None, param_order=None))
    kinds = {entry.kind for entry in model.tensors.values()}
    is_weights_alone = bool(kinds) and kinds <= {Kind.PARAMETER, Kind.BUFFER} and not model.groups
    if is_weights_alone and model.extra.keys() <= {HEADER_ENTRY} and model.format in JOINABLE_FORMATS:
        return join_optimizer_file(model, source, file, options), True
    return read_manifest(reader, source, options), False


def join_optimizer_file(manifest: Manifest, source: Source, file: str, options: ReadOptions) -> Manifest:
    """The manifest of a model, with the optimizer in a file of torch or in lerobot's. Raises FormatError."""
    try:
        tree = _read_lerobot_tree(source, file) if file.endswith(".safetensors") else read_torch_tree(source, file)
        return _join_leaves(manifest, tree.build_leaves(), tree.ties, options)
    except FormatError as error:
        raise type(error)(
            f"{error.message}; it lies beside the model, whose file can be named to read the weights alone",
            path=error.path or file,
            key=error.key,
        ) from error


def _read_lerobot_tree(source: Source, file: str) -> LeafCollector:
    """The leaves of an optimizer of lerobot: tensors by path, ``state/0/exp_avg``, and the groups beside them."""
    groups_path = f"{file.removesuffix(OPTIMIZER_FILE)}{GROUPS_FILE}"
    groups = parse_json(source.read_all(groups_path, limit_bytes=_MAX_GROUPS_BYTES), groups_path)
    leaves = LeafCollector()
    for name, table in read_safetensors_header(source, file).tensors.items():
        path = tuple(int(part) if part.isdecimal() else part for part in name.split("/"))
        leaves.add_path(name, path, file)
        leaves.tensors[name] = TensorLeaf(table.shape, table.dtype, table)
    for path, value in iter_tree_leaves(groups, ("param_groups",), groups_path):
        name = "/".join(map(str, path))
        leaves.add_path(name, path, groups_path)
        leaves.objects[name] = value
    return leaves


def _join_leaves(
    manifest: Manifest, optimizer_leaves: TreeLeaves, optimizer_ties: Mapping[str, str], options: ReadOptions
) -> Manifest:
    if not any(path[:1] == ("param_groups",) for path in optimizer_leaves.paths.values()):
        raise UnsupportedError("it does not hold the state of one optimizer of torch")
    names = (*(key.fqn for key in manifest.tensors), *manifest.aliases)
    model_paths = {name: (MODEL_KEY, name) for name in names}
    inner_paths = {name: path for name, path in optimizer_leaves.paths.items() if path != ("state",)}
    optimizer_paths = {name: (OPTIMIZER_KEY, *path) for name, path in inner_paths.items()}
    weights = {key.fqn: TensorLeaf(entry.shape, entry.dtype, entry.shards) for key, entry in manifest.tensors.items()}
    objects = {name: value for name, value in optimizer_leaves.objects.items() if name in inner_paths}
    is_ordered = manifest.format == "torch" and len(manifest.files) == 1
    joined = build_manifest(
        TreeLeaves(
            {**_put_below(MODEL_KEY, model_paths), **_put_below(OPTIMIZER_KEY, optimizer_paths)},
            {**_put_below(MODEL_KEY, weights), **_put_below(OPTIMIZER_KEY, optimizer_leaves.tensors)},
            _put_below(OPTIMIZER_KEY, objects),
            optimizer_leaves.inner,
            is_ordered=is_ordered,
        ),
        format_name=manifest.format,
        model_key=options.model_key or MODEL_KEY,
        optim_key=options.optim_key or OPTIMIZER_KEY,
        ties={
            f"{part}.{alias}": f"{part}.{owner}"
            for part, ties in ((MODEL_KEY, manifest.aliases), (OPTIMIZER_KEY, optimizer_ties))
            for alias, owner in ties.items()
        },
        param_order=options.param_order,
    )
    if joined.tree is not None and not is_ordered:
        joined = replace(joined, tree=replace(joined.tree, numbers=()))  # no reader of one tree would find the names
    _check_same_model(joined, {key.fqn: entry.shape for key, entry in manifest.tensors.items()}, manifest.aliases)
    extra, notes = {**joined.extra, **manifest.extra}, (*manifest.notes, *joined.notes)
    return replace(joined, world_size=manifest.world_size, extra=extra, notes=notes)


def _check_same_model(joined: Manifest, shapes: Mapping[str, Shape], aliases: Mapping[str, str]) -> None:
    """Raises MalformedError where the optimizer has state of a parameter that the model does not have."""
    group_params = [name for group in joined.groups for name in group.params]
    for name in (*group_params, *(key.fqn for key in joined.select_kinds(Kind.STATE))):
        if aliases.get(name, name) not in shapes:
            raise MalformedError("the optimizer has it, and the model does not; they are of different models", key=name)
    for key, entry in joined.select_kinds(Kind.STATE).items():
        if key.slot in MOMENTS and entry.shape != shapes[aliases.get(key.fqn, key.fqn)]:
            raise MalformedError("the optimizer's state and the model's parameter have different shapes", key=str(key))


def _put_below(part: str, by_name: Mapping[str, Value]) -> dict[str, Value]:
    return {f"{part}.{name}": value for name, value in by_name.items()}
