"""Arrays of elements that were read, as torch tensors of the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.dtypes import DType
from ckpt_tools.torch.fill import torch_dtype

if TYPE_CHECKING:
    import torch


def tensor_of(elements: NDArray[Any], dtype: DType) -> torch.Tensor:
    """``elements``, whose bytes are of ``dtype`` whatever numpy calls them, as a tensor.

    The memory is shared. It is copied only if the elements do not lie in row-major order, as after a step.

    Raises:
        UnsupportedError: the installed torch does not have ``dtype``.
    """
    import torch

    wanted = torch_dtype(dtype)
    if not elements.size:
        return torch.empty(elements.shape, dtype=wanted)
    raw = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    return torch.from_numpy(raw).view(wanted).reshape(elements.shape)
