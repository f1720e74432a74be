"""The optimizer of Megatron-FSDP under the names of its weights. Pure.

Megatron-LM and Megatron-Bridge save a run of Megatron-FSDP with ``torch.distributed.checkpoint.save``
(``--ckpt-format fsdp_dtensor``; megatron-core 0.16.1, Megatron-LM of 2026-08). Three things differ from other DCPs:

- ``optimizer.state.<name>.<slot>`` has more wrappers in front of a name than ``model.<name>`` (``module.`` once for
  each; optimizer/distrib_optimizer.py, ``_param_name``). Without the leading parts ``module`` and ``model`` the names
  are the same (transformer/fsdp_dtensor_checkpoint.py, ``_strip_wrapper_prefixes``).
- Groups are kept by parameter, ``optimizer.param_to_group_meta.<name>.<option>``. The optimizers of Transformer Engine
  and Apex count steps in the group, so that ``step`` is an option.
- Weights whose parts tensor parallelism cuts one by one are split (the same file, ``handle_..._in_state_dict``): fc1 of
  a SwiGLU layer into ``<name>_w`` (gate) and ``<name>_v`` (up). ``exp_avg`` and ``exp_avg_sq`` are split alike; any
  other slot is whole under each part. ``param_to_group_meta`` has the names of before.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import make_literal_file_name
from ckpt_tools.core.manifest import TreePath, join_path
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.core.values import Opaque, ValueNumbering
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.leaves import LeafCollector

GROUP_METADATA = "param_to_group_meta"

_WRAPPERS = re.compile(r"(?:(?:module|model)\.)*")

_SPLIT_PART_PATTERNS = (
    (re.compile(r"_[wv]$"), ""),
    (re.compile(r"\.(?:query|key|value|z|beta|alpha)$"), ""),
    (re.compile(r"\.linear_(?:q|kv)_down_proj\."), ".linear_qkv_down_proj."),
    (re.compile(r"\.input_layernorm\."), ".self_attention.linear_qkv_down_proj.layer_norm_"),
)
"""What turns the name of a part into that of the parameter that was split: SwiGLU, gated delta nets, latent attention
with one down projection, which has the norm before it."""

MAX_STEP = 1 << 24
"""Steps become float32, as torch's Adam counts them: it has no larger whole number whose neighbours it has too."""

_UNSCALED_DTYPES = (DType.FLOAT32, DType.BFLOAT16)
"""Dtypes of moments that stand for themselves: others have a scale, which the checkpoint does not hold
(TransformerEngine, pytorch/optimizers/fused_adam.py, ``_scales``)."""


def rename_optimizer_state(leaves: LeafCollector, literals: dict[str, bytes]) -> LeafCollector:
    """The leaves with the optimizer's state and groups under the names that the model has for the weights; those of
    another checkpoint as they are. Steps become files of ``literals``.

    Raises:
        UnsupportedError: a name of the optimizer is not that of exactly one weight, state has another shape than its
            weight, or the run kept something else under one name.
    """
    optimizer_paths = {path[: path.index(GROUP_METADATA)] for path in leaves.paths.values() if GROUP_METADATA in path}
    if not optimizer_paths and _get_run_arguments(leaves).get("ckpt_format") != "fsdp_dtensor":
        return leaves
    _refuse_pipeline_stages(leaves)
    if not optimizer_paths:
        return leaves
    if len(optimizer_paths) > 1:
        listed = ", ".join(sorted(map(join_path, optimizer_paths)))
        raise UnsupportedError(f"there are several optimizers of Megatron-FSDP ({listed}), which is not supported")
    return _OptimizerRenamer.of(leaves, *optimizer_paths).rename_leaves(literals)


def _get_run_arguments(leaves: LeafCollector) -> Mapping[str, Any]:
    """The arguments of Megatron-LM's command line, by name; empty if they were not saved."""
    args = leaves.objects.get("args")
    return args.attributes if isinstance(args, Opaque) else {}


def _refuse_pipeline_stages(leaves: LeafCollector) -> None:
    """Raises UnsupportedError for a run in pipeline stages: the layers of each are named from 0 on."""
    if (_get_run_arguments(leaves).get("pipeline_model_parallel_size") or 1) != 1:
        raise UnsupportedError(
            "pipeline stages of Megatron-FSDP have the same names for their layers, so that the checkpoint holds those "
            "of one stage alone",
            key="args.pipeline_model_parallel_size",
        )


def _strip_wrappers(name: str) -> str:
    return name[_WRAPPERS.match(name).end() :]  # type: ignore[union-attr]  # It matches any text.


def _iter_candidate_names(part: str) -> Iterator[str]:
    """Names that the optimizer may have for the parameter with the weight ``part``, the most likely first."""
    # The layer inside one of multi-token prediction has another name in the model than in checkpoints.
    for name in (part, part.replace(".transformer_layer.", ".mtp_model_layer.")):
        yield name
        for pattern, before in _SPLIT_PART_PATTERNS:
            other, count = pattern.subn(before, name)
            if count:
                yield other


GroupMembers = tuple[list[str], dict[str, Any]]
"""The members of a parameter group, and its options."""


@dataclass(slots=True)
class _OptimizerRenamer:
    """One checkpoint whose optimizer lies at ``optim_path``. ``weights`` has the name and shape of each weight by its
    name without wrappers."""

    source: LeafCollector
    optim_path: TreePath
    weights: Mapping[str, tuple[str, Shape]]
    optimizer_names: dict[str, str] = field(default_factory=dict)
    """The optimizer's name of each weight that has state."""
    names_with_step: set[str] = field(default_factory=set)
    """Weights that have a step of their own."""

    @classmethod
    def of(cls, source: LeafCollector, optim_path: TreePath) -> _OptimizerRenamer:
        """Raises UnsupportedError if two weights have one name without wrappers."""
        model = (*optim_path[:-1], "model")
        weights: dict[str, tuple[str, Shape]] = {}
        for name, tensor in source.tensors.items():
            path = source.paths[name]
            if path[:-1] == model:
                fqn = str(path[-1])
                known_fqn, _ = weights.setdefault(_strip_wrappers(fqn), (fqn, tensor.shape))
                if known_fqn != fqn:
                    raise UnsupportedError(
                        f"without leading 'module.' and 'model.' it has the name of {known_fqn}", key=name
                    )
        return cls(source, optim_path, weights)

    def rename_leaves(self, literals: dict[str, bytes]) -> LeafCollector:
        # weight          module.X.fc1.weight_w                     the name that the result uses
        # state           module.module.X.fc1.weight_w, exp_avg     more wrappers, split as the weight is
        # group option    module.module.X.fc1.weight, lr            more wrappers, the name from before the split
        # All three meet in the name without wrappers (_strip_wrappers); _iter_candidate_names undoes the split.
        paths: dict[str, TreePath] = {}
        options: dict[str, dict[str, Any]] = {}
        for name, path in self.source.paths.items():
            match path[len(self.optim_path) :] if path[: len(self.optim_path)] == self.optim_path else ():
                case ():
                    paths[name] = path
                case ("state", str(parameter), str(slot)):
                    paths[name] = (*self.optim_path, "state", self._resolve_weight(name, parameter, slot), slot)
                case (part, str(parameter), str(option)) if part == GROUP_METADATA and name in self.source.objects:
                    options.setdefault(_strip_wrappers(parameter), {})[option] = self.source.objects[name]
                case _:
                    raise UnsupportedError("Megatron-FSDP keeps no such entry in its optimizer", key=name)
        objects = {name: value for name, value in self.source.objects.items() if name in paths}
        tensors = dict(self.source.tensors)
        groups, steps = self._collect_groups(options)
        for fqn, step in steps.items():
            path = (*self.optim_path, "state", fqn, "step")
            file = make_literal_file_name(f"step {step}")
            literals[file] = struct.pack("<f", step)
            table = ShardTable.whole((), DType.FLOAT32, ByteRange(file, 0, 4))
            paths[join_path(path)], tensors[join_path(path)] = path, TensorLeaf((), DType.FLOAT32, table)
        for number, (fqns, group_options) in enumerate(groups):
            for name, value in {"params": fqns, **group_options}.items():
                path = (*self.optim_path, "param_groups", number, name)
                paths[join_path(path)], objects[join_path(path)] = path, value
        return replace(self.source, paths=paths, objects=objects, tensors=tensors)

    def _resolve_weight(self, name: str, parameter: str, slot: str) -> str:
        """The model's name of the weight whose state the leaf ``name`` is. Raises UnsupportedError."""
        if _strip_wrappers(parameter) not in self.weights:
            raise UnsupportedError("it is optimizer state of a parameter that the model does not have", key=name)
        fqn, shape = self.weights[_strip_wrappers(parameter)]
        if self.optimizer_names.setdefault(fqn, parameter) != parameter:
            raise UnsupportedError(
                f"the optimizer has state of the same weight as {self.optimizer_names[fqn]}", key=name
            )
        tensor = self.source.tensors.get(name)
        if slot == "step":
            self.names_with_step.add(fqn)
        elif tensor is not None and tensor.shape != shape:
            raise UnsupportedError(
                f"it has the shape {list(tensor.shape)}, and its weight {list(shape)}: Megatron-FSDP splits exp_avg "
                "and exp_avg_sq with a weight, and no other state; save it without the optimizer (--no-save-optim)",
                key=name,
            )
        elif tensor is not None and (tensor.dtype not in _UNSCALED_DTYPES or slot == "master_param"):
            raise UnsupportedError(
                "it is state of Transformer Engine's precision-aware optimizer, whose scales and remainders are not "
                "supported; save it without the optimizer (--no-save-optim)",
                key=name,
            )
        return fqn

    def _collect_groups(self, options: Mapping[str, Mapping[str, Any]]) -> tuple[list[GroupMembers], dict[str, int]]:
        """The groups of parameters with the same ``options``, and the steps that groups counted, by weight.

        Raises UnsupportedError."""
        distinct = ValueNumbering()
        groups: dict[int, GroupMembers] = {}
        steps: dict[str, int] = {}
        unmatched_names = set(options)
        for bare, (fqn, _) in self.weights.items():
            optimizer_name = next((name for name in _iter_candidate_names(bare) if name in options), None)
            if optimizer_name is None:
                if fqn in self.optimizer_names:
                    raise UnsupportedError(f"it has optimizer state, but no entry in {GROUP_METADATA}", key=fqn)
                continue
            unmatched_names.discard(optimizer_name)
            group_options = dict(sorted(options[optimizer_name].items()))
            step = group_options.pop("step", None)
            groups.setdefault(distinct.get_number(group_options), ([], group_options))[0].append(fqn)
            if step is not None and (type(step) is not int or not 0 <= step <= MAX_STEP):
                raise UnsupportedError(
                    f"its step in {GROUP_METADATA} is not a whole number up to {MAX_STEP:,}", key=fqn
                )
            if step is not None and fqn in self.optimizer_names and fqn not in self.names_with_step:
                steps[fqn] = step
        if unmatched_names:
            raise UnsupportedError(
                f"the model does not have this parameter of {GROUP_METADATA}", key=min(unmatched_names)
            )
        return list(groups.values()), steps
