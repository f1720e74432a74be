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
from ckpt_tools.core.indexing import selection
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.wording import count, listed, nearest
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

SCRATCH_BYTES = 4 << 20
"""Blocks read to be placed strided, and rows read ahead of an iteration; a result is the caller's memory."""

_HOST = (1, 0)
"""DLPack's device type ``kDLCPU``, and the device's number."""

_NO_VIEW = "a stored tensor is read into new memory; copy=False cannot be had"


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
        step = max(1, SCRATCH_BYTES // row_bytes)
        for first in range(0, len(self), step):
            yield from self[first : first + step]

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """The elements at ``index``, as numpy would give them of the whole array. Raises IndexError."""
        return self._part(index).view(self.dtype)

    def numpy(self) -> NDArray[Any]:
        """The whole tensor as a new array."""
        return self[...]

    def torch(self, index: Any = ...) -> torch.Tensor:
        """The tensor, or the part of it at ``index``, as a torch tensor in host memory. What is read is not copied.

        Raises:
            UnsupportedError: the installed torch does not have this dtype. IndexError.
        """
        from ckpt_tools.torch.fill import make_tensor

        return make_tensor(self._part(index), self.entry.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(_NO_VIEW)
        return self[...].astype(dtype or self.dtype, copy=False)

    def __dlpack__(self, *, copy: bool | None = None, **asked: Any) -> Any:
        """A capsule with the tensor's elements. torch takes it before it looks for a length and items.

        Raises:
            BufferError: ``copy=False``. UnsupportedError: only torch has this dtype, and the installed one does not.
        """
        if copy is False:
            raise BufferError(_NO_VIEW)
        # ml_dtypes adds types to numpy that numpy cannot hand on.
        is_torchs = self.entry.dtype is DType.COMPLEX32 or self.entry.dtype.num_values > 1
        is_numpys = not is_torchs and self.dtype.isbuiltin == 1
        return (self.numpy() if is_numpys else self.torch()).__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST

    def _part(self, index: Any) -> NDArray[Any]:
        """The elements at ``index`` as bare bytes of an element's width."""
        wanted = selection(index, self.shape)
        found = np.empty(wanted.shape, np.dtype((np.void, self.entry.dtype.item_bytes)))
        raw, start = found.reshape(-1).view(np.uint8), 0
        for box in wanted.boxes:
            stop = start + box.numel * found.itemsize
            if box.numel:
                self._reader.read(self.entry, box, self.shape, 0, box.numel, raw[start:stop].data)
            start = stop
        if found.size == self.size:
            self._reader.finish()
        part: NDArray[Any] = found[wanted.inside]
        return part


class _Closed(Store):
    """The store of a checkpoint that was closed."""

    url = "a closed checkpoint"

    def list(self) -> Mapping[str, int]:
        raise ValueError(_CLOSED)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        raise ValueError(_CLOSED)


_CLOSED = "the checkpoint is closed; read its tensors before that, or open it again"

MAX_ROWS = 60
"""Of the table that a notebook shows."""

MAX_SLOTS = 10


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
        self._reader.release(_Closed())

    def __repr__(self) -> str:
        return f"Checkpoint({self.manifest.format}, {count(len(self), 'weight')}, step={self.step})"

    def _repr_html_(self) -> str:
        cells = [(name, self[name]) for name in islice(self, MAX_ROWS)]
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{tensor.dtype_name}</td><td>{list(tensor.shape)}</td></tr>"
            for name, tensor in cells
        )
        more = f"<p>and {count(len(self) - len(cells), 'more weight')}</p>" if len(self) > len(cells) else ""
        head = "<tr><th>name</th><th>dtype</th><th>shape</th></tr>"
        return f"<p>{escape(repr(self))}</p><table>{head}{rows}</table>{more}"

    def __getitem__(self, name: str) -> LazyTensor:
        """The weight called ``name``. Raises KeyError, which names those that look most like it."""
        if name not in self:
            raise KeyError(f"there is no weight {name!r}{self._near(name)}")
        master = StateKey(self._owner(name), MASTER)
        return self.state(name, WEIGHT if self.manifest.masters_lag or master not in self.manifest.tensors else MASTER)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and StateKey(self._owner(name)) in self.manifest.tensors

    def model_copy(self, name: str) -> LazyTensor:
        """The weight in the model's own dtype. Raises KeyError."""
        return self.state(name, WEIGHT)

    def state(self, name: str, slot: str) -> LazyTensor:
        """Slots of the optimizer's state of a parameter: ``exp_avg``, ``step``, ... Raises KeyError."""
        key = StateKey(self._owner(name), slot)
        if key not in self.manifest.tensors:
            raise KeyError(f"there is no {slot!r} of {name!r}{self._has(key.fqn) or self._near(name)}")
        return LazyTensor(key, self.manifest.tensors[key], self._reader)

    def _owner(self, name: str) -> str:
        """The name that owns the bytes."""
        return self.manifest.aliases.get(name, name)

    def _has(self, owner: str) -> str:
        slots = [key.slot for key in self.manifest.tensors if key.fqn == owner]
        return f"; it has {listed(slots, MAX_SLOTS)}" if slots else ""

    def _near(self, name: object) -> str:
        near = nearest(name, list(self)) if isinstance(name, str) else ()
        return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""

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
        return tuple(replace(group, options=self._live(group.options)) for group in self.manifest.groups)

    @property
    def extras(self) -> Mapping[str, Any]:
        """Entries that belong neither to the model nor to the optimizer, by the names that ``inspect`` lists: the
        scheduler, counters, ``["hyper_parameters"]`` of Lightning, ``["deepspeed"]["ds_config"]``, the user's own.

        Tensors are ``LazyTensor``; objects of classes are made as ``load_into`` makes them, and stay inert otherwise.
        """
        return self._live(self.manifest.extra)

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's ``config.json``, beside the weights or where ``convert`` finds it; empty if there is none. It is
        read when it is first asked for.

        Raises:
            FormatError, StoreError: it cannot be read.
        """
        return self._config()

    def _live(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Inert values as Python objects."""
        from ckpt_tools.torch.revive import revive_value

        def tensor(ref: TensorRef) -> LazyTensor:
            return LazyTensor(ref.key, self.manifest.tensors[ref.key], self._reader)

        return {
            name: revive_value(value, load_tensor=tensor, handle_unknown=lambda inert: inert)
            for name, value in values.items()
        }

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read so far."""
        return self._reader.bytes_read
