"""Names that files of ranks hold may do what they do there, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import GlobalRef, Opaque, Value
from ckpt_tools.serialization.pickle.load import dumps
from ckpt_tools.serialization.pickle.proof import prove
from ckpt_tools.serialization.pickle.sharded_tensors import MeshRecord

DTENSOR = GlobalRef("torch.distributed.tensor", "DTensor")
SHARDED_TENSOR = GlobalRef("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
WRAPPER = GlobalRef("torch._utils", "_rebuild_wrapper_subclass")
FROM_TYPE = GlobalRef("torch._tensor", "_rebuild_from_type_v2")
FROM_BYTES = GlobalRef("torch.storage", "_load_from_bytes")
LAYOUT = Opaque(GlobalRef("torch.serialization", "_get_layout"), ("torch.strided",))
CPU = Opaque(GlobalRef("torch", "device"), ("cpu",))
SPECS, MESHES = "torch.distributed.tensor._dtensor_spec", "torch.distributed.device_mesh"


def wrapped(kind: GlobalRef, inner: GlobalRef, state: Value, function: Value = WRAPPER) -> Opaque:
    args = (inner, GlobalRef("torch", DType.FLOAT32.value), (2,), (1,), 0, LAYOUT, CPU, False)
    return Opaque(FROM_TYPE, (function, kind, args, state))


def spec(**state: Value) -> Opaque:
    return Opaque(GlobalRef(SPECS, "DTensorSpec"), form="new", state=state)


def mesh(**state: Value) -> Opaque:
    return Opaque(GlobalRef(MESHES, "DeviceMesh"), form="new", state=state)


def inner(name: str, of: GlobalRef = SHARDED_TENSOR) -> Opaque:
    return Opaque(GlobalRef("builtins", "getattr"), (of, name))


GENUINE: dict[str, Callable[[], Value]] = {
    "a spec": lambda: spec(mesh=mesh(_rank=1), placements=(), _hash=3),
    "an inner class": lambda: Opaque(inner("ProcessGroupState"), form="new", state={"global_rank": 1}),
    "names alone": lambda: [DTENSOR, SHARDED_TENSOR],
}

HOSTILE: dict[str, Callable[[], Value]] = {
    "a command as a local tensor": lambda: wrapped(
        DTENSOR, DTENSOR, (None, {"_local_tensor": Opaque(GlobalRef("os", "system"), ("x",)), "_spec": spec()})
    ),
    "an attribute more": lambda: wrapped(DTENSOR, DTENSOR, ({"__setstate__": FROM_BYTES}, {"_spec": spec()})),
    "a slot more": lambda: wrapped(DTENSOR, DTENSOR, (None, {"_spec": spec(), "backward": FROM_BYTES})),
    "a state that is handed on": lambda: wrapped(DTENSOR, DTENSOR, FROM_BYTES),
    "another class inside": lambda: wrapped(DTENSOR, SHARDED_TENSOR, (None, {"_spec": spec()})),
    "another function": lambda: wrapped(DTENSOR, DTENSOR, (None, {"_spec": spec()}), GlobalRef("builtins", "eval")),
    "a wrapper that is called": lambda: Opaque(WRAPPER, (DTENSOR,)),
    "a class that is called": lambda: Opaque(DTENSOR, ()),
    "a class with a state": lambda: Opaque(DTENSOR, form="new", state={"_local_tensor": None}),
    "references for RPC": lambda: wrapped(
        SHARDED_TENSOR, SHARDED_TENSOR,
        ([], Opaque(GlobalRef("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata"), form="new",
                    state={}),
         Opaque(inner("ProcessGroupState"), form="new", state={}),
         Opaque(GlobalRef("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec"), form="new",
                state={"shards": []}), True),
    ),
    "another attribute of the class": lambda: inner("__init__"),
    "an attribute of another class": lambda: inner("ProcessGroupState", GlobalRef("os", "path")),
    "an inner class with a hook": lambda: Opaque(
        inner("ProcessGroupState"), form="new", state={"__setstate__": FROM_BYTES}
    ),
    "an attribute of an inner class": lambda: inner("__init__", GlobalRef(SHARDED_TENSOR.module, "os")),
    "a mesh with a hook": lambda: mesh(__setstate__=FROM_BYTES),
    "a mesh with names that are objects": lambda: mesh(_dim_group_names=[FROM_BYTES]),
    "a mesh of a mesh that is none": lambda: mesh(_root_mesh=spec()),
    "a spec with another mesh": lambda: spec(mesh=FROM_BYTES),
    "a spec with another attribute": lambda: spec(mesh=mesh(), __class__=FROM_BYTES),
    "a placement with arguments": lambda: Opaque(
        GlobalRef("torch.distributed.tensor.placement_types", "Shard"), (FROM_BYTES,), form="new"
    ),
    "a plan of other items": lambda: Opaque(
        GlobalRef("torch.distributed.checkpoint.planner", "SavePlan"), form="new", state={"items": [spec()]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GENUINE)
def test_what_ranks_hold_is_proved(name):
    assert prove(dumps(GENUINE[name]()), path="x").refusals == ()


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_else_is_refused(name):
    assert prove(dumps(HOSTILE[name]()), path="x").refusals


def test_what_we_write_is_proved():
    record = MeshRecord.of(1, 2, "cpu", "fsdp", None)  # type: ignore[arg-type]
    del record.value.state["_rank_map"]
    assert prove(dumps(record.value), path="x").refusals == ()
