"""Trees of dicts, lists, tensors and other values, compared."""

from typing import Any

import numpy as np
import torch


def assert_same_tree(want: Any, got: Any, path: str = "") -> None:
    """The same types, values and bits, all the way down."""
    assert type(want) is type(got), f"{path}: {type(want)} became {type(got)}"
    if isinstance(want, dict):
        assert list(want) == list(got) or set(want) == set(got), path
        for key in want:
            assert_same_tree(want[key], got[key], f"{path}.{key}")
    elif isinstance(want, list | tuple):
        assert len(want) == len(got), path
        for position, (a, b) in enumerate(zip(want, got, strict=True)):
            assert_same_tree(a, b, f"{path}.{position}")
    elif isinstance(want, torch.Tensor):
        assert (want.dtype, want.shape) == (got.dtype, got.shape), path
        assert want.reshape(-1).view(torch.uint8).equal(got.reshape(-1).view(torch.uint8)), path
    elif isinstance(want, np.ndarray):
        assert (want.dtype, want.shape, want.tobytes()) == (got.dtype, got.shape, got.tobytes()), path
    else:
        assert want == got or want != want, f"{path}: {want!r} became {got!r}"
