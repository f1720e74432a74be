"""Parts of a tensor that one rank pickled: ``DTensor`` and FSDP1's ``ShardedTensor``. The list is closed.

``torch.save`` of a sharded state calls ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, ...)`` on every
rank. The state is the local tensor, and a ``DTensorSpec``: a device mesh, a placement for each dim of the mesh, and the
shape of the whole tensor. The pickle machine records all of these as ``Opaque``; this module makes values of the
records and checks each field. A class, field or argument that is not listed is refused.

Forms that were checked, by files that torch 2.15.0 wrote, and by the sources of the older releases:

- torch 2.10 and later: ``DeviceMesh`` keeps ``_layout`` (sizes and strides into the ranks), ``_rank_map`` and, from
  2.12 on, ``_rank`` (files of 2.15.0; sources of 2.10.0 and 2.12.0, where a layout is one ``shape`` and ``stride``);
- torch 2.4 to 2.9: it keeps ``mesh``, a tensor of ranks, and the same numbers in ``_flatten_mesh_list``, and does not
  say which rank it was: that follows from its coordinate (sources of 2.4.1, 2.6.0, 2.8.0 and 2.9.1);
- torch 2.4 calls the package ``torch.distributed._tensor`` (source of 2.4.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from ckpt_tools.core.boxes import Shape, contiguous_strides
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import (
    MAX_DIMS,
    PARAMETER,
    GlobalRef,
    Opaque,
    Size,
    StoredTensor,
    Value,
    are_naturals,
    describe_kind,
    format_brief,
)
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.serialization.pickle.dcp_metadata import make_wrong_type_error
from ckpt_tools.serialization.pickle.machine import GETATTR
from ckpt_tools.serialization.pickle.torch_names import (
    DTENSOR_PACKAGE,
    DTENSORS,
    OLD_DTENSOR_PACKAGE,
    PROCESS_GROUP_STATE,
    REBUILD_FROM_TYPE,
    REBUILD_WRAPPER_SUBCLASS,
    SHARD_PACKAGE,
    SHARDED_TENSOR,
)

_SPEC_MODULES = (f"{DTENSOR_PACKAGE}._dtensor_spec", f"{OLD_DTENSOR_PACKAGE}.placement_types")
_SPECS = frozenset(GlobalRef(module, "DTensorSpec") for module in _SPEC_MODULES)
_TENSOR_METAS = frozenset(GlobalRef(module, "TensorMeta") for module in _SPEC_MODULES)
_PLACEMENTS = frozenset({f"{DTENSOR_PACKAGE}.placement_types", f"{OLD_DTENSOR_PACKAGE}.placement_types"})
_ORDER_ENTRY = GlobalRef(f"{DTENSOR_PACKAGE}._dtensor_spec", "ShardOrderEntry")
_MESH = GlobalRef("torch.distributed.device_mesh", "DeviceMesh")
_MESH_LAYOUT = GlobalRef("torch.distributed._mesh_layout", "_MeshLayout")
_FLAT_LAYOUT = GlobalRef("torch.distributed._mesh_layout", "_FlatLayout")
_SHARD = GlobalRef(f"{SHARD_PACKAGE}.sharded_tensor.shard", "Shard")
_SHARD_METADATA = GlobalRef(f"{SHARD_PACKAGE}.metadata", "ShardMetadata")
_SHARDED_METADATA = GlobalRef(f"{SHARD_PACKAGE}.sharded_tensor.metadata", "ShardedTensorMetadata")

_SPEC_FIELDS = ("mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order", "_hash")
_NEW_MESH_FIELDS = (
    "_device_type", "_layout", "_rank_map", "_mesh_dim_names", "_root_mesh", "_preserve_rank_order",
    "_flatten_rank_map", "_thread_id", "_flatten_mapping", "_dim_group_names", "_rank", "_coordinate_on_dim", "_hash",
)  # fmt: skip
_OLD_MESH_FIELDS = (
    "device_type", "mesh", "mesh_dim_names", "_flatten_mesh_list", "_parent_mesh", "_thread_id", "_coordinate_on_dim",
    "_dim_group_infos", "_dim_group_names", "_hash",
)  # fmt: skip

MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Cut along ``dim`` as ``torch.chunk`` cuts."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShardPlacement:
    """Cut along ``dim`` into ``split_factor`` parts first, and each of these as ``torch.chunk`` cuts: a rank has a part
    of each."""

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class ReplicatePlacement:
    """Every rank along this dim of the mesh has all of it."""


Placement = ShardPlacement | StridedShardPlacement | ReplicatePlacement


@dataclass(frozen=True, slots=True)
class SavedMesh:
    """The ranks that share a tensor, as one of them saved it.

    ``ranks`` are all that the mesh knows of, those of the mesh that it was cut from included; ``members`` are its own.
    ``coordinate`` is the place of ``rank`` in the mesh of ``shape``.
    """

    shape: Shape
    ranks: tuple[int, ...]
    members: frozenset[int]
    rank: int
    coordinate: Shape
    device_type: str
    dim_names: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class DTensorPart:
    """One rank's part of a DTensor of ``shape``."""

    shape: Shape
    dtype: DType
    mesh: SavedMesh
    placements: tuple[Placement, ...]
    local: StoredTensor

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    @property
    def members(self) -> frozenset[int]:
        return self.mesh.members


@dataclass(frozen=True, slots=True)
class ShardedTensorPart:
    """One rank's part of a ShardedTensor of ``shape``: tensors with their offsets. ``members`` are the ranks that hold
    it together."""

    shape: Shape
    dtype: DType
    rank: int
    ranks: tuple[int, ...]
    members: frozenset[int]
    locals: tuple[tuple[Shape, StoredTensor], ...]


TensorPart = DTensorPart | ShardedTensorPart


@dataclass(slots=True)
class PartReader:
    """Reads the records of one file, whose tensors share meshes and specs."""

    _meshes: dict[int, tuple[Value, SavedMesh]] = field(default_factory=dict)

    def read_part(self, value: Value) -> TensorPart | None:
        """The part that ``value`` describes; None if it describes something else.

        Raises:
            UnsupportedError: a class, a field or a placement that is not handled. MalformedError: what is recorded
            contradicts itself.
        """
        if not isinstance(value, Opaque):
            return None
        if value.ref == PARAMETER and value.form == "call" and len(value.args) == 2:
            return self.read_part(value.args[0])
        if value.ref != REBUILD_FROM_TYPE or len(value.args) != 4:
            return None
        function, kind, args, state = value.args
        if type(kind) is not GlobalRef or kind not in (*DTENSORS, SHARDED_TENSOR):
            return None
        if function != REBUILD_WRAPPER_SUBCLASS:
            raise UnsupportedError(f"a {kind.name} is rebuilt by {function!s:.80}, which is not supported")
        shape, dtype = _read_wrapper(kind, args)
        is_dtensor = kind in DTENSORS
        return self._read_dtensor(shape, dtype, state) if is_dtensor else _read_sharded_tensor(shape, dtype, state)

    def _read_dtensor(self, shape: Shape, dtype: DType, state: Value) -> DTensorPart:
        # Its attributes, None as a rule, and its slots.
        if not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[1], dict):
            raise make_wrong_type_error("DTensor")
        slots = state[1]
        if slots.keys() != {"_local_tensor", "_spec"}:
            raise UnsupportedError(f"a DTensor has the slots {format_brief(list(slots))}, which are not supported")
        local = _check_local_tensor(slots["_local_tensor"], dtype, "DTensor")
        spec = _read_attributes(slots["_spec"], _SPECS, _SPEC_FIELDS)
        mesh, placement_records = self._get_mesh(spec.get("mesh")), spec.get("placements")
        meta: Value = spec.get("tensor_meta")
        if not isinstance(placement_records, tuple | list) or len(placement_records) != len(mesh.shape):
            raise make_wrong_type_error("DTensorSpec")
        placements = tuple(_read_placement(each, len(shape)) for each in placement_records)
        is_meta = isinstance(meta, Opaque) and meta.ref in _TENSOR_METAS and len(meta.args) == 3
        if not is_meta or not are_naturals(meta.args[0]) or tuple(meta.args[0]) != shape:
            raise MalformedError(f"the spec of a DTensor of shape {list(shape)} is of another tensor")
        _check_shard_order(spec.get("shard_order"), placements)
        cut_dims = [each.dim for each in placements if isinstance(each, ShardPlacement)]
        if slots["_spec"].ref.module.startswith(OLD_DTENSOR_PACKAGE) and len(cut_dims) != len(set(cut_dims)):
            # torch 2.4 wrote Shard(0), Shard(0) for FSDP2 with tensor parallelism too, which cuts the other way round.
            raise UnsupportedError(
                "a DTensor of torch before 2.5 is cut along one dim by two dims of its mesh; it does not say in which "
                "order"
            )
        return DTensorPart(shape, dtype, mesh, placements, local)

    def _get_mesh(self, value: Value) -> SavedMesh:
        record_and_mesh = self._meshes.get(id(value))
        if record_and_mesh is None:
            # The record is kept, so that its id stays its own.
            record_and_mesh = self._meshes[id(value)] = value, _read_mesh(value)
        return record_and_mesh[1]


def _check_naturals(value: Value, kind: str, max_items: int = MAX_DIMS) -> tuple[int, ...]:
    if not are_naturals(value, max_items):
        raise make_wrong_type_error(kind)
    return tuple(value)


def _read_wrapper(kind: GlobalRef, args: Value) -> tuple[Shape, DType]:
    """``_rebuild_wrapper_subclass(cls, dtype, size, stride, storage_offset, layout, device, requires_grad)``."""
    if not isinstance(args, tuple) or len(args) != 8 or args[0] != kind:
        raise make_wrong_type_error(kind.name)
    dtype = args[1].dtype if type(args[1]) is GlobalRef else None
    if dtype is None:
        raise UnsupportedError(f"a {kind.name} has the dtype {args[1]!s:.80}, which is not supported")
    return _check_naturals(args[2], kind.name), dtype


def _check_local_tensor(value: Value, dtype: DType, kind: str) -> StoredTensor:
    if not isinstance(value, StoredTensor) or value.wrapper not in (None, PARAMETER):
        what = value.wrapper if isinstance(value, StoredTensor) else describe_kind(value)
        raise UnsupportedError(f"the local tensor of a {kind} is a {what}, which is not supported")
    if value.storage is None:
        raise UnsupportedError(f"the local tensor of a {kind} is on the meta device and has no elements")
    if value.dtype is not dtype:
        raise MalformedError(f"the local tensor of a {dtype.value} {kind} is of {value.dtype.value}")
    return value


def _read_attributes(value: Value, refs: frozenset[GlobalRef], fields: tuple[str, ...]) -> Mapping[str, Value]:
    """The attributes of an object of one of the classes ``refs``, made without arguments; all are among ``fields``."""
    name = next(iter(refs)).name
    if not isinstance(value, Opaque) or value.ref not in refs or value.form != "new" or value.args or value.kwargs:
        raise UnsupportedError(f"a {describe_kind(value)} stands where a {name} is expected")
    attributes = value.attributes
    unknown = [each for each in attributes if each not in fields]
    if unknown:
        raise UnsupportedError(f"a {name} has a field {unknown[0]!r:.80}, which this version does not know")
    return attributes


def _check_shard_order(order: Value, placements: tuple[Placement, ...]) -> None:
    """Refuse all orders of cutting but the default: from the first dim of the mesh to the last."""
    for entry in order if isinstance(order, tuple) else ():
        is_entry = isinstance(entry, Opaque) and entry.ref == _ORDER_ENTRY and len(entry.args) == 2
        dims = _check_naturals(entry.args[1] if is_entry else None, "DTensorSpec")
        if any(dim >= len(placements) for dim in dims):
            raise make_wrong_type_error("DTensorSpec")
        if list(dims) != sorted(dims):
            raise UnsupportedError(f"a DTensor is cut along the dims {list(dims)} of its mesh, in this order")


def _read_placement(value: Value, ndim: int) -> Placement:
    if not isinstance(value, Opaque) or not isinstance(value.ref, GlobalRef) or value.ref.module not in _PLACEMENTS:
        raise UnsupportedError(f"a {describe_kind(value)} stands where a placement is expected")
    name, attributes = value.ref.name, value.attributes
    if name == "Replicate" and not value.args and not attributes:
        return ReplicatePlacement()
    if name == "Shard" and not value.args and attributes.keys() == {"dim"}:
        return ShardPlacement(_check_dim(attributes["dim"], ndim))
    if name == "_StridedShard" and not value.args and attributes.keys() == {"dim", "split_factor"}:
        factor = attributes["split_factor"]
        if type(factor) is not int or not 0 < factor <= MAX_RANKS:
            raise make_wrong_type_error(name)
        return StridedShardPlacement(_check_dim(attributes["dim"], ndim), factor)
    problem = "which is not supported"
    if name in ("Partial", "_Partial"):
        problem = "so that the ranks hold values that are still to be added up; redistribute it before saving"
    raise UnsupportedError(f"a DTensor has the placement {name}, {problem}")


def _check_dim(dim: Value, ndim: int) -> int:
    if type(dim) is not int or not 0 <= dim < ndim:
        raise MalformedError(f"a placement cuts dim {format_brief(dim)} of a tensor of {ndim} dims")
    return dim


def _read_mesh(value: Value) -> SavedMesh:
    is_new = isinstance(value, Opaque) and "_layout" in value.attributes
    attributes = _read_attributes(value, frozenset({_MESH}), _NEW_MESH_FIELDS if is_new else _OLD_MESH_FIELDS)
    prefix = "_" if is_new else ""
    names, device = attributes.get(f"{prefix}mesh_dim_names"), attributes.get(f"{prefix}device_type")
    if is_new:
        shape, strides = _read_mesh_layout(attributes.get("_layout"))
    else:
        mesh = attributes.get("mesh")  # a tensor of ranks
        if not isinstance(mesh, StoredTensor) or not mesh.shape:
            raise make_wrong_type_error("DeviceMesh")
        shape = mesh.shape
        strides = tuple(((size,), (step,)) for size, step in zip(shape, contiguous_strides(shape), strict=True))
    ranks_field = "_flatten_rank_map" if is_new else "_flatten_mesh_list"
    ranks = _check_naturals(attributes.get(ranks_field), "DeviceMesh", MAX_RANKS)
    coordinate = _check_naturals(attributes.get("_coordinate_on_dim"), "DeviceMesh")
    if type(device) is not str:
        raise make_wrong_type_error("DeviceMesh")
    if len(coordinate) != len(shape) or any(a >= n for a, n in zip(coordinate, shape, strict=True)):
        raise MalformedError(f"a DeviceMesh of shape {list(shape)} has the coordinate {list(coordinate)}")
    # torch 2.10 and 2.11 say the rank by the coordinate in the mesh that this one was cut from.
    root_record = attributes.get("_root_mesh") if "_rank" not in attributes else None
    stated_rank = attributes.get("_rank") if root_record is None else _read_mesh(root_record).rank
    rank = _find_rank(stated_rank, ranks, shape, strides, coordinate)
    members = _find_members(rank, ranks, shape, strides, coordinate)
    if names is not None:
        are_names = isinstance(names, tuple | list) and all(type(name) is str for name in names)
        if not are_names or len(names) != len(shape):
            raise make_wrong_type_error("DeviceMesh")
    return SavedMesh(shape, ranks, members, rank, coordinate, device, None if names is None else tuple(names))


def _find_rank(stated_rank: Value, ranks: tuple[int, ...], shape: Shape, strides: Any, coordinate: Shape) -> int:
    """The rank at ``coordinate``, checked against ``stated_rank``, which a mesh that was cut from another must have."""
    rank_index = sum(map(_compute_rank_offset, coordinate, strides))
    if len(set(ranks)) != len(ranks) or prod(shape) > len(ranks):
        raise MalformedError("a DeviceMesh names a rank twice, or too few")
    is_whole = prod(shape) == len(ranks)
    if stated_rank is None and not is_whole:
        raise UnsupportedError("a DeviceMesh that was cut from another does not say its rank")
    rank = ranks[rank_index] if stated_rank is None and rank_index < len(ranks) else stated_rank
    if rank not in ranks or (is_whole and ranks[rank_index] != rank):
        raise MalformedError(f"a DeviceMesh of rank {format_brief(rank)} does not have it at its coordinate")
    return int(rank)


def _find_members(rank: int, ranks: tuple[int, ...], shape: Shape, strides: Any, coordinate: Shape) -> frozenset[int]:
    """The ranks at all coordinates of the mesh that has ``rank`` at ``coordinate``."""
    if prod(shape) == len(ranks):
        return frozenset(ranks)
    first_index = ranks.index(rank) - sum(map(_compute_rank_offset, coordinate, strides))
    rank_indices = [first_index + sum(map(_compute_rank_offset, each, strides)) for each in product(*map(range, shape))]
    if min(rank_indices) < 0 or max(rank_indices) >= len(ranks):
        raise MalformedError(f"a DeviceMesh of rank {rank} has coordinates outside of the mesh that it was cut from")
    return frozenset(ranks[place] for place in rank_indices)


def _compute_rank_offset(position: int, axis: tuple[Shape, Shape]) -> int:
    """Rank offset of ``position`` in one dim of a mesh, which may be made of several axes."""
    # A dim that was flattened from several has an axis for each: the last axis varies fastest.
    offset = 0
    for size, stride in zip(reversed(axis[0]), reversed(axis[1]), strict=True):
        position, inner = divmod(position, size)
        offset += inner * stride
    return offset


def _read_mesh_layout(value: Value) -> tuple[Shape, tuple[tuple[Shape, Shape], ...]]:
    attributes = _read_attributes(value, frozenset({_MESH_LAYOUT}), ("axes", "shape", "stride"))
    axes = attributes.get("axes")
    if axes is None:
        axes = _pair_nested_dims(attributes.get("shape"), attributes.get("stride"))
    else:
        records = _check_dim_tuple(axes)
        flat_axes = [_read_attributes(record, frozenset({_FLAT_LAYOUT}), ("shape", "stride")) for record in records]
        axes = tuple((axis.get("shape"), axis.get("stride")) for axis in flat_axes)
    for sizes, strides in axes:
        if not are_naturals(sizes) or not are_naturals(strides) or len(sizes) != len(strides) or 0 in sizes:
            raise make_wrong_type_error("_MeshLayout")
    return tuple(prod(sizes) for sizes, _ in axes), tuple((tuple(sizes), tuple(strides)) for sizes, strides in axes)


def _pair_nested_dims(shape: Value, stride: Value) -> tuple[tuple[Value, Value], ...]:
    """Dims as torch 2.10 keeps them: integers, or tuples of those that a dim was made of; one dim may stand bare."""
    shape, stride = ((shape,), (stride,)) if type(shape) is int else (shape, stride)
    if len(_check_dim_tuple(shape)) != len(_check_dim_tuple(stride)):
        raise make_wrong_type_error("_MeshLayout")
    dims = zip(shape, stride, strict=True)
    return tuple(((size,), (step,)) if type(size) is int else (size, step) for size, step in dims)


def _check_dim_tuple(value: Value) -> tuple[Value, ...]:
    if not isinstance(value, tuple) or not 0 < len(value) <= MAX_DIMS:
        raise make_wrong_type_error("_MeshLayout")
    return value


def _read_sharded_tensor(shape: Shape, dtype: DType, state: Value) -> ShardedTensorPart:
    """``(local_shards, metadata, process_group_state, sharding_spec, init_rrefs)``, checked against 2.15.0."""
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], list):
        raise make_wrong_type_error("ShardedTensor")
    shards, metadata, group = state[:3]
    field_names = ("shards_metadata", "size", "tensor_properties")
    metadata_fields = _read_attributes(metadata, frozenset({_SHARDED_METADATA}), field_names)
    size = metadata_fields.get("size")
    if not isinstance(size, Size) or tuple(size) != shape:
        raise MalformedError(f"the metadata of a ShardedTensor of shape {list(shape)} is of another tensor")
    rank, world = _read_process_group(group)
    local_shards = tuple(_read_shard(each, shape, dtype) for each in shards)
    holders = _find_holders(metadata_fields.get("shards_metadata"))
    return ShardedTensorPart(shape, dtype, rank, tuple(range(world)), holders, local_shards)


def _find_holders(shards: Value) -> frozenset[int]:
    """The ranks of all shards: those of one process group, which need not be all ranks."""
    metadata = (each.attributes for each in (shards if isinstance(shards, list) else ()) if isinstance(each, Opaque))
    devices = (found.get("placement") for found in metadata)
    ranks = (device.attributes.get("_rank") for device in devices if isinstance(device, Opaque))
    return frozenset(rank for rank in ranks if type(rank) is int)


def _read_process_group(value: Value) -> tuple[int, int]:
    """``ProcessGroupState``, an inner class of ShardedTensor."""
    ref: Value = value.ref if isinstance(value, Opaque) else None
    is_inner_class = isinstance(ref, Opaque) and ref.ref == GETATTR
    is_state = is_inner_class and ref.args == (SHARDED_TENSOR, PROCESS_GROUP_STATE)
    attributes = value.attributes if is_state else {}
    rank, world = attributes.get("global_rank"), attributes.get("global_world_size")
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world <= MAX_RANKS:
        raise make_wrong_type_error("ShardedTensor")
    return rank, world


def _read_shard(value: Value, shape: Shape, dtype: DType) -> tuple[Shape, StoredTensor]:
    attributes = _read_attributes(value, frozenset({_SHARD}), ("tensor", "metadata"))
    field_names = ("shard_offsets", "shard_sizes", "placement")
    shard_metadata = _read_attributes(attributes.get("metadata"), frozenset({_SHARD_METADATA}), field_names)
    offsets = _check_naturals(shard_metadata.get("shard_offsets"), "ShardMetadata")
    sizes = _check_naturals(shard_metadata.get("shard_sizes"), "ShardMetadata")
    local = _check_local_tensor(attributes.get("tensor"), dtype, "ShardedTensor")
    if sizes != local.shape:
        raise MalformedError(f"a piece of a ShardedTensor has the shape {list(local.shape)} and says {list(sizes)}")
    if len(offsets) != len(shape) or any(a + n > most for a, n, most in zip(offsets, sizes, shape, strict=True)):
        raise MalformedError(f"a piece at {list(offsets)} lies outside a ShardedTensor of shape {list(shape)}")
    return offsets, local


@dataclass(frozen=True, slots=True)
class PickledMesh:
    """A mesh of one dim as torch 2.15 pickles it, seen from one rank: the same object for all tensors of a file.

    ``ranks`` is the tensor of all ranks. The tensors of a file lie on the CPU, whatever the mesh's device, as those of
    a run with offloading do: loading moves them to where the parameter is.
    """

    value: Opaque

    @classmethod
    def of(cls, rank: int, world: int, device_type: str, dim_name: str | None, ranks: StoredTensor) -> PickledMesh:
        sizes, strides = ((), ()) if world == 1 else ((world,), (1,))
        axis = Opaque(_FLAT_LAYOUT, form="new", state={"shape": sizes, "stride": strides})
        return cls(Opaque(_MESH, form="new", state={
            "_device_type": device_type,
            "_layout": Opaque(_MESH_LAYOUT, form="new", state={"axes": (axis,)}),
            "_rank_map": ranks,
            "_mesh_dim_names": (dim_name,) if dim_name is not None else None,
            "_root_mesh": None,
            "_preserve_rank_order": False,
            "_flatten_rank_map": tuple(range(world)),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": ["0"],
            "_rank": rank,
            "_coordinate_on_dim": (rank,),
            "_hash": None,
        }))  # fmt: skip


_STRIDED = Opaque(GlobalRef("torch.serialization", "_get_layout"), ("torch.strided",))
_CPU = Opaque(GlobalRef("torch", "device"), ("cpu",))


def make_dtensor_record(shape: Shape, dtype: DType, mesh: PickledMesh, local: StoredTensor) -> Opaque:
    """A DTensor of ``shape`` that is cut along its rows, as torch 2.15 pickles it."""
    kind, element, strides = DTENSORS[0], GlobalRef("torch", dtype.value), contiguous_strides(shape)
    placement = Opaque(GlobalRef(f"{DTENSOR_PACKAGE}.placement_types", "Shard"), form="new", state={"dim": 0})
    meta = Opaque(
        GlobalRef(f"{DTENSOR_PACKAGE}._dtensor_spec", "TensorMeta"), (Size(shape), strides, element), form="new"
    )
    spec = Opaque(GlobalRef(f"{DTENSOR_PACKAGE}._dtensor_spec", "DTensorSpec"), form="new", state={
        "mesh": mesh.value,
        "placements": (placement,),
        "tensor_meta": meta,
        "shard_order": (Opaque(_ORDER_ENTRY, (0, (0,)), form="new"),),
        "use_strided_shard_as_shard_order": False,
        "_hash": None,
    })  # fmt: skip
    args = (kind, element, tuple(shape), strides, 0, _STRIDED, _CPU, False)
    state = (None, {"_local_tensor": local, "_spec": spec})
    return Opaque(REBUILD_FROM_TYPE, (REBUILD_WRAPPER_SUBCLASS, kind, args, state))
