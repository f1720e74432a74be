"""Inert values made live: equal to what unpickling would give, and nothing is run."""

import collections
import pathlib
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.torch.revive import revive_value


def revived(value: Any, protocol: int = 2) -> Any:
    """``value`` through a pickle and back; objects that are not known come as ``("unknown", inert)``."""
    inert = loads(pickle.dumps(value, protocol), path="value.pkl")
    return revive_value(inert, load_tensor=lambda ref: ref, handle_unknown=lambda found: ("unknown", found))


KNOWN: dict[str, Any] = {
    "data": {"a": [1, (2.5, None)], "b": {True}, "c": frozenset({b"x"}), 3: 1j},
    "ordered": collections.OrderedDict(b=1, a=2),
    "default": collections.defaultdict(list, {1: [2]}),
    "counter": collections.Counter({3: 2}),
    "python rng": random.Random(0).getstate(),
    "path": pathlib.Path("/a/b"),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "numpy dtype": np.dtype(">i4"),
    "numpy scalar": np.float32(0.5),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", KNOWN)
def test_known_objects(name, protocol):
    found = revived(KNOWN[name], protocol)
    assert found == KNOWN[name]
    assert type(found) is type(KNOWN[name])


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(3, dtype=">i2"),
    np.array(["a", "bc"]),
    np.array(7, np.uint8),
    np.empty((0, 2), np.float32),
]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_arrays(array, protocol):
    found = revived(array, protocol)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert found.flags.writeable and found.flags.f_contiguous == array.flags.f_contiguous


class Own:
    """A class of the user's own."""


class Hostile:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


@pytest.mark.parametrize(
    "value",
    [Own(), Hostile(), Own, np.array([Own()]), collections.defaultdict(Own, {1: 2}), np.random.RandomState(0)],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_are_the_callers_to_decide_on(value, capsys):
    found = revived([value])
    assert found[0][0] == "unknown"
    assert not capsys.readouterr().out


def test_what_was_shared_stays_shared():
    inner = [1]
    found = revived({"a": inner, "b": (inner,)})
    assert found["b"][0] is found["a"]


def test_a_tensor_without_elements_is_on_the_meta_device():
    found = revive_value(
        StoredTensor(None, DType.FLOAT16, 0, (2, 3), (3, 1)), load_tensor=lambda ref: ref, handle_unknown=lambda v: v
    )
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float16, (2, 3))
