"""Inert values as the Python objects that they stood for, without running anything that a checkpoint chose.

Builtin data, containers of ``collections``, what torch itself is described by (``Size``, dtypes, devices) and numpy's
arrays and scalars are made here, by our own calls and from plain data only. Any other object is the caller's to decide
on: making it would be calling what the checkpoint names.
"""

from __future__ import annotations

import collections
import io
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt_tools.core.manifest import TensorRef
from ckpt_tools.core.values import DefaultDict, GlobalRef, Opaque, OrderedDict, Size, StoredTensor, Value

_FACTORIES = {kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}
"""What a ``defaultdict`` may call."""

_DTYPE = GlobalRef("numpy", "dtype")
_DEQUE = GlobalRef("collections", "deque")
_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


def revive(value: Value, *, tensor: Callable[[TensorRef], Any], unknown: Callable[[Value], Any]) -> Any:
    """``value`` as live objects: ``tensor`` gives those of references, ``unknown`` what stands for other objects.

    What was shared stays shared. Raises what the two functions raise.
    """
    return _Reviver(tensor, unknown).visit(value)


class _Reviver:
    def __init__(self, tensor: Callable[[TensorRef], Any], unknown: Callable[[Value], Any]) -> None:
        self._tensor = tensor
        self._unknown = unknown
        self._made: dict[int, Any] = {}

    def visit(self, value: Value) -> Any:
        if isinstance(value, TensorRef):
            return self._tensor(value)
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value)
        return self._made[id(value)]

    def _make(self, value: Value) -> Any:
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, list):
            return [self.visit(item) for item in value]
        if isinstance(value, Size):
            return _torch().Size(value)
        if isinstance(value, tuple | set | frozenset):
            return type(value)(self.visit(item) for item in value)
        if isinstance(value, GlobalRef):
            return self._unknown(value) if value.dtype is None else getattr(_torch(), value.dtype.value)
        if isinstance(value, StoredTensor):
            return _torch().empty(value.shape, dtype=getattr(_torch(), value.dtype.value), device="meta")
        return self._object(value) if isinstance(value, Opaque) else value

    def _dict(self, value: dict[Any, Any]) -> Any:
        items = {self.visit(key): self.visit(item) for key, item in value.items()}
        if isinstance(value, OrderedDict):
            ordered = collections.OrderedDict(items)
            if value.attributes is not None:
                ordered.__dict__.update(self.visit(value.attributes))
            return ordered
        if isinstance(value, DefaultDict):
            ref = value.factory
            is_builtin = isinstance(ref, GlobalRef) and ref.module == "builtins"
            factory = _FACTORIES.get(ref.name) if is_builtin else None
            return self._unknown(value) if factory is None else collections.defaultdict(factory, items)
        return items

    def _object(self, value: Opaque) -> Any:
        if value.ref == _DEQUE and len(value.args) in (1, 2) and not value.args[0] and value.state is None:
            return collections.deque(self.visit(value.items), *value.args[1:])
        makers = _MAKERS if value.form == "call" else _NEW_MAKERS
        make = makers.get(value.ref) if isinstance(value.ref, GlobalRef) else None
        if make is None or value.kwargs or value.items or value.pairs:
            return self._unknown(value)
        try:
            return make(*value.args) if value.state is None else make(*value.args, state=value.state)
        except (TypeError, ValueError, LookupError, OverflowError):
            return self._unknown(value)


def _torch() -> Any:
    import torch

    return torch


def _array(kind: Value, shape: Value, code: Value, *, state: Value) -> Any:
    """``numpy._reconstruct`` and the state of an array: version, shape, dtype, whether columns go first, bytes."""
    _, shape, dtype, is_fortran, data = state
    if kind != GlobalRef("numpy", "ndarray") or not isinstance(data, bytes):
        raise TypeError
    flat: Any = np.frombuffer(data, _dtype(dtype))
    return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")


def _scalar(dtype: Value, data: Value) -> Any:
    if not isinstance(data, bytes):
        raise TypeError
    return np.frombuffer(data, _dtype(dtype), count=1)[0]


def _dtype(value: Value) -> Any:
    """A pickled numpy dtype of plain elements: ``dtype(code, False, True)`` with its byte order in the state."""
    if not isinstance(value, Opaque) or value.ref != _DTYPE or not isinstance(value.args[0], str):
        raise TypeError
    order: Any = value.state[1] if value.state else "="
    dtype = np.dtype(value.args[0]).newbyteorder(order)
    if dtype.hasobject or dtype.names:
        raise TypeError
    return dtype


def _counter(counts: Value) -> Any:
    if not isinstance(counts, dict):
        raise TypeError
    return collections.Counter(counts)


def _stream(*, state: Value) -> Any:
    data, position, attributes = state
    if not isinstance(data, bytes) or attributes:
        raise TypeError
    stream = io.BytesIO(data)
    stream.seek(position)
    return stream


def _device(*args: Value) -> Any:
    try:
        return _torch().device(*args)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


_MAKERS: dict[GlobalRef, Callable[..., Any]] = {
    **{GlobalRef(module, "_reconstruct"): _array for module in _ARRAY_MODULES},
    **{GlobalRef(module, "scalar"): _scalar for module in _ARRAY_MODULES},
    _DTYPE: lambda *args, state=None: _dtype(Opaque(_DTYPE, args, state=state)),
    GlobalRef("collections", "Counter"): _counter,
    GlobalRef("pathlib", "PosixPath"): pathlib.Path,
    GlobalRef("torch", "device"): _device,
}
"""Objects that are made from plain data by these functions, which check it."""

_NEW_MAKERS: dict[GlobalRef, Callable[..., Any]] = {GlobalRef("_io", "BytesIO"): _stream}
"""The same for objects whose class is called without its ``__init__``."""
