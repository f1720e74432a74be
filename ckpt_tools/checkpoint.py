"""A checkpoint as a mapping of arrays that are read when they are indexed, and only there.

Whatever the format, the world size and the place: ``open(url)["encoder.pos_embedding"][0, 3:7]`` reads the bytes of
those elements and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType, to_numpy
from ckpt_tools.core.indexing import resolve_index
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.messages.wording import find_nearest, format_count, join_names
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

SCRATCH_BYTES = 4 << 20
"""Blocks read to be placed strided, and rows read ahead of an iteration; a result is the caller's memory."""

_CPU_DEVICE = (1, 0)
"""DLPack's device type ``kDLCPU``, and the device's number."""

_NO_VIEW_MESSAGE = "a stored tensor is read into new memory; copy=False cannot be had"


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """One tensor, not read yet. Indexing it as numpy does, with integers, slices, arrays of integers and masks, reads
    that part."""

    key: StateKey
    entry: TensorEntry
    _reader: TensorReader

    def __repr__(self) -> str:
        return f"LazyTensor({str(self.key)!r}, shape={self.shape}, dtype={self.dtype_name})"

    @property
    def shape(self) -> Shape:
        return self.entry.shape

    @property
    def dtype_name(self) -> str:
        """The dtype as torch calls it, without ``torch.``: ``bfloat16``. Every tensor has one."""
        return str(self.entry.dtype.value)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of what indexing gives; bfloat16 and the 8-bit floats are those of ml_dtypes.

        Raises:
            UnsupportedError: complex32 or packed values, which numpy does not have.
        """
        try:
            return to_numpy(self.entry.dtype)
        except KeyError as error:
            message = f"numpy has no {self.dtype_name}; read it with .torch()"
            raise UnsupportedError(message, key=str(self.key)) from error

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.entry.numel

    @property
    def nbytes(self) -> int:
        return self.entry.num_bytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Arrays along the first dim, read in blocks."""
        row_bytes = max(1, self.nbytes // max(1, len(self)))
        rows_per_block = max(1, SCRATCH_BYTES // row_bytes)
        for first_row in range(0, len(self), rows_per_block):
            yield from self[first_row : first_row + rows_per_block]

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """The elements at ``index``, as numpy would give them of the whole array. Raises IndexError."""
        return self._read_elements(index).view(self.dtype)

    def numpy(self) -> NDArray[Any]:
        """The whole tensor as a new array."""
        return self[...]

    def torch(self, index: Any = ...) -> torch.Tensor:
        """The tensor, or the part of it at ``index``, as a torch tensor in host memory. What is read is not copied.

        Raises:
            UnsupportedError: the installed torch does not have this dtype. IndexError.
        """
        from ckpt_tools.torch.fill import make_tensor

        return make_tensor(self._read_elements(index), self.entry.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(_NO_VIEW_MESSAGE)
        return self[...].astype(dtype or self.dtype, copy=False)

    def __dlpack__(self, *, copy: bool | None = None, **dlpack_options: Any) -> Any:
        """A capsule with the tensor's elements. torch takes it before it looks for a length and items.

        Raises:
            BufferError: ``copy=False``. UnsupportedError: only torch has this dtype, and the installed one does not.
        """
        if copy is False:
            raise BufferError(_NO_VIEW_MESSAGE)
        # ml_dtypes adds types to numpy that numpy cannot hand on.
        needs_torch_dtype = self.entry.dtype is DType.COMPLEX32 or self.entry.dtype.num_values > 1
        is_native_numpy = not needs_torch_dtype and self.dtype.isbuiltin == 1
        return (self.numpy() if is_native_numpy else self.torch()).__dlpack__(**dlpack_options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU_DEVICE

    def _read_elements(self, index: Any) -> NDArray[Any]:
        """The elements at ``index`` as bare bytes of an element's width."""
        region = resolve_index(index, self.shape)
        elements = np.empty(region.shape, np.dtype((np.void, self.entry.dtype.item_bytes)))
        raw_bytes, start = elements.reshape(-1).view(np.uint8), 0
        for box in region.boxes:
            stop = start + box.numel * elements.itemsize
            if box.numel:
                self._reader.read(self.entry, box, self.shape, 0, box.numel, raw_bytes[start:stop].data)
            start = stop
        if elements.size == self.size:
            self._reader.check_remaining_records()
        part: NDArray[Any] = elements[region.local_index]
        return part


class _ClosedStore(Store):
    """The store of a checkpoint that was closed."""

    url = "a closed checkpoint"

    def list(self) -> Mapping[str, int]:
        raise ValueError(_CLOSED_MESSAGE)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        raise ValueError(_CLOSED_MESSAGE)


_CLOSED_MESSAGE = "the checkpoint is closed; read its tensors before that, or open it again"

MAX_HTML_ROWS = 60
"""Of the table that a notebook shows."""

MAX_LISTED_SLOTS = 10


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Checkpoint(Mapping[str, LazyTensor]):
    """The weights of a checkpoint by name, ties under every name they have; ``state`` leads to the optimizer's.

    A weight with an fp32 master is read from its master; ``model_copy`` gives the model's own.

    As a context manager it closes its files at the end. Without one they are closed when the checkpoint and its tensors
    are no longer referenced.
    """

    manifest: Manifest
    _reader: TensorReader
    _config: Callable[[], Mapping[str, Any]]

    @classmethod
    def of(cls, store: Store, manifest: Manifest, config: Callable[[], Mapping[str, Any]] = dict) -> Checkpoint:
        """``config`` reads the model's ``config.json``."""
        return cls(manifest, TensorReader(store, SCRATCH_BYTES), cache(config))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files. Reading a tensor raises ValueError from now on; what was read stays."""
        self._reader.replace_store(_ClosedStore())

    def __repr__(self) -> str:
        return f"Checkpoint({self.manifest.format}, {format_count(len(self), 'weight')}, step={self.step})"

    def _repr_html_(self) -> str:
        shown_tensors = [(name, self[name]) for name in islice(self, MAX_HTML_ROWS)]
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{tensor.dtype_name}</td><td>{list(tensor.shape)}</td></tr>"
            for name, tensor in shown_tensors
        )
        more_line = (
            f"<p>and {format_count(len(self) - len(shown_tensors), 'more weight')}</p>"
            if len(self) > len(shown_tensors)
            else ""
        )
        header = "<tr><th>name</th><th>dtype</th><th>shape</th></tr>"
        return f"<p>{escape(repr(self))}</p><table>{header}{rows}</table>{more_line}"

    def __getitem__(self, name: str) -> LazyTensor:
        """The weight called ``name``. Raises KeyError, which names those that look most like it."""
        if name not in self:
            raise KeyError(f"there is no weight {name!r}{self._suggest_names(name)}")
        master = StateKey(self._find_owner(name), MASTER)
        return self.state(
            name, WEIGHT if self.manifest.masters_are_outdated or master not in self.manifest.tensors else MASTER
        )

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and StateKey(self._find_owner(name)) in self.manifest.tensors

    def model_copy(self, name: str) -> LazyTensor:
        """The weight in the model's own dtype. Raises KeyError."""
        return self.state(name, WEIGHT)

    def state(self, name: str, slot: str) -> LazyTensor:
        """Slots of the optimizer's state of a parameter: ``exp_avg``, ``step``, ... Raises KeyError."""
        key = StateKey(self._find_owner(name), slot)
        if key not in self.manifest.tensors:
            raise KeyError(
                f"there is no {slot!r} of {name!r}{self._describe_slots(key.fqn) or self._suggest_names(name)}"
            )
        return LazyTensor(key, self.manifest.tensors[key], self._reader)

    def _find_owner(self, name: str) -> str:
        """The name that owns the bytes."""
        return self.manifest.aliases.get(name, name)

    def _describe_slots(self, owner: str) -> str:
        slots = [key.slot for key in self.manifest.tensors if key.fqn == owner]
        return f"; it has {join_names(slots, MAX_LISTED_SLOTS)}" if slots else ""

    def _suggest_names(self, name: object) -> str:
        similar_names = find_nearest(name, list(self)) if isinstance(name, str) else ()
        return f"; did you mean {' or '.join(map(repr, similar_names))}?" if similar_names else ""

    def __iter__(self) -> Iterator[str]:
        yield from (key.fqn for key in self.manifest.tensors if key.slot == WEIGHT)
        yield from self.manifest.aliases

    def __len__(self) -> int:
        return sum(key.slot == WEIGHT for key in self.manifest.tensors) + len(self.manifest.aliases)

    @property
    def step(self) -> int | None:
        """The training step."""
        return self.manifest.step

    @property
    def groups(self) -> tuple[ParamGroup, ...]:
        """The optimizer's parameter groups: ``params``, the names of each, and ``options``, its hyperparameters."""
        return tuple(replace(group, options=self._revive_values(group.options)) for group in self.manifest.groups)

    @property
    def extras(self) -> Mapping[str, Any]:
        """Entries that belong neither to the model nor to the optimizer, by the names that ``inspect`` lists: the
        scheduler, counters, ``["hyper_parameters"]`` of Lightning, ``["deepspeed"]["ds_config"]``, the user's own.

        Tensors are ``LazyTensor``; objects of classes are made as ``load_into`` makes them, and stay inert otherwise.
        """
        return self._revive_values(self.manifest.extra)

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's ``config.json``, beside the weights or where ``convert`` finds it; empty if there is none. It is
        read when it is first asked for.

        Raises:
            FormatError, StoreError: it cannot be read.
        """
        return self._config()

    def _revive_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Inert values as Python objects."""
        from ckpt_tools.torch.revive import revive_value

        def make_lazy_tensor(ref: TensorRef) -> LazyTensor:
            return LazyTensor(ref.key, self.manifest.tensors[ref.key], self._reader)

        return {
            name: revive_value(value, load_tensor=make_lazy_tensor, handle_unknown=lambda inert: inert)
            for name, value in values.items()
        }

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read so far."""
        return self._reader.bytes_read
