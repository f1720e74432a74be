"""Joins a model with the optimizer in a file beside it: ``optimizer.bin`` or ``optimizer.pt``.

accelerate (1.15, checkpointing.py ``save_accelerator_state``, utils/fsdp_utils.py ``save_fsdp_optimizer``) and the
Trainer of transformers (5.x, trainer.py ``_save_optimizer_and_scheduler``) write it beside ``model.safetensors`` or
``pytorch_model*.bin``. With FSDP the parameters are known by name, without it by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.manifest import Kind, Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import FormatError, MalformedError, UnsupportedError
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import read_manifest
from ckpt_tools.formats.torch.files import read_torch_tree
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.parse import TreeLeaves, build_manifest
from ckpt_tools.stores.source import Source

JOINABLE_FORMATS = ("safetensors", "torch")
"""Formats of a model that can have its optimizer in another file."""

_PARAMETER_SHAPED_SLOTS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "grad_avg")
)
"""Slots that have the shape of their parameter."""

MODEL_KEY, OPTIMIZER_KEY = "model", "optimizer"
"""Keys of both in the joined tree."""


def read_model_and_optimizer(reader: Format, source: Source, file: str, options: ReadOptions) -> tuple[Manifest, bool]:
    """The manifest of ``source`` with the optimizer of ``file``, and whether that was joined: an optimizer in the
    checkpoint itself wins.

    Raises:
        CkptError: as the reader; the file cannot be read, or is of another model.
    """
    model = read_manifest(reader, source, replace(options, model_key=None, optim_key=None, param_order=None))
    if _is_model_alone(model):
        return _join_optimizer_file(model, source, file, options), True
    return read_manifest(reader, source, options), False


def _is_model_alone(manifest: Manifest) -> bool:
    kinds = {entry.kind for entry in manifest.tensors.values()}
    is_model = bool(kinds) and kinds <= {Kind.PARAMETER, Kind.BUFFER} and manifest.extra.keys() <= {HEADER_ENTRY}
    return manifest.format in JOINABLE_FORMATS and is_model and not manifest.groups


def _join_optimizer_file(manifest: Manifest, source: Source, file: str, options: ReadOptions) -> Manifest:
    try:
        tree = read_torch_tree(source, file)
        return _join_leaves(manifest, tree.build_leaves(), tree.ties, options)
    except FormatError as error:
        raise type(error)(
            f"{error.message}; it lies beside the model, whose file can be named to read the weights alone",
            path=error.path or file,
            key=error.key,
        ) from error


def _join_leaves(
    manifest: Manifest, optimizer_leaves: TreeLeaves, optimizer_ties: Mapping[str, str], options: ReadOptions
) -> Manifest:
    if not any(path[:1] == ("param_groups",) for path in optimizer_leaves.paths.values()):
        raise UnsupportedError("it does not hold the state of one optimizer of torch")
    model_paths = {
        _join_name(MODEL_KEY, name): (MODEL_KEY, name)
        for name in (*(key.fqn for key in manifest.tensors), *manifest.aliases)
    }
    optimizer_paths = {
        _join_name(OPTIMIZER_KEY, name): (OPTIMIZER_KEY, *path)
        for name, path in optimizer_leaves.paths.items()
        if path != ("state",)
    }
    weights = {
        _join_name(MODEL_KEY, key.fqn): TensorLeaf(entry.shape, entry.dtype, entry.shards)
        for key, entry in manifest.tensors.items()
    }
    ties = {_join_name(MODEL_KEY, alias): _join_name(MODEL_KEY, owner) for alias, owner in manifest.aliases.items()}
    is_ordered = manifest.format == "torch" and len(manifest.files) == 1
    joined = build_manifest(
        TreeLeaves(
            {**model_paths, **optimizer_paths},
            {**weights, **{_join_name(OPTIMIZER_KEY, name): leaf for name, leaf in optimizer_leaves.tensors.items()}},
            {
                name: value
                for each, value in optimizer_leaves.objects.items()
                if (name := _join_name(OPTIMIZER_KEY, each)) in optimizer_paths
            },
            optimizer_leaves.inner,
            is_ordered=is_ordered,
        ),
        format_name=manifest.format,
        model_key=options.model_key or MODEL_KEY,
        optim_key=options.optim_key or OPTIMIZER_KEY,
        ties=ties
        | {
            _join_name(OPTIMIZER_KEY, alias): _join_name(OPTIMIZER_KEY, owner)
            for alias, owner in optimizer_ties.items()
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
        if key.slot in _PARAMETER_SHAPED_SLOTS and entry.shape != shapes[aliases.get(key.fqn, key.fqn)]:
            raise MalformedError("the optimizer's state and the model's parameter have different shapes", key=str(key))


def _join_name(part: str, name: str) -> str:
    return f"{part}.{name}"
