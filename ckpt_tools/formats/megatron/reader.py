"""Megatron-Core's ``torch_dist`` to a manifest.

The tensors come from the index, as those of a DCP; their names say which of them are optimizer state. Step, groups and
iteration come from the common state. Names and shapes stay Megatron's own: layers are stacked in one tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from ckpt_tools.core.boxes import Box, Shape, interval_to_boxes
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import make_literal_file_name
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ByteRange, Framing, Shard, ShardTable
from ckpt_tools.core.value_refs import replace_stored_tensors
from ckpt_tools.core.values import StoredTensor, Value, are_naturals
from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import CkptError, IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.dcp.index import Index, notes_on_files, read_index
from ckpt_tools.formats.dcp.reader import read_object
from ckpt_tools.formats.foreign import refuse_weights
from ckpt_tools.formats.megatron.common_state import CommonState, Group, Parameter, by_rule
from ckpt_tools.formats.megatron.folders import Folder, find_folder
from ckpt_tools.formats.megatron.names import (
    COMMON_ITEM,
    LAYER_WISE,
    OWN_ITEM,
    State,
    is_buffer,
    is_of_buckets,
    state_of,
)
from ckpt_tools.formats.state_dict.leaf import TensorLeaf, ties_among
from ckpt_tools.formats.state_dict.parse import Leaves
from ckpt_tools.serialization.torch_zip import locate_item, open_archive
from ckpt_tools.stores.source import Source

_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")

Inner = dict[StateKey, TensorLeaf]


def read(source: Source, *, is_optimizer: bool = False) -> Manifest:
    """The checkpoint; of one that ``is_optimizer``, state whose weights are elsewhere. Raises CkptError."""
    return _Contents.of(find_folder(source), is_optimizer=is_optimizer).manifest()


def own_files(source: Source) -> frozenset[str]:
    folder = find_folder(source)
    has_tracker = any(not path.startswith(folder.prefix) for path in folder.files)
    is_here = not folder.prefix or (folder.prefix.count("/") == 1 and has_tracker)
    return folder.files if is_here else frozenset()


@dataclass
class _Contents:
    """One checkpoint while it is read. ``inner`` are tensors inside objects."""

    folder: Folder
    index: Index
    common: CommonState
    inner: Inner
    own: Mapping[str, Any] = field(default_factory=dict)
    """The entry that ckpt-tools itself wrote."""
    literals: dict[str, bytes] = field(default_factory=dict)
    archives: list[ByteRange] = field(default_factory=list)
    """The items of tensors that are stored flattened."""
    notes: list[Note] = field(default_factory=list)
    is_optimizer: bool = False

    @classmethod
    def of(cls, folder: Folder, *, is_optimizer: bool) -> _Contents:
        index = read_index(folder.source, folder.metadata)
        for name, reason in index.unread.items():
            raise UnsupportedError(reason, path=folder.metadata, key=name)
        inner: Inner = {}
        common = _common(folder, index, inner)
        own = _object(folder.source, OWN_ITEM, index, inner)[0] if OWN_ITEM in index.objects else {}
        if not isinstance(own, dict):
            raise MalformedError("it does not hold the dict that ckpt-tools writes", path=folder.metadata, key=OWN_ITEM)
        return cls(folder, index, common, inner, own, is_optimizer=is_optimizer)

    def manifest(self) -> Manifest:
        self._refuse_layer_wise()
        objects = self._objects()
        entries = self._entries()
        groups = self._groups(entries)
        entries |= self._steps(entries, groups)
        entries |= {key: _entry(leaf, Kind.EXTRA) for key, leaf in self.inner.items()}
        self._note_buckets()
        self._note_vocabulary(entries)
        self.notes += self.folder.notes(self.folder.files)
        self.notes += notes_on_files(self.folder.source, {self.folder.metadata: self.index})
        return Manifest(
            "megatron",
            entries,
            aliases=self._aliases(),
            groups=tuple(groups),
            literals=self.literals,
            extra=self._extra(objects),
            step=self._step,
            world_size=self.index.num_ranks,
            notes=tuple(self.notes),
            archives=(*self.index.archives, *self.archives),
        )

    @property
    def _step(self) -> int | None:
        found = self.common.iteration
        return self.folder.iteration if found is None else found

    @cached_property
    def _ties(self) -> Mapping[str, str]:
        """Names with the same bytes as another name, by name."""
        return ties_among(self.index.tensors)

    @cached_property
    def _states(self) -> dict[str, State]:
        found = {key: state for key in self.index.tensors if (state := state_of(key)) is not None}
        for key, state in found.items():
            if state.name not in self.index.tensors and not self.is_optimizer:
                raise UnsupportedError(
                    f"it is optimizer state of {state.name!r}, but there is no such tensor; its name is not one of "
                    "those that are read",
                    key=key,
                )
        return found

    def _weights(self) -> list[str]:
        names = [key for key in self.index.tensors if key not in self._states and not is_of_buckets(key)]
        refuse_weights(names)
        return names

    def _aliases(self) -> dict[str, str]:
        weights = set(self._weights())
        return {name: owner for name, owner in self._ties.items() if name in weights and owner in weights}

    def _entries(self) -> dict[StateKey, TensorEntry]:
        aliases = self._aliases()
        buffers, widened = ({*_texts(self.own.get(name))} for name in ("buffers", "widened"))
        found = {}
        for name in self._weights():
            if name not in aliases:
                is_other = name in buffers or is_buffer(name) or not self.index.tensors[name].dtype.is_floating
                found[StateKey(name)] = self._made(name, Kind.BUFFER if is_other else Kind.PARAMETER)
        for key, state in self._states.items():
            at = StateKey(state.name, state.slot)
            if state.slot == MASTER and (self._ties.get(key) == state.name or state.name in widened):
                continue  # The weight is its master too, as ckpt-tools writes parameters that are fp32 themselves.
            if state.slot == WEIGHT or at in found:
                raise MalformedError("another entry holds the same state of this parameter", key=key)
            found[at] = self._made(key, Kind.STATE)
        return found

    def _made(self, key: str, kind: Kind) -> TensorEntry:
        leaf = self.index.tensors[key]
        about = self.index.mcore_data.get(key) if isinstance(self.index.mcore_data, dict) else None
        shape = about.get("nd_reformulated_orig_global_shape") if isinstance(about, dict) else None
        if shape is not None and not are_naturals(shape):
            raise MalformedError("its original shape in mcore_data is not one of a tensor", key=key)
        try:
            if shape is None:
                return _entry(leaf, kind)
            self.archives += [leaf.shards.get_byte_range(row) for row in range(len(leaf.shards))]
            return _entry(_unflattened(self.folder.source, leaf, tuple(shape)), kind)
        except CkptError as error:
            raise type(error)(error.message, path=error.path, key=key) from error

    def _objects(self) -> dict[str, Value]:
        """Every object but the common state, and state of the distributed optimizer."""
        wanted = [key for key in self.index.objects if key not in (COMMON_ITEM, OWN_ITEM) and not is_of_buckets(key)]
        return {key: tuple(_object(self.folder.source, key, self.index, self.inner)) for key in wanted}

    def _extra(self, objects: Mapping[str, Value]) -> dict[str, Any]:
        own = self.own.get("extra")
        extra = dict(own) if isinstance(own, dict) else {}
        if "extra" not in self.own and self._step is not None:
            extra["global_step"] = self._step
        rest = self.common.rest
        if not self.own.get("made") and (rest or objects):
            # As tuples, which no format takes apart.
            extra["megatron"] = {"common": (rest,), "objects": tuple(objects.items())}
        return extra

    def _groups(self, entries: Mapping[StateKey, TensorEntry]) -> list[ParamGroup]:
        trained = self._trained(entries)
        if not trained:
            return []
        groups = self.common.groups
        if self.own.get("made"):
            # Those behind them are of Megatron's rule, which the source did not have.
            groups = groups[: len(self._own_groups)]
        if not groups:
            why = "the common state has no param_groups of the optimizer"
            self.notes.append(Note(Outcome.DEFAULTED, "hyperparameters of the optimizer", why))
            return [ParamGroup(tuple(each.name for each in trained), {})]
        members = self._members(groups, trained)
        return [
            ParamGroup(tuple(names), self._options(number, group))
            for number, (names, group) in enumerate(zip(members, groups, strict=True))
        ]

    def _options(self, number: int, group: Group) -> dict[str, Any]:
        """All but the step, which each parameter has, and what ckpt-tools added to a group that was not Megatron's."""
        own = self._own_groups[number] if number < len(self._own_groups) else {}
        left_out = {"step", *_texts(own.get("added"))}
        return {str(name): value for name, value in group.options.items() if name not in left_out}

    @cached_property
    def _own_groups(self) -> list[dict[Any, Any]]:
        found = self.own.get("groups")
        return found if isinstance(found, list) and all(isinstance(own, dict) for own in found) else []

    def _members(self, groups: list[Group], trained: list[Parameter]) -> list[list[str]]:
        if len(self._own_groups) == len(groups):
            return [_texts(own.get("params")) for own in self._own_groups]
        decays_norms = self.common.args.get("apply_wd_to_qk_layernorm") is True
        members = by_rule(groups, trained, decays_norms=decays_norms)
        if len(groups) > 1:
            what = f"the members of {format_count(len(groups), 'parameter group')}"
            why = "Megatron does not store them; " + (
                "they are chosen by its rule: no weight decay for biases and parameters of one dim, experts apart"
                if members is not None
                else "the groups are not those of its rule, so all parameters are in the first one"
            )
            self.notes.append(Note(Outcome.DEFAULTED, what, why, len(trained)))
        return members or [[each.name for each in trained], *([] for _ in groups[1:])]

    def _trained(self, entries: Mapping[StateKey, TensorEntry]) -> list[Parameter]:
        """The parameters that have optimizer state, in the order of the weights, or of their names without these."""
        chains: dict[str, int | None] = {}
        for state in self._states.values():
            if chains.setdefault(state.name, state.chain) != state.chain:
                raise MalformedError("two optimizers have state of this parameter", key=state.name)
        if self.is_optimizer:
            dims = {key.fqn: len(entry.shape) for key, entry in entries.items() if entry.shape}
            return [Parameter(name, dims.get(name, 0), chains[name]) for name in sorted(chains)]
        aliases = self._aliases()
        return [
            Parameter(name, len(self.index.tensors[name].shape), chains[name])
            for name in self._weights()
            if name in chains and name not in aliases
        ]

    def _steps(
        self, entries: Mapping[StateKey, TensorEntry], groups: Iterable[ParamGroup]
    ) -> dict[StateKey, TensorEntry]:
        """The step of each parameter: its group's, where it has none of its own."""
        found: dict[StateKey, TensorEntry] = {}
        stored = self.common.groups
        for number, group in enumerate(groups):
            entry = self._step_entry(self.common.step(stored[number])) if stored else None
            for name in group.params:
                key = StateKey(name, "step")
                if entry is not None and key not in entries and not self.own.get("made"):
                    found[key] = entry
        return found

    def _step_entry(self, step: Value) -> TensorEntry | None:
        if step is None:
            return None
        if isinstance(step, TensorRef):
            leaf = self.inner[step.key]
            return _entry(leaf, Kind.STATE) if not leaf.shape else None
        file = make_literal_file_name(f"step {step}")
        self.literals[file] = struct.pack("<f", step)
        return TensorEntry((), DType.FLOAT32, Kind.STATE, ShardTable.whole((), DType.FLOAT32, ByteRange(file, 0, 4)))

    def _refuse_layer_wise(self) -> None:
        """Raises UnsupportedError if the only state of the optimizer is in files of its own."""
        found = next((path for path in self.folder.source.files if LAYER_WISE.fullmatch(path)), None)
        if found is not None and not self._states:
            raise UnsupportedError(
                "it is the state of Megatron's layer-wise optimizer (Muon) of one data-parallel rank, which is not "
                "supported, and the checkpoint itself has no state of the optimizer; move these files away for the "
                "weights alone",
                path=found,
            )

    def _note_buckets(self) -> None:
        lost = [key for key in (*self.index.tensors, *self.index.objects) if is_of_buckets(key)]
        if lost:
            num_bytes = sum(self.index.tensors[key].shards.num_bytes for key in lost if key in self.index.tensors)
            is_object = any(".param_state/" in key for key in lost)
            sharding = self.common.sharding or ("dp_zero_gather_scatter" if is_object else "dp_reshardable")
            why = (
                f"it is in buffers of the distributed optimizer ({sharding}), and the places of the parameters in them "
                "are not stored; save it with --dist-ckpt-optim-fully-reshardable"
            )
            self.notes.append(Note(Outcome.DROPPED, "optimizer state", why, len(lost), num_bytes))

    def _note_vocabulary(self, entries: Mapping[StateKey, TensorEntry]) -> None:
        real, padded = (self.common.args.get(name) for name in ("vocab_size", "padded_vocab_size"))
        if type(real) is not int or type(padded) is not int or real == padded:
            return
        names = [
            key.fqn
            for key, entry in entries.items()
            if key.slot == WEIGHT and entry.shape[:1] == (padded,) and key.fqn.endswith(_VOCABULARY)
        ]
        why = f"the last {padded - real:,} of their {padded:,} rows are padding; the vocabulary has {real:,}"
        self.notes += [Note(Outcome.KEPT, name, why) for name in names]


def _texts(found: Any) -> list[str]:
    return [name for name in found if type(name) is str] if isinstance(found, list) else []


def _entry(leaf: TensorLeaf, kind: Kind) -> TensorEntry:
    return TensorEntry(leaf.shape, leaf.dtype, kind, leaf.shards)


def _common(folder: Folder, index: Index, inner: Inner) -> CommonState:
    """The common state, from ``common.pt`` or from its item. Raises IncompleteError where there is none."""
    path = folder.common
    if path is None and COMMON_ITEM not in index.objects:
        raise IncompleteError("this file of the checkpoint is missing", path=f"{folder.prefix}common.pt")
    if path is None:
        return CommonState.of(_object(folder.source, COMMON_ITEM, index, inner)[0], folder.metadata)
    source = folder.source
    archive = open_archive(lambda start, stop: source.read(path, start, stop), source.size(path), path)

    def refer(tensor: StoredTensor) -> Any:
        if tensor.storage is None:
            return tensor
        key = Leaves.inner_key("common", len(inner))
        inner[key] = TensorLeaf.of(tensor, path, archive.locate_storage(tensor.storage.key)[0])
        return TensorRef(key)

    return CommonState.of(replace_stored_tensors(archive.value, refer), path)


def _object(source: Source, key: str, index: Index, inner: Inner) -> list[Value]:
    """The pieces of a sharded object that its item holds: a list. Raises MalformedError."""
    at = index.objects[key]
    value = read_object(source, key, at, inner)
    if not isinstance(value, list) or not value:
        raise MalformedError("it does not hold the list of a sharded object", path=at.file, key=key)
    return value


def _unflattened(source: Source, leaf: TensorLeaf, shape: tuple[int, ...]) -> TensorLeaf:
    """A tensor that is stored flattened in its own shape. The start of each item's elements is looked up here, since
    one item becomes several boxes."""
    piece = piece_shape(leaf.shape, shape)
    if prod(shape) != prod(leaf.shape):
        raise MalformedError(f"a tensor of shape {list(shape)} is stored in {list(leaf.shape)}")
    shards: list[Shard] = []
    size = leaf.dtype.item_bytes
    for row in range(len(leaf.shards)):
        stored, start = leaf.shards.get_box(row), _elements(source, leaf, row)
        for box, first in boxes(stored, piece):
            at = ByteRange(
                leaf.shards.get_byte_range(row).file, start + first * size, start + (first + box.numel) * size
            )
            shards.append(Shard(box, at))
    return TensorLeaf(shape, leaf.dtype, ShardTable.build(shape, leaf.dtype, shards))


def _elements(source: Source, leaf: TensorLeaf, row: int) -> int:
    """The byte at which the elements of an item start. Raises MalformedError where they are not row-major."""
    at = leaf.shards.get_byte_range(row)
    assert leaf.shards.framing is Framing.TORCH_ITEM, "the index of a DCP lists items"
    found = locate_item(lambda start, stop: source.read(at.file, start, stop), at.start, at.stop, at.file)
    numel = int(leaf.shards.numels[row])
    is_plain = StoredTensor(None, found.dtype, 0, found.shape, found.strides).is_contiguous
    if found.dtype is not leaf.dtype or prod(found.shape) != numel or not is_plain:
        raise MalformedError(f"the item at byte {at.start:,} is not the one that the index describes", path=at.file)
    return found.start + found.storage_offset * leaf.dtype.item_bytes


# Up to megatron-core 0.14 optimizer state was stored flattened and cut by data-parallel ranks. A tensor of shape [X, Y]
# in pieces of [x, y] was stored as one of [X / x, Y / y, x * y]: the first axes number the piece, the last one runs
# through its elements, and each rank wrote an interval of it (megatron-core 0.12, strategies/torch.py,
# sharded_tensor_to_torch_sharded_tensor). mcore_data in the index has the shape [X, Y].


def piece_shape(stored: Shape, shape: Shape) -> Shape:
    """``[x, y]`` of a tensor of ``shape`` that is stored as ``stored``. Raises MalformedError."""
    pairs = list(zip(stored[:-1], shape, strict=False))
    fits = len(stored) == len(shape) + 1 and all(count and not size % count for count, size in pairs)
    piece = tuple(size // count for count, size in pairs) if fits else ()
    if not fits or prod(piece) != stored[-1]:
        raise MalformedError(f"a tensor of shape {list(shape)} cannot be stored as {list(stored)}")
    return piece


def boxes(stored: Box, piece: Shape) -> Iterator[tuple[Box, int]]:
    """The boxes of the tensor that the box ``stored`` of its stored form holds, each with the position of its first
    element among those of ``stored``."""
    at = 0
    for cell in product(*map(range, stored.start[:-1], stored.stop[:-1])):
        origin = tuple(index * size for index, size in zip(cell, piece, strict=True))
        for box in interval_to_boxes(stored.start[-1], stored.stop[-1], piece):
            yield box.shift(origin), at
            at += box.numel
