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

_DEFAULT_FACTORIES = {kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}
"""What a ``defaultdict`` may call."""

_DTYPE = GlobalRef("numpy", "dtype")
_DEQUE = GlobalRef("collections", "deque")
_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


def revive_value(
    value: Value, *, load_tensor: Callable[[TensorRef], Any], handle_unknown: Callable[[Value], Any]
) -> Any:
    """``value`` as live objects: ``load_tensor`` gives those of references, ``handle_unknown`` what stands for other
    objects.

    What was shared stays shared. Raises what the two functions raise.
    """
    return _Reviver(load_tensor, handle_unknown).revive_value(value)


class _Reviver:
    def __init__(self, load_tensor: Callable[[TensorRef], Any], handle_unknown: Callable[[Value], Any]) -> None:
        self._load_tensor = load_tensor
        self._handle_unknown = handle_unknown
        self._live_by_id: dict[int, Any] = {}

    def revive_value(self, value: Value) -> Any:
        if isinstance(value, TensorRef):
            return self._load_tensor(value)
        if id(value) not in self._live_by_id:
            self._live_by_id[id(value)] = self._make_live(value)
        return self._live_by_id[id(value)]

    def _make_live(self, value: Value) -> Any:
        if isinstance(value, dict):
            return self._make_dict(value)
        if isinstance(value, list):
            return [self.revive_value(item) for item in value]
        if isinstance(value, Size):
            return _import_torch().Size(value)
        if isinstance(value, tuple | set | frozenset):
            return type(value)(self.revive_value(item) for item in value)
        if isinstance(value, GlobalRef):
            return self._handle_unknown(value) if value.dtype is None else getattr(_import_torch(), value.dtype.value)
        if isinstance(value, StoredTensor):
            return _import_torch().empty(value.shape, dtype=getattr(_import_torch(), value.dtype.value), device="meta")
        return self._make_object(value) if isinstance(value, Opaque) else value

    def _make_dict(self, value: dict[Any, Any]) -> Any:
        items = {self.revive_value(key): self.revive_value(item) for key, item in value.items()}
        if isinstance(value, OrderedDict):
            ordered = collections.OrderedDict(items)
            if value.attributes is not None:
                ordered.__dict__.update(self.revive_value(value.attributes))
            return ordered
        if isinstance(value, DefaultDict):
            factory_ref = value.factory
            is_builtin = isinstance(factory_ref, GlobalRef) and factory_ref.module == "builtins"
            factory = _DEFAULT_FACTORIES.get(factory_ref.name) if is_builtin else None
            return self._handle_unknown(value) if factory is None else collections.defaultdict(factory, items)
        return items

    def _make_object(self, value: Opaque) -> Any:
        if value.ref == _DEQUE and len(value.args) in (1, 2) and not value.args[0] and value.state is None:
            return collections.deque(self.revive_value(value.items), *value.args[1:])
        makers_by_ref = _CALL_MAKERS if value.form == "call" else _NEW_MAKERS
        make = makers_by_ref.get(value.ref) if isinstance(value.ref, GlobalRef) else None
        if make is None or value.kwargs or value.items or value.pairs:
            return self._handle_unknown(value)
        try:
            return make(*value.args) if value.state is None else make(*value.args, state=value.state)
        except (TypeError, ValueError, LookupError, OverflowError):
            return self._handle_unknown(value)


def _import_torch() -> Any:
    import torch

    return torch


def _make_array(array_type: Value, shape: Value, code: Value, *, state: Value) -> Any:
    """``numpy._reconstruct`` and the state of an array: version, shape, dtype, whether columns go first, bytes."""
    _, shape, dtype, is_fortran, data = state
    if array_type != GlobalRef("numpy", "ndarray") or not isinstance(data, bytes):
        raise TypeError
    flat: Any = np.frombuffer(data, _parse_dtype(dtype))
    return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")


def _make_scalar(dtype: Value, data: Value) -> Any:
    if not isinstance(data, bytes):
        raise TypeError
    return np.frombuffer(data, _parse_dtype(dtype), count=1)[0]


def _parse_dtype(value: Value) -> Any:
    """A pickled numpy dtype of plain elements: ``dtype(code, False, True)`` with its byte order in the state."""
    if not isinstance(value, Opaque) or value.ref != _DTYPE or not isinstance(value.args[0], str):
        raise TypeError
    order: Any = value.state[1] if value.state else "="
    dtype = np.dtype(value.args[0]).newbyteorder(order)
    if dtype.hasobject or dtype.names:
        raise TypeError
    return dtype


def _make_counter(counts: Value) -> Any:
    if not isinstance(counts, dict):
        raise TypeError
    return collections.Counter(counts)


def _make_stream(*, state: Value) -> Any:
    data, position, attributes = state
    if not isinstance(data, bytes) or attributes:
        raise TypeError
    stream = io.BytesIO(data)
    stream.seek(position)
    return stream


def _make_device(*args: Value) -> Any:
    try:
        return _import_torch().device(*args)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


_CALL_MAKERS: dict[GlobalRef, Callable[..., Any]] = {
    **{GlobalRef(module, "_reconstruct"): _make_array for module in _ARRAY_MODULES},
    **{GlobalRef(module, "scalar"): _make_scalar for module in _ARRAY_MODULES},
    _DTYPE: lambda *args, state=None: _parse_dtype(Opaque(_DTYPE, args, state=state)),
    GlobalRef("collections", "Counter"): _make_counter,
    GlobalRef("pathlib", "PosixPath"): pathlib.Path,
    GlobalRef("torch", "device"): _make_device,
}
"""Objects that are made from plain data by these functions, which check it."""

_NEW_MAKERS: dict[GlobalRef, Callable[..., Any]] = {GlobalRef("_io", "BytesIO"): _make_stream}
"""The same for objects whose class is called without its ``__init__``."""
