"""Pickles are read as pickle and torch read them, and what is written both read alike."""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import pathlib
import pickle
import pickletools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem, metadata

from ckpt_tools.core.dtypes import DType, from_torch_storage
from ckpt_tools.core.value_json import value_to_json
from ckpt_tools.core.values import (
    PARAMETER,
    DefaultDict,
    GlobalRef,
    Opaque,
    OrderedDict,
    Size,
    StorageRef,
    StoredTensor,
    Value,
)
from ckpt_tools.errors import CkptError, MalformedError, UnsupportedError
from ckpt_tools.serialization.pickle import dcp_metadata as dcp_classes
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from tests.serialization.archives import records_of, saved

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

_KEYS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), 1 << 63),
    st.text(),
    st.binary(),
    st.tuples(st.text(), st.integers(0, 9)),
)
_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 300), 1 << 300), st.floats(), st.text(), st.binary(),
    st.complex_numbers(), st.builds(bytearray, st.binary()),
)  # fmt: skip


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts, sets = st.dictionaries(_KEYS, inner), (st.sets(_KEYS), st.frozensets(_KEYS))
    return st.one_of(st.lists(inner), st.lists(inner).map(tuple), dicts, dicts.map(collections.OrderedDict), *sets)


values: st.SearchStrategy[Any] = st.recursive(_SCALARS, _containers, max_leaves=30)


def read(data: bytes) -> Value:
    return loads(data, path="x", persistent_load=storage)


def storage(pid: Value) -> StorageRef:
    assert pid[0] == "storage"
    return StorageRef(pid[2], from_torch_storage(pid[1].name), pid[4], pid[3])


def pickle_of(value: Any) -> bytes:
    """The pickle that torch.save writes of ``value``."""
    return records_of(saved(value))["archive/data.pkl"]


@given(values, st.sampled_from(PROTOCOLS))
@settings(max_examples=60, deadline=None)
def test_plain_values_are_read_from_every_protocol_and_written_for_pickle_and_ourselves(value, protocol):
    ours = read(pickle.dumps(value, protocol))
    written = dumps(ours)
    assert repr(_plain(ours)) == repr(_plain(pickle.loads(written))) == repr(_plain(read(written)))
    assert repr(_plain(ours)) == repr(_plain(value))
    assert dumps(read(written)) == written


def _plain(value: Any) -> Any:
    """A form whose text says all: the class of each container, sets in order."""
    if isinstance(value, dict):
        kind = "OrderedDict" if isinstance(value, collections.OrderedDict | OrderedDict) else "dict"
        return (kind, [(_plain(key), _plain(item)) for key, item in value.items()])
    if isinstance(value, set | frozenset):
        return (type(value).__name__, sorted(map(repr, value)))
    if isinstance(value, list | tuple):
        return (type(value).__name__, [_plain(item) for item in value])
    return (type(value).__name__, value)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(data):
    error = _refusal(data)
    assert error is None or (error.path == "x" and "\n" not in str(error))


def _refusal(data: bytes) -> CkptError | None:
    try:
        value_to_json(read(data))
    except CkptError as error:
        return error
    return None


def sample_metadata(chunks: int) -> metadata.Metadata:
    """Two tensors and an object, as a coordinator gathers them: names come anew from every rank."""
    sizes = torch.Size([4, 1 << 20, 300])
    entries: dict[str, Any] = {"object": metadata.BytesStorageMetadata()}
    items: dict[Any, Any] = {metadata.MetadataIndex("object"): filesystem._StorageInfo("__0_0.distcp", 0, 17)}
    for fqn in ("model.weight", "model.scalar"):
        shape = sizes if fqn == "model.weight" else torch.Size([])
        offsets = [torch.Size([4 * row, 0, 0]) if shape else torch.Size([]) for row in range(chunks if shape else 1)]
        entries[fqn] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=torch.bfloat16),
            torch.Size([4 * chunks, *sizes[1:]]) if shape else shape,
            [metadata.ChunkStorageMetadata(offset, shape) for offset in offsets],
        )
        for row, offset in enumerate(offsets):
            index = metadata.MetadataIndex("".join(list(fqn)), offset, None if row == 1 else row)
            info = filesystem._StorageInfo(f"__{row}_0.distcp", row << 33, 1 << row % 40)
            items[index] = info
    return metadata.Metadata(
        entries,
        {"model.weight": ("model", "weight"), "object": ("object",)},
        items,
        metadata.StorageMeta(checkpoint_id=pathlib.Path("/a/b"), save_id="1"),
        "1.0.0",
    )


@pytest.mark.parametrize("chunks", [1, 300, 700])
def test_dcp_metadata_is_written_for_torch_and_read_by_macros_as_by_opcodes(chunks):
    """Protocol 2 puts every value by number, which macros do not read."""
    theirs = sample_metadata(chunks)
    ours, by_opcodes = read(pickle.dumps(theirs)), read(pickle.dumps(theirs, 2))
    assert isinstance(ours, dcp_classes.Metadata) and list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert [(at.offset, at.length) for at in ours.storage_data.values()] == [
        (at.offset, at.length) for at in theirs.storage_data.values()
    ]
    assert pickle.loads(dumps(ours)) == theirs
    assert repr(read(pickle.dumps(theirs, 4))) == repr(by_opcodes) == repr(read(dumps(by_opcodes))) == repr(ours)
    assert repr(read(dumps(ours))) == repr(ours)


def test_metadata_of_older_versions_is_read():
    data = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(Vstate_dict_metadata\n}Va\n"
        b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n)\x81}(Vproperties\n"
        b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n)\x81("
        b"ctorch\nfloat16\nN\x89N\x89tbVsize\nctorch\nSize\n)\x85RVchunks\n]ubsVplanner_data\nNVstorage_data\nNub."
    )
    value = read(data)
    assert value.state_dict_metadata["a"].properties.dtype.dtype is DType.FLOAT16
    assert (value.storage_data, value.storage_meta, value.version) == ({}, None, None)


def test_attributes_that_others_set_on_metadata_are_kept():
    theirs = sample_metadata(1)
    theirs.mcore_data = {"x": 1}  # type: ignore[attr-defined]
    ours = read(pickle.dumps(theirs))
    assert ours.extra == {"mcore_data": {"x": 1}}
    assert pickle.loads(dumps(ours)).mcore_data == {"x": 1}


RECORD = b"ctorch.distributed.checkpoint.metadata\n%b\n)\x81"


INFO = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(Vrelative_path\n%bVoffset\n%bVlength\nK\x01ub."


@pytest.mark.parametrize(
    "data",
    [
        RECORD % b"ChunkStorageMetadata" + b"}(Voffsets\nNVsizes\nNub.",
        RECORD % b"ChunkStorageMetadata" + b"}Voffsets\nNsb.",
        RECORD % b"ChunkStorageMetadata" + b"]b.",
        RECORD % b"MetadataIndex" + b"}(Vfqn\nK\x01Vindex\nNub.",
        RECORD % b"MetadataIndex" + b"}(Vfqn\nVa\nVindex\nVb\nub.",
        RECORD % b"TensorProperties" + b"(NNNNNtb.",
        RECORD % b"Metadata" + b"}Vstate_dict_metadata\n]sb.",
        RECORD % b"Metadata" + b"}Vstate_dict_metadata\n}Va\nNssb.",
        RECORD % b"Metadata" + b"}(Vstate_dict_metadata\n}Vstorage_data\n}NNsub.",
        RECORD % b"Metadata" + b"}(Vstate_dict_metadata\n}Vversion\nK\x01ub.",
        RECORD % b"Metadata" + b".",
        RECORD % b"TensorStorageMetadata" + b"}(Vproperties\nNVsize\nNVchunks\nNub.",
        INFO % (b"Va\n", b"J\xff\xff\xff\xff"),
        INFO % (b"N", b"K\x01"),
    ],
)
def test_records_of_the_wrong_kind_are_refused(data):
    with pytest.raises(MalformedError):
        read(data)


def test_a_list_changed_after_it_became_a_field_is_checked():
    body = (
        RECORD % b"TensorStorageMetadata"
        + b"}(Vproperties\n" + RECORD % b"TensorProperties" + b"(ctorch\nfloat16\nN\x89N\x89tb"
        + b"Vsize\nctorch\nSize\n)\x85RVchunks\n]q\x00ub"
    )  # fmt: skip
    assert read(body + b".").chunks == []
    with pytest.raises(MalformedError):
        read(b"(" + body + b"h\x00Vintruder\nat.")
    with pytest.raises(MalformedError):
        read(b"(" + body + b"h\x00" + RECORD % b"ChunkStorageMetadata" + b"at.")


def test_an_unknown_field_is_refused_since_it_may_change_the_others():
    with pytest.raises(UnsupportedError, match="cipher"):
        read(INFO.replace(b"ub.", b"Vcipher\nVaes\nub.") % (b"Va\n", b"K\x01"))


class Custom:
    """A class of the user's own."""

    def __init__(self) -> None:
        self.number = 3
        self.me = self


class Appended(list):  # type: ignore[type-arg]
    pass


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


class Named:
    def __new__(cls, *, name: str = "x") -> Named:
        made = super().__new__(cls)
        made.name = name  # type: ignore[attr-defined]
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, str]]:
        return (), {"name": self.name}  # type: ignore[attr-defined]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_of_unknown_classes_survive_the_round_trip(protocol):
    original = {
        "custom": Custom(),
        "list": Appended([1, 2]),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], maxlen=3),
        "namespace": argparse.Namespace(a=[1]),
        "date": datetime.date(2024, 2, 3),
        "scalar": np.float32(2.5),
        "array": np.arange(6).reshape(2, 3),
        "path": pathlib.PurePosixPath("a/b"),
        "slice": slice(1, 2),
        "range": range(5),
        "class": Custom,
        "type": int,
        "function": json.dumps,
        "method": dict.fromkeys,
    }
    if protocol >= 2:
        original |= {"slotted": Slotted(), "named": Named(name="n")}
    ours = read(pickle.dumps(original, protocol))
    again = pickle.loads(dumps(ours))
    assert again["custom"].number == 3 and again["custom"].me is again["custom"]
    np.testing.assert_array_equal(again["array"], original["array"])
    for name in set(original) - {"custom", "array", "slotted", "named"}:
        assert type(again[name]) is type(original[name]) and again[name] == original[name], name
    if protocol >= 2:
        assert (again["slotted"].a, again["slotted"].b, again["named"].name) == (1, [2], "n")


def test_an_opaque_object_says_what_it_is():
    value = read(pickle.dumps({"n": argparse.Namespace(a=1), "s": Slotted(), "d": datetime.date(2024, 2, 3)}))
    made = value["n"]
    assert (made.ref, made.form, made.attributes) == (GlobalRef("argparse", "Namespace"), "new", {"a": 1})
    assert value["s"].attributes == {"a": 1, "b": [2]}
    assert repr(value["d"]) == r"datetime.date(b'\x07\xe8\x02\x03')"


TENSORS: dict[str, Any] = {
    "plain": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "view": torch.arange(10)[3:7],
    "expanded": torch.ones(1).expand(1000),
    "0-d": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "grad": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2, 2), requires_grad=False),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    "meta": torch.empty(2, 3, device="meta", dtype=torch.float16),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_read_and_written_as_torch_saves_them(name):
    """Written as the same opcodes but for the memo and the two ways to write a tuple of three."""
    tensor, theirs = TENSORS[name], pickle_of(TENSORS[name])
    ours = read(theirs)
    assert isinstance(ours, StoredTensor)
    assert f"torch.{ours.dtype.value}" == str(tensor.dtype)
    assert (ours.shape, ours.strides) == (tuple(tensor.shape), tuple(tensor.stride()))
    assert (ours.storage_offset, ours.requires_grad) == (tensor.storage_offset(), tensor.requires_grad)
    assert ours.wrapper == (PARAMETER if name == "parameter" else None)
    assert ours.is_contiguous == tensor.is_contiguous()
    if ours.storage is not None:
        assert ours.storage.num_bytes == tensor.untyped_storage().nbytes()
    assert (ours.storage is None) == (name == "meta")
    assert _essence(dumps(ours)) == _essence(theirs)


def _essence(data: bytes) -> list[tuple[str, Any]]:
    """Opcodes with the memo resolved."""
    memo: dict[int, tuple[str, Any]] = {}
    found: list[tuple[str, Any]] = []
    for opcode, argument, _ in pickletools.genops(data):
        if "PUT" in opcode.name:
            memo[argument] = found[-1]
        elif "GET" in opcode.name:
            found.append(memo[argument])
        elif opcode.name != "MARK":
            found.append((opcode.name.rstrip("123"), argument))
    return found


class Wrapped(torch.Tensor):
    """A subclass with an attribute of its own."""


def test_tensor_subclasses_keep_class_and_attributes():
    tensor = torch.ones(2).as_subclass(Wrapped)
    tensor.note = {"a": 1}  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "x"  # type: ignore[attr-defined]
    ours = read(pickle_of([tensor, parameter]))
    assert [(t.wrapper.name, t.state) for t in ours] == [("Wrapped", {"note": {"a": 1}}), ("Parameter", {"tag": "x"})]
    assert value_to_json(read(dumps(ours))) == value_to_json(ours) and read(dumps(ours)) == ours


def test_one_tensor_in_two_places_stays_one_and_a_state_dict_keeps_its_order_and_metadata():
    tensor = torch.ones(2)
    ours = read(pickle_of({"a": tensor, "b": tensor, "c": tensor[1:]}))
    assert ours["a"] is ours["b"] and ours["c"].storage is not None
    again = read(dumps(ours))
    assert again["a"] is again["b"] and again["c"].storage.key == again["a"].storage.key
    ours = read(pickle_of(torch.nn.Linear(2, 2).state_dict()))
    assert isinstance(ours, OrderedDict) and list(ours) == ["weight", "bias"]
    assert ours.attributes is not None and ours.attributes["_metadata"] == {"": {"version": 1}}


def test_conjugated_tensors_are_no_plain_tensors():
    """They are kept as the record of a call, so that the message that refuses one can name it."""
    reason = explain_unreadable(read(pickle_of(torch.ones(2, dtype=torch.complex64).conj())))
    assert reason == (
        "it is stored with the flags conj, which change its values; save it with resolve_conj() and resolve_neg()"
    )


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI%d\ntQI%d\n(%bt(%bt\x89NtR."


@pytest.mark.parametrize(
    ("numel", "offset", "shape", "strides"),
    [
        (6, 0, b"I2\nI3\n", b"I3\n"),
        (6, 0, b"I7\n", b"I1\n"),
        (6, 1, b"I6\n", b"I1\n"),
        (6, 0, b"I2\nI3\n", b"I4\nI1\n"),
        (6, -1, b"I2\n", b"I1\n"),
        (6, 0, b"I-2\n", b"I1\n"),
        (6, 0, b"I2\n", b"I-1\n"),
        (-6, 0, b"", b""),
        (0, 0, b"", b""),
        (6, 0, b"I9223372036854775808\n", b"I0\n"),
        (6, 0, b"I4611686018427387904\nI4611686018427387904\n", b"I0\nI0\n"),
        (1 << 62, 0, b"I1\n", b"I1\n"),
        (6, 0, b"Va\n", b"I1\n"),
        (6, 0, b"F1.0\n", b"I1\n"),
        (6, 0, b"I1\n" * 65, b"I1\n" * 65),
    ],
)
def test_a_tensor_that_leaves_its_storage_is_refused(numel, offset, shape, strides):
    with pytest.raises(MalformedError):
        read(TENSOR % (numel, offset, shape, strides))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"ctorch._utils\n_rebuild_tensor_v2\n(Vx\nK\x00))\x89NtR.", "not a storage"),
        (b"", "malformed"),
        (b"N", "malformed"),
        (b"N.N.", "more data"),
        (b"N.\x00", "more data"),
        (b".", "malformed"),
        (b"t.", "malformed"),
        (b"\x80\x06N.", "protocol"),
        (b"\xffN.", "not an opcode"),
        (b"\x97.", "buffers"),
        (b"h\x00.", "malformed"),
        (b"Nq\x05h\x03.", "out of order"),
        (b"(NNNNq\x05\x94t.", "out of order"),
        (b"g-1\n.", "malformed"),
        (b"Np-1\n.", "memo"),
        (b"(1.", "malformed"),
        (b"NR.", "malformed"),
        (b"NNR.", "tuple"),
        (b"N)R.", "called"),
        (b"V1\n)\x81.", "not a class"),
        (b"Nb.", "malformed"),
        (b"N}b.", "no state|has none"),
        (b"NNa.", "appends"),
        (b"N(NNu.", "sets items"),
        (b"](NNe(NNu.", "sets items"),
        (b"N(N\x90.", "adds"),
        (b"}(Nu.", "without a value"),
        (b"}]Ns.", "as a key"),
        (b"K\x01K\x02\x93.", "not a string"),
        (b"Q.", "malformed"),
        (b"NQ.", "outside of it"),
        (b"Pxyz\n.", "outside of it"),
        (b"Sabc\n.", "no pickler"),
        (b"Iabc\n.", "malformed"),
        (b"I1", "line"),
        (b"X\x05\x00\x00\x00\xff\xff\xff\xff\xff.", "malformed"),
        (b"ctorch\nSize\nVab\n\x85R.", "Size"),
        (b"ctorch\nSize\n(I1\nI-1\nt\x85R.", "extent"),
        (b"ccollections\nOrderedDict\n)RNb.", "state of nothing"),
        (b"cm\nC\n)\x81}b}b.", "twice"),
        (b"c" + b"m" * 10_000 + b"\nC\n.", "absurd"),
        (b"\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00N.", "early"),
        (b"cbuiltins\nset\n(Vab\ntR.", "."),
    ],
)  # fmt: skip
def test_malformed_pickles_have_one_error(data, reason):
    with pytest.raises(MalformedError, match=reason) as caught:
        loads(data, path="some.pt")
    assert caught.value.path == "some.pt" and "\n" not in str(caught.value)


def test_python_2_strings_are_text_and_persistent_ids_need_somebody_who_knows_them():
    assert read(b"(U\x03abcT\x03\x00\x00\x00defS'ghi'\nl.") == ["abc", "def", "ghi"]
    assert loads(b"(Vid\nctorch\nfloat32\ntQ.", path="x", persistent_load=lambda pid: pid) == (
        "id",
        GlobalRef("torch", "float32"),
    )


def test_defaultdict_keeps_its_factory_and_never_calls_it():
    ours = read(pickle.dumps(collections.defaultdict(list, {1: [2]})))
    assert isinstance(ours, DefaultDict) and ours.factory == GlobalRef("builtins", "list")
    with pytest.raises(KeyError):
        ours[9]
    assert pickle.loads(dumps(ours)) == {1: [2]} and pickle.loads(dumps(ours))[9] == []


def test_only_values_can_be_written():
    with pytest.raises(TypeError, match="Custom"):
        dumps([Custom()])


def test_a_value_can_be_sent_between_our_own_processes():
    ours = read(pickle_of({"t": torch.nn.Parameter(torch.ones(2)), "d": torch.device("cpu"), "n": Custom()}))
    ours |= {"o": OrderedDict({"a": 1}, {"b": 2}), "f": DefaultDict(None, {1: 2}), "s": Size((1, 2))}
    ours |= {"m": read(pickle.dumps(sample_metadata(2)))}
    again = pickle.loads(pickle.dumps(ours))
    assert (
        value_to_json(again) == value_to_json(ours) and repr(again["m"]) == repr(ours["m"]) and again["t"] == ours["t"]
    )
    assert again["n"].attributes["me"] is again["n"] and again["o"].attributes == {"b": 2}


def test_json_says_everything_and_ends():
    ours = read(pickle.dumps({"n": Custom(), 1: float("nan"), "b": b"x", "s": {2, 1}, "z": 1j}))
    text = json.dumps(value_to_json(ours), allow_nan=False)
    assert "$cycle" in text and "$float" in text and "eA==" in text
    shared: Value = ["x"]
    for _ in range(40):
        shared = [shared, shared]
    with pytest.raises(MalformedError, match="many times"):
        value_to_json(shared)


@pytest.mark.parametrize(
    "call", [b"c_codecs\nencode\n(Vab\nVrot13\ntR.", b"cbuiltins\nbytearray\n(I5\ntR.", b"cbuiltins\ncomplex\n(V1\ntR."]
)
def test_an_object_of_the_allow_list_called_wrongly_is_recorded(call):
    assert isinstance(read(call), Opaque)
