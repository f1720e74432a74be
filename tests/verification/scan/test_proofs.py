"""Proofs of scan: imports of hidden pickles, items that are compared with proven ones, the documented list."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import GlobalRef, Opaque, Value
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.serialization.pickle.proof import prove_pickle
from ckpt_tools.serialization.pickle.sharded_tensors import PickledMesh
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.verification.scan import ScanReport, scan_source
from ckpt_tools.verification.scan.alike import ProvenItems
from ckpt_tools.verification.scan.piece import FileView
from ckpt_tools.verification.scan.tokens import is_importing_pickle
from tests.verification.scan.generator import CARRIERS, INDIRECT, TRICKS, Files
from tests.verification.scan.listing import lines
from tests.verification.scan.scanner import is_clean

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[3] / "docs" / "scanning_list.md"


def test_the_page_shows_the_closed_list():
    assert "\n".join(lines()) == PAGE.read_text().partition("-->")[2].strip()


# A file that passes as something else is not clean if its bytes could also be a pickle that imports something


def piece(data: bytes) -> FileView:
    return FileView("x", "", len(data), lambda start, stop: data[start:stop])


@pytest.mark.parametrize("name", INDIRECT)
def test_whatever_a_pickle_imports_is_seen(name):
    assert is_importing_pickle(piece(INDIRECT[name]))
    assert is_importing_pickle(piece(b"V" + b"a" * (1 << 17) + b"\n0" + INDIRECT[name]))
    assert is_importing_pickle(piece(b"S'" + b"a" * (1 << 17) + b"'\n0" + INDIRECT[name]))
    assert is_importing_pickle(piece(b"B" + (1 << 17).to_bytes(4, "little") + b"\0" * (1 << 17) + INDIRECT[name]))


def test_so_is_every_trick():
    assert [name for name, data in TRICKS if not is_importing_pickle(piece(data))] == []


@pytest.mark.parametrize("name", INDIRECT)
@pytest.mark.parametrize("carrier", ["safetensors to the last byte", "strict safetensors named bin"])
def test_a_strict_file_of_safetensors_that_is_a_pickle_too_is_not_clean(carrier, name):
    assert not is_clean(CARRIERS[carrier](b"N." + INDIRECT[name]))
    assert not is_clean(CARRIERS[carrier](b"\x80\x05" + INDIRECT[name]))


@pytest.mark.parametrize(
    "data", [b"", b"N.", b"a text\n", b"{}", b"c my text\nanother line\n", b"V", b"\x8c\xff", b"J"]
)
def test_what_imports_nothing_is_none(data):
    assert not is_importing_pickle(piece(data))


# An item that is compared with a proven one gets the verdict that proving it gives, for each byte that is changed


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    with warnings.catch_warnings(action="ignore"):
        state = {f"w{number}": torch.full((4,), number, dtype=torch.float32) for number in range(3)}
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def scanned(files: Files) -> ScanReport:
    store = MemoryStore({name: bytearray(data) for name, data in files.items()})
    return scan_source(Source.open(store), "memory://")


def test_items_alike_are_proved_once(files, monkeypatch):
    added: list[int] = []
    add = ProvenItems.add_item
    monkeypatch.setattr(ProvenItems, "add_item", lambda self, *args: (added.append(1), add(self, *args)))
    report = scanned(files)
    assert (report.clean, report.num_pickles, len(added)) == (True, 4, 1)


def test_a_changed_byte_gets_the_verdict_of_a_proof(files, monkeypatch, request):
    data = files["__0_0.distcp"]
    size = len(data) // 3
    assert data[size : size + 4] == b"PK\x03\x04"
    places = range(size, 2 * size, 1 if request.config.getoption("--soak") else 13)
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    elements = data.index(torch.full((4,), 1.0).numpy().tobytes())
    changed.append(data[:elements] + b"\x93NUMPY" + data[elements + 6 :])
    compared = [scanned({**files, "__0_0.distcp": each}).to_json() for each in changed]
    monkeypatch.setattr(ProvenItems, "find_directory", lambda self, data: None)
    proved = [scanned({**files, "__0_0.distcp": each}).to_json() for each in changed]
    assert compared == proved
    assert 0 < sum(bool(each["clean"]) for each in compared) < len(compared) // 2
    assert not compared[-1]["clean"]


# Names that files of ranks hold may do what they do there, and nothing else

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
    "names alone": lambda: [DTENSOR, SHARDED_TENSOR, WRAPPER],
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
    assert prove_pickle(dumps(GENUINE[name]()), path="x").refusals == ()


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_else_is_refused(name):
    assert prove_pickle(dumps(HOSTILE[name]()), path="x").refusals


def test_what_we_write_is_proved():
    record = PickledMesh.of(1, 2, "cpu", "fsdp", None)  # type: ignore[arg-type]
    del record.value.state["_rank_map"]
    assert prove_pickle(dumps(record.value), path="x").refusals == ()
