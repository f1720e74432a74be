"""Element type conversion, block by block, as torch does it.

Widening is exact and narrowing rounds to nearest even, which is what numpy, ml_dtypes and torch agree on for every
number. They differ in what becomes of a NaN's payload; see ``_quiet_nans``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.dtypes import DType, to_numpy
from ckpt_tools.errors import UnsupportedError

CASTABLE = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
"""The types between which weights are cast. The 8-bit ones mean nothing without the scales stored beside them."""


def check_cast(source: DType, target: DType) -> None:
    """Raises UnsupportedError where ``source`` cannot become ``target``."""
    if source is not target and not {source, target} <= CASTABLE:
        raise UnsupportedError(f"{source.value} is not cast to {target.value}")


def cast_into(elements: NDArray[Any], source: DType, out: memoryview, target: DType) -> None:
    """Write ``elements``, whose bytes are ``source``, as ``target`` into ``out``, which has exactly their room."""
    values = elements.view(to_numpy(source))
    result = np.frombuffer(out, dtype=to_numpy(target))
    with np.errstate(over="ignore", invalid="ignore"):
        result[:] = values
