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
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.formats.state_dict.leaves import FoundLeaves

SIGN = "param_to_group_meta"

_WRAPPERS = re.compile(r"(?:(?:module|model)\.)*")

_PARTS = (
    (re.compile(r"_[wv]$"), ""),
    (re.compile(r"\.(?:query|key|value|z|beta|alpha)$"), ""),
    (re.compile(r"\.linear_(?:q|kv)_down_proj\."), ".linear_qkv_down_proj."),
    (re.compile(r"\.input_layernorm\."), ".self_attention.linear_qkv_down_proj.layer_norm_"),
)
"""What turns the name of a part into that of the parameter that was split: SwiGLU, gated delta nets, latent attention
with one down projection, which has the norm before it."""

MAX_STEP = 1 << 24
"""Steps become float32, as torch's Adam counts them: it has no larger whole number whose neighbours it has too."""

_DTYPES = (DType.FLOAT32, DType.BFLOAT16)
"""Dtypes of moments that stand for themselves: others have a scale, which the checkpoint does not hold
(TransformerEngine, pytorch/optimizers/fused_adam.py, ``_scales``)."""


def of_weights(found: FoundLeaves, literals: dict[str, bytes]) -> FoundLeaves:
    """The leaves with the optimizer's state and groups under the names that the model has for the weights; those of
    another checkpoint as they are. Steps become files of ``literals``.

    Raises:
        UnsupportedError: a name of the optimizer is not that of exactly one weight, state has another shape than its
            weight, or the run kept something else under one name.
    """
    optimizers = {path[: path.index(SIGN)] for path in found.paths.values() if SIGN in path}
    if not optimizers and _arguments(found).get("ckpt_format") != "fsdp_dtensor":
        return found
    _refuse_stages(found)
    if not optimizers:
        return found
    if len(optimizers) > 1:
        listed = ", ".join(sorted(map(join_path, optimizers)))
        raise UnsupportedError(f"there are several optimizers of Megatron-FSDP ({listed}), which is not supported")
    return _Renaming.of(found, *optimizers).leaves(literals)


def _arguments(found: FoundLeaves) -> Mapping[str, Any]:
    """Those of Megatron-LM's command line."""
    args = found.objects.get("args")
    return args.attributes if isinstance(args, Opaque) else {}


def _refuse_stages(found: FoundLeaves) -> None:
    """Raises UnsupportedError for a run in pipeline stages: the layers of each are named from 0 on."""
    if (_arguments(found).get("pipeline_model_parallel_size") or 1) != 1:
        raise UnsupportedError(
            "pipeline stages of Megatron-FSDP have the same names for their layers, so that the checkpoint holds those "
            "of one stage alone",
            key="args.pipeline_model_parallel_size",
        )


def _bare(name: str) -> str:
    return name[_WRAPPERS.match(name).end() :]  # type: ignore[union-attr]  # It matches any text.


def _whole(part: str) -> Iterator[str]:
    """Names that the optimizer may have for the parameter with the weight ``part``, the most likely first."""
    # The layer inside one of multi-token prediction has another name in the model than in checkpoints.
    for name in (part, part.replace(".transformer_layer.", ".mtp_model_layer.")):
        yield name
        for pattern, before in _PARTS:
            other, count = pattern.subn(before, name)
            if count:
                yield other


Group = tuple[list[str], dict[str, Any]]
"""The members of a parameter group, and its options."""


@dataclass(slots=True)
class _Renaming:
    """One checkpoint whose optimizer lies at ``optim``. ``weights`` has the name and shape of each weight by its name
    without wrappers."""

    found: FoundLeaves
    optim: TreePath
    weights: Mapping[str, tuple[str, Shape]]
    trained: dict[str, str] = field(default_factory=dict)
    """The optimizer's name of each weight that has state."""
    stepped: set[str] = field(default_factory=set)
    """Weights that have a step of their own."""

    @classmethod
    def of(cls, found: FoundLeaves, optim: TreePath) -> _Renaming:
        """Raises UnsupportedError if two weights have one name without wrappers."""
        model = (*optim[:-1], "model")
        weights: dict[str, tuple[str, Shape]] = {}
        for name, tensor in found.tensors.items():
            path = found.paths[name]
            if path[:-1] == model:
                fqn = str(path[-1])
                known, _ = weights.setdefault(_bare(fqn), (fqn, tensor.shape))
                if known != fqn:
                    raise UnsupportedError(
                        f"without leading 'module.' and 'model.' it has the name of {known}", key=name
                    )
        return cls(found, optim, weights)

    def leaves(self, literals: dict[str, bytes]) -> FoundLeaves:
        paths: dict[str, TreePath] = {}
        options: dict[str, dict[str, Any]] = {}
        for name, path in self.found.paths.items():
            match path[len(self.optim) :] if path[: len(self.optim)] == self.optim else ():
                case ():
                    paths[name] = path
                case ("state", str(parameter), str(slot)):
                    paths[name] = (*self.optim, "state", self._weight_of(name, parameter, slot), slot)
                case (part, str(parameter), str(option)) if part == SIGN and name in self.found.objects:
                    options.setdefault(_bare(parameter), {})[option] = self.found.objects[name]
                case _:
                    raise UnsupportedError("Megatron-FSDP keeps no such entry in its optimizer", key=name)
        objects = {name: value for name, value in self.found.objects.items() if name in paths}
        tensors = dict(self.found.tensors)
        groups, steps = self._groups(options)
        for fqn, step in steps.items():
            path = (*self.optim, "state", fqn, "step")
            file = make_literal_file_name(f"step {step}")
            literals[file] = struct.pack("<f", step)
            table = ShardTable.whole((), DType.FLOAT32, ByteRange(file, 0, 4))
            paths[join_path(path)], tensors[join_path(path)] = path, TensorLeaf((), DType.FLOAT32, table)
        for number, (fqns, own) in enumerate(groups):
            for name, value in {"params": fqns, **own}.items():
                path = (*self.optim, "param_groups", number, name)
                paths[join_path(path)], objects[join_path(path)] = path, value
        return replace(self.found, paths=paths, objects=objects, tensors=tensors)

    def _weight_of(self, name: str, parameter: str, slot: str) -> str:
        """The model's name of the weight whose state the leaf ``name`` is. Raises UnsupportedError."""
        if _bare(parameter) not in self.weights:
            raise UnsupportedError("it is optimizer state of a parameter that the model does not have", key=name)
        fqn, shape = self.weights[_bare(parameter)]
        if self.trained.setdefault(fqn, parameter) != parameter:
            raise UnsupportedError(f"the optimizer has state of the same weight as {self.trained[fqn]}", key=name)
        tensor = self.found.tensors.get(name)
        if slot == "step":
            self.stepped.add(fqn)
        elif tensor is not None and tensor.shape != shape:
            raise UnsupportedError(
                f"it has the shape {list(tensor.shape)}, and its weight {list(shape)}: Megatron-FSDP splits exp_avg "
                "and exp_avg_sq with a weight, and no other state; save it without the optimizer (--no-save-optim)",
                key=name,
            )
        elif tensor is not None and (tensor.dtype not in _DTYPES or slot == "master_param"):
            raise UnsupportedError(
                "it is state of Transformer Engine's precision-aware optimizer, whose scales and remainders are not "
                "supported; save it without the optimizer (--no-save-optim)",
                key=name,
            )
        return fqn

    def _groups(self, options: Mapping[str, Mapping[str, Any]]) -> tuple[list[Group], dict[str, int]]:
        """The groups of parameters with the same ``options``, and the steps that groups counted, by weight.

        Raises UnsupportedError."""
        distinct = ValueNumbering()
        groups: dict[int, Group] = {}
        steps: dict[str, int] = {}
        unused = set(options)
        for bare, (fqn, _) in self.weights.items():
            whole = next((name for name in _whole(bare) if name in options), None)
            if whole is None:
                if fqn in self.trained:
                    raise UnsupportedError(f"it has optimizer state, but no entry in {SIGN}", key=fqn)
                continue
            unused.discard(whole)
            own = dict(sorted(options[whole].items()))
            step = own.pop("step", None)
            groups.setdefault(distinct.get_number(own), ([], own))[0].append(fqn)
            if step is not None and (type(step) is not int or not 0 <= step <= MAX_STEP):
                raise UnsupportedError(f"its step in {SIGN} is not a whole number up to {MAX_STEP:,}", key=fqn)
            if step is not None and fqn in self.trained and fqn not in self.stepped:
                steps[fqn] = step
        if unused:
            raise UnsupportedError(f"the model does not have this parameter of {SIGN}", key=min(unused))
        return list(groups.values()), steps
