"""Modules with uninitialized parameters, which a checkpoint is about to fill.

Initialising a model of 1 GB takes three times as long as reading it. The device "meta" would also lose tables
(positions, frequencies) that are not parameters and in no checkpoint. So parameters are allocated in place and their
initialisation is skipped; their memory is not touched before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ckpt_tools.errors import UsageError

FILLING_METHODS = frozenset({"normal_", "uniform_", "erfinv_", "mul_", "add_", "clamp_", "zero_", "fill_"})
"""Tensor methods that ``torch.nn.init`` and the libraries' initialisation use."""


class SkipInitialisation(TorchFunctionMode):
    """Skips parameter initialisation in the block, for modules whose parameters are all loaded afterwards."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        target = args[0] if args else keywords.get("tensor")
        fills = getattr(func, "__module__", None) == "torch.nn.init" or getattr(func, "__name__", "") in FILLING_METHODS
        if isinstance(target, nn.Parameter) and fills:
            return target
        return func(*args, **keywords)


def allocate_meta_tensors(model: nn.Module, device: str | torch.device) -> nn.Module:
    """``model`` itself, with memory on ``device`` for its meta tensors. Tied tensors stay tied. Raises UsageError if
    one of these is in no checkpoint, so that nothing would fill it."""
    allocated: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for prefix, module in model.named_modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in saved:
                        table = f"{prefix}.{name}".lstrip(".")
                        where = "is on the meta device, and no checkpoint has it; build the model elsewhere"
                        raise UsageError(f"the model's table {table} {where}")
                    _, holder[name] = allocated.setdefault(id(tensor), (tensor, _make_empty_like(tensor, device)))
    return model


def _make_empty_like(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
