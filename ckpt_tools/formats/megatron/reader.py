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
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import ByteRange, Framing, Shard, ShardTable
from ckpt_tools.core.value_refs import replace_stored_tensors
from ckpt_tools.core.values import StoredTensor, Value, are_naturals
from ckpt_tools.errors import CkptError, IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.dcp.index import DcpIndex, note_unread_files, read_index
from ckpt_tools.formats.dcp.reader import read_object
from ckpt_tools.formats.megatron.common_state import CommonState, StoredGroup, TrainedParameter, assign_members_by_rule
from ckpt_tools.formats.megatron.folders import MegatronFolder, find_folder
from ckpt_tools.formats.megatron.names import LAYER_WISE_FILE
from ckpt_tools.formats.megatron.tensor_names import (
    COMMON_ITEM,
    OWN_ITEM,
    StateName,
    is_bucket_state,
    is_expert_bias,
    parse_state_name,
)
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.torch_zip import locate_item, open_torch_file
from ckpt_tools.state_tree.incomplete_state import refuse_non_weights
from ckpt_tools.state_tree.leaf import TensorLeaf, find_ties
from ckpt_tools.state_tree.parse import TreeLeaves
from ckpt_tools.stores.source import Source

_VOCABULARY_NAMES = ("word_embeddings.weight", "output_layer.weight")

InnerTensors = dict[StateKey, TensorLeaf]


def read(source: Source, options: ReadOptions, *, is_optimizer: bool = False) -> Manifest:
    """The checkpoint; of one that ``is_optimizer``, state whose weights are elsewhere. Raises CkptError."""
    return _MegatronManifestBuilder.of(find_folder(source), is_optimizer=is_optimizer).build_manifest()


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    folder = find_folder(source)
    has_tracker = any(not path.startswith(folder.prefix) for path in folder.files)
    is_here = not folder.prefix or (folder.prefix.count("/") == 1 and has_tracker)
    return folder.files if is_here else frozenset()


@dataclass
class _MegatronManifestBuilder:
    """One checkpoint while it is read. ``inner_tensors`` are tensors inside objects."""

    folder: MegatronFolder
    index: DcpIndex
    common_state: CommonState
    inner_tensors: InnerTensors
    own_entry: Mapping[str, Any] = field(default_factory=dict)
    """The entry that ckpt-tools itself wrote."""
    literals: dict[str, bytes] = field(default_factory=dict)
    flattened_items: list[ByteRange] = field(default_factory=list)
    """The items of tensors that are stored flattened."""
    notes: list[Note] = field(default_factory=list)
    is_optimizer: bool = False

    @classmethod
    def of(cls, folder: MegatronFolder, *, is_optimizer: bool) -> _MegatronManifestBuilder:
        index = read_index(folder.source, folder.metadata_path)
        for name, reason in index.unread.items():
            raise UnsupportedError(reason, path=folder.metadata_path, key=name)
        inner_tensors: InnerTensors = {}
        common = _read_common_state(folder, index, inner_tensors)
        own_entry = (
            _read_sharded_object(folder.source, OWN_ITEM, index, inner_tensors)[0] if OWN_ITEM in index.objects else {}
        )
        if not isinstance(own_entry, dict):
            raise MalformedError(
                "it does not hold the dict that ckpt-tools writes", path=folder.metadata_path, key=OWN_ITEM
            )
        return cls(folder, index, common, inner_tensors, own_entry, is_optimizer=is_optimizer)

    def build_manifest(self) -> Manifest:
        self._refuse_layer_wise()
        objects: dict[str, Value] = {}
        for key in self.index.objects:
            if key not in (COMMON_ITEM, OWN_ITEM) and not is_bucket_state(key):
                objects[key] = tuple(_read_sharded_object(self.folder.source, key, self.index, self.inner_tensors))
        entries = self._build_entries()
        groups = self._build_groups(entries)
        entries |= self._build_step_entries(entries, groups)
        entries |= {key: leaf.make_entry(Kind.EXTRA) for key, leaf in self.inner_tensors.items()}
        self._note_buckets()
        self._note_vocabulary(entries)
        self.notes += self.folder.note_unread_files(self.folder.files)
        self.notes += note_unread_files(self.folder.source, {self.folder.metadata_path: self.index})
        return Manifest(
            "megatron",
            entries,
            aliases=self._find_aliases(),
            groups=tuple(groups),
            literals=self.literals,
            extra=self._collect_extra(objects),
            step=self._iteration,
            world_size=self.index.num_ranks,
            notes=tuple(self.notes),
            archives=(*self.index.archives, *self.flattened_items),
        )

    @property
    def _iteration(self) -> int | None:
        found = self.common_state.iteration
        return self.folder.iteration if found is None else found

    @cached_property
    def _ties(self) -> Mapping[str, str]:
        """Names with the same bytes as another name, by name."""
        return find_ties(self.index.tensors)

    @cached_property
    def _state_names(self) -> dict[str, StateName]:
        state_names = {key: state for key in self.index.tensors if (state := parse_state_name(key)) is not None}
        for key, state in state_names.items():
            if state.name not in self.index.tensors and not self.is_optimizer:
                raise UnsupportedError(
                    f"it is optimizer state of {state.name!r}, but there is no such tensor; its name is not one of "
                    "those that are read",
                    key=key,
                )
        return state_names

    def _list_weights(self) -> list[str]:
        names = [key for key in self.index.tensors if key not in self._state_names and not is_bucket_state(key)]
        refuse_non_weights(names)
        return names

    def _find_aliases(self) -> dict[str, str]:
        weights = set(self._list_weights())
        return {name: owner for name, owner in self._ties.items() if name in weights and owner in weights}

    def _build_entries(self) -> dict[StateKey, TensorEntry]:
        aliases = self._find_aliases()
        buffers, widened = ({*_keep_texts(self.own_entry.get(name))} for name in ("buffers", "widened"))
        entries = {}
        for name in self._list_weights():
            if name not in aliases:
                is_buffer_name = (
                    name in buffers or is_expert_bias(name) or not self.index.tensors[name].dtype.is_floating
                )
                entries[StateKey(name)] = self._make_entry(name, Kind.BUFFER if is_buffer_name else Kind.PARAMETER)
        for key, state in self._state_names.items():
            state_key = StateKey(state.name, state.slot)
            if state.slot == MASTER and (self._ties.get(key) == state.name or state.name in widened):
                continue  # The weight is its master too, as ckpt-tools writes parameters that are fp32 themselves.
            if state.slot == WEIGHT or state_key in entries:
                raise MalformedError("another entry holds the same state of this parameter", key=key)
            entries[state_key] = self._make_entry(key, Kind.STATE)
        return entries

    def _make_entry(self, key: str, kind: Kind) -> TensorEntry:
        leaf = self.index.tensors[key]
        tensor_facts = self.index.mcore_data.get(key) if isinstance(self.index.mcore_data, dict) else None
        original_shape = (
            tensor_facts.get("nd_reformulated_orig_global_shape") if isinstance(tensor_facts, dict) else None
        )
        if original_shape is not None and not are_naturals(original_shape):
            raise MalformedError("its original shape in mcore_data is not one of a tensor", key=key)
        try:
            if original_shape is None:
                return leaf.make_entry(kind)
            self.flattened_items += [leaf.shards.get_byte_range(row) for row in range(len(leaf.shards))]
            return _unflatten(self.folder.source, leaf, tuple(original_shape)).make_entry(kind)
        except CkptError as error:
            raise type(error)(error.message, path=error.path, key=key) from error

    def _collect_extra(self, objects: Mapping[str, Value]) -> dict[str, Any]:
        own_extra = self.own_entry.get("extra")
        extra = dict(own_extra) if isinstance(own_extra, dict) else {}
        if "extra" not in self.own_entry and self._iteration is not None:
            extra["global_step"] = self._iteration
        unplaced = self.common_state.unplaced_entries
        if not self.own_entry.get("made") and (unplaced or objects):
            # As tuples, which no format takes apart.
            extra["megatron"] = {"common": (unplaced,), "objects": tuple(objects.items())}
        return extra

    def _build_groups(self, entries: Mapping[StateKey, TensorEntry]) -> list[ParamGroup]:
        trained = self._find_trained_parameters(entries)
        if not trained:
            return []
        groups = self.common_state.groups
        if self.own_entry.get("made"):
            # Those behind them are of Megatron's rule, which the source did not have.
            groups = groups[: len(self._own_groups)]
        if not groups:
            why = "the common state has no param_groups of the optimizer"
            self.notes.append(Note(Outcome.DEFAULTED, "hyperparameters of the optimizer", why))
            return [ParamGroup(tuple(each.name for each in trained), {})]
        param_groups: list[ParamGroup] = []
        for number, (names, group) in enumerate(zip(self._assign_members(groups, trained), groups, strict=True)):
            # Without the step, which each parameter has, and what ckpt-tools added to a group that was not Megatron's.
            own_group = self._own_groups[number] if number < len(self._own_groups) else {}
            omitted_names = {"step", *_keep_texts(own_group.get("added"))}
            options = {str(name): value for name, value in group.options.items() if name not in omitted_names}
            param_groups.append(ParamGroup(tuple(names), options))
        return param_groups

    @cached_property
    def _own_groups(self) -> list[dict[Any, Any]]:
        own_groups = self.own_entry.get("groups")
        return own_groups if isinstance(own_groups, list) and all(isinstance(own, dict) for own in own_groups) else []

    def _assign_members(self, groups: list[StoredGroup], trained: list[TrainedParameter]) -> list[list[str]]:
        if len(self._own_groups) == len(groups):
            return [_keep_texts(own.get("params")) for own in self._own_groups]
        decays_norms = self.common_state.args.get("apply_wd_to_qk_layernorm") is True
        members = assign_members_by_rule(groups, trained, decays_norms=decays_norms)
        if len(groups) > 1:
            what = f"the members of {format_count(len(groups), 'parameter group')}"
            why = "Megatron does not store them; " + (
                "they are chosen by its rule: no weight decay for biases and parameters of one dim, experts apart"
                if members is not None
                else "the groups are not those of its rule, so all parameters are in the first one"
            )
            self.notes.append(Note(Outcome.DEFAULTED, what, why, len(trained)))
        return members or [[each.name for each in trained], *([] for _ in groups[1:])]

    def _find_trained_parameters(self, entries: Mapping[StateKey, TensorEntry]) -> list[TrainedParameter]:
        """The parameters that have optimizer state, in the order of the weights, or of their names without these."""
        optimizer_by_name: dict[str, int | None] = {}
        for state in self._state_names.values():
            if optimizer_by_name.setdefault(state.name, state.optimizer_number) != state.optimizer_number:
                raise MalformedError("two optimizers have state of this parameter", key=state.name)
        if self.is_optimizer:
            dims = {key.fqn: len(entry.shape) for key, entry in entries.items() if entry.shape}
            return [
                TrainedParameter(name, dims.get(name, 0), optimizer_by_name[name]) for name in sorted(optimizer_by_name)
            ]
        aliases = self._find_aliases()
        return [
            TrainedParameter(name, len(self.index.tensors[name].shape), optimizer_by_name[name])
            for name in self._list_weights()
            if name in optimizer_by_name and name not in aliases
        ]

    def _build_step_entries(
        self, entries: Mapping[StateKey, TensorEntry], groups: Iterable[ParamGroup]
    ) -> dict[StateKey, TensorEntry]:
        """The step of each parameter: its group's, where it has none of its own."""
        step_entries: dict[StateKey, TensorEntry] = {}
        stored_groups = self.common_state.groups
        for number, group in enumerate(groups):
            entry = self._make_step_entry(self.common_state.get_step(stored_groups[number])) if stored_groups else None
            for name in group.params:
                key = StateKey(name, "step")
                if entry is not None and key not in entries and not self.own_entry.get("made"):
                    step_entries[key] = entry
        return step_entries

    def _make_step_entry(self, step: Value) -> TensorEntry | None:
        if step is None:
            return None
        if isinstance(step, TensorRef):
            leaf = self.inner_tensors[step.key]
            return leaf.make_entry(Kind.STATE) if not leaf.shape else None
        file = make_literal_file_name(f"step {step}")
        self.literals[file] = struct.pack("<f", step)
        return TensorEntry((), DType.FLOAT32, Kind.STATE, ShardTable.whole((), DType.FLOAT32, ByteRange(file, 0, 4)))

    def _refuse_layer_wise(self) -> None:
        """Raises UnsupportedError if the only state of the optimizer is in files of its own."""
        layer_wise_path = next((path for path in self.folder.source.files if LAYER_WISE_FILE.fullmatch(path)), None)
        if layer_wise_path is not None and not self._state_names:
            raise UnsupportedError(
                "it is the state of Megatron's layer-wise optimizer (Muon) of one data-parallel rank, which is not "
                "supported, and the checkpoint itself has no state of the optimizer; move these files away for the "
                "weights alone",
                path=layer_wise_path,
            )

    def _note_buckets(self) -> None:
        bucket_names = [key for key in (*self.index.tensors, *self.index.objects) if is_bucket_state(key)]
        if bucket_names:
            num_bytes = sum(
                self.index.tensors[key].shards.num_bytes for key in bucket_names if key in self.index.tensors
            )
            is_object = any(".param_state/" in key for key in bucket_names)
            sharding = self.common_state.sharding_type or ("dp_zero_gather_scatter" if is_object else "dp_reshardable")
            why = (
                f"it is in buffers of the distributed optimizer ({sharding}), and the places of the parameters in them "
                "are not stored; save it with --dist-ckpt-optim-fully-reshardable"
            )
            self.notes.append(Note(Outcome.DROPPED, "optimizer state", why, len(bucket_names), num_bytes))

    def _note_vocabulary(self, entries: Mapping[StateKey, TensorEntry]) -> None:
        vocab_size, padded_size = (self.common_state.args.get(name) for name in ("vocab_size", "padded_vocab_size"))
        if type(vocab_size) is not int or type(padded_size) is not int or vocab_size == padded_size:
            return
        names = [
            key.fqn
            for key, entry in entries.items()
            if key.slot == WEIGHT and entry.shape[:1] == (padded_size,) and key.fqn.endswith(_VOCABULARY_NAMES)
        ]
        why = (
            f"the last {padded_size - vocab_size:,} of their {padded_size:,} rows are padding; the vocabulary has "
            f"{vocab_size:,}"
        )
        self.notes += [Note(Outcome.KEPT, name, why) for name in names]


def _keep_texts(names: Any) -> list[str]:
    return [name for name in names if type(name) is str] if isinstance(names, list) else []


def _read_common_state(folder: MegatronFolder, index: DcpIndex, inner_tensors: InnerTensors) -> CommonState:
    """The common state, from ``common.pt`` or from its item. Raises IncompleteError where there is none."""
    path = folder.common_path
    if path is None and COMMON_ITEM not in index.objects:
        raise IncompleteError("this file of the checkpoint is missing", path=f"{folder.prefix}common.pt")
    if path is None:
        return CommonState.of(
            _read_sharded_object(folder.source, COMMON_ITEM, index, inner_tensors)[0], folder.metadata_path
        )
    source = folder.source
    archive = open_torch_file(source, path)

    def make_reference(tensor: StoredTensor) -> Any:
        if tensor.storage is None:
            return tensor
        key = TreeLeaves.make_inner_key("common", len(inner_tensors))
        inner_tensors[key] = TensorLeaf.of(tensor, path, archive.locate_storage(tensor.storage.key)[0])
        return TensorRef(key)

    return CommonState.of(replace_stored_tensors(archive.value, make_reference), path)


def _read_sharded_object(source: Source, key: str, index: DcpIndex, inner_tensors: InnerTensors) -> list[Value]:
    """The pieces of a sharded object that its item holds: a list. Raises MalformedError."""
    at = index.objects[key]
    value = read_object(source, key, at, inner_tensors)
    if not isinstance(value, list) or not value:
        raise MalformedError("it does not hold the list of a sharded object", path=at.file, key=key)
    return value


def _unflatten(source: Source, leaf: TensorLeaf, shape: tuple[int, ...]) -> TensorLeaf:
    """A tensor that is stored flattened in its own shape. The start of each item's elements is looked up here, since
    one item becomes several boxes."""
    piece = find_piece_shape(leaf.shape, shape)
    if prod(shape) != prod(leaf.shape):
        raise MalformedError(f"a tensor of shape {list(shape)} is stored in {list(leaf.shape)}")
    shards: list[Shard] = []
    size = leaf.dtype.item_bytes
    rows = range(len(leaf.shards))
    starts = source.store.map_files(lambda row: _find_elements_start(source, leaf, row), rows)
    for row, start in zip(rows, starts, strict=True):
        stored = leaf.shards.get_box(row)
        for box, first in split_into_boxes(stored, piece):
            at = ByteRange(
                leaf.shards.get_byte_range(row).file, start + first * size, start + (first + box.numel) * size
            )
            shards.append(Shard(box, at))
    return TensorLeaf(shape, leaf.dtype, ShardTable.build(shape, leaf.dtype, shards))


def _find_elements_start(source: Source, leaf: TensorLeaf, row: int) -> int:
    """The byte at which the elements of an item start. Raises MalformedError where they are not row-major."""
    item_range = leaf.shards.get_byte_range(row)
    assert leaf.shards.framing is Framing.TORCH_ITEM, "the index of a DCP lists items"
    located = locate_item(
        lambda start, stop: source.read(item_range.file, start, stop),
        item_range.start,
        item_range.stop,
        item_range.file,
    )
    numel = int(leaf.shards.numels[row])
    is_plain = StoredTensor(None, located.dtype, 0, located.shape, located.strides).is_contiguous
    if located.dtype is not leaf.dtype or prod(located.shape) != numel or not is_plain:
        raise MalformedError(
            f"the item at byte {item_range.start:,} is not the one that the index describes", path=item_range.file
        )
    return located.start + located.storage_offset * leaf.dtype.item_bytes


# Up to megatron-core 0.14 optimizer state was stored flattened and cut by data-parallel ranks. A tensor of shape [X, Y]
# in pieces of [x, y] was stored as one of [X / x, Y / y, x * y]: the first axes number the piece, the last one runs
# through its elements, and each rank wrote an interval of it (megatron-core 0.12, strategies/torch.py,
# sharded_tensor_to_torch_sharded_tensor). mcore_data in the index has the shape [X, Y].


def find_piece_shape(stored: Shape, shape: Shape) -> Shape:
    """``[x, y]`` of a tensor of ``shape`` that is stored as ``stored``. Raises MalformedError."""
    pairs = list(zip(stored[:-1], shape, strict=False))
    fits = len(stored) == len(shape) + 1 and all(count and not size % count for count, size in pairs)
    piece = tuple(size // count for count, size in pairs) if fits else ()
    if not fits or prod(piece) != stored[-1]:
        raise MalformedError(f"a tensor of shape {list(shape)} cannot be stored as {list(stored)}")
    return piece


def split_into_boxes(stored: Box, piece: Shape) -> Iterator[tuple[Box, int]]:
    """The boxes of the tensor that the box ``stored`` of its stored form holds, each with the position of its first
    element among those of ``stored``."""
    # A tensor [4, 6] in pieces [2, 3] is stored as [2, 2, 6]:
    #     cell (0,0) | cell (0,1)     stored[i, j, :] is the piece at rows 2 * i.., columns 3 * j.., flattened
    #     cell (1,0) | cell (1,1)     ``stored`` is a box of it: some cells, and an interval of each, which is one or
    #                                 more boxes of the piece; moved by the cell's origin, they are boxes of the tensor
    num_passed = 0
    for cell in product(*map(range, stored.start[:-1], stored.stop[:-1])):
        origin = tuple(index * size for index, size in zip(cell, piece, strict=True))
        for box in interval_to_boxes(stored.start[-1], stored.stop[-1], piece):
            yield box.shift(origin), num_passed
            num_passed += box.numel
