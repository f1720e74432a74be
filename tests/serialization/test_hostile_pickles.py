"""Nothing runs: every payload, by every technique, under an audit hook."""

import copyreg
import os
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import GlobalRef, Opaque, OrderedDict
from ckpt_tools.errors import CkptError, MalformedError
from ckpt_tools.serialization.pickle.load import MAX_DEPTH, loads
from ckpt_tools.serialization.pickle.machine import PickleTooLongError
from tests.support.sweep import tiered
from tests.verification.scan.generator import TRICKS

EVENTS: list[str] = []
WATCHING = [False]


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if WATCHING[0] and event != "builtins.id":
        EVENTS.append(f"{event}{args!r}"[:200])


sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[list[str]]:
    """The audit events meanwhile."""
    EVENTS.clear()
    WATCHING[0] = True
    try:
        yield EVENTS
    finally:
        WATCHING[0] = False


def outcome(data: bytes) -> Any:
    try:
        return loads(data, path="hostile")
    except CkptError as error:
        return error


def test_the_audit_hook_sees_what_pickle_would_do(tmp_path):
    with watched() as events:
        pickle.loads(b"cos\nmkdir\n(V%b\ntR." % str(tmp_path / "canary").encode())
    assert any("os.mkdir" in event for event in events) and any("find_class" in event for event in events)


def test_no_hostile_pickle_runs_anything():
    loads(b"N.", path="first")
    modules = set(sys.modules)
    with watched() as events:
        for _, data in TRICKS:
            outcome(data)
    assert events == [] and len(TRICKS) > 400 and set(sys.modules) == modules


def test_a_call_is_recorded_and_stays_readable():
    value = outcome(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.")
    assert isinstance(value, Opaque) and repr(value) == "os.system('id')"
    value = outcome(b"cbuiltins\ngetattr\n(cos\nenviron\nVpop\ntR(VHOME\ntR.")
    assert isinstance(value, Opaque) and value.args == ("HOME",)
    assert value.ref.args == (GlobalRef("os", "environ"), "pop")


@pytest.mark.parametrize("opcode", [b"\x82\xf0", b"\x83\xf0\x00", b"\x84\xf0\x00\x00\x00"])
def test_the_extension_registry_is_refused_also_where_its_cache_is_filled(opcode):
    """In the C unpickler a cached extension never reaches ``find_class``."""
    copyreg.add_extension("os", "getpid", 240)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf0)R.") == os.getpid()
        with watched() as events, pytest.raises(MalformedError, match="extension registry"):
            loads(b"\x80\x02" + opcode + b")R.", path="x")
        assert events == []
    finally:
        copyreg.remove_extension("os", "getpid", 240)


def test_nothing_of_ours_can_be_changed_from_a_pickle():
    state = b"}V__doc__\nVchanged\ns"
    for module, name in [
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch", "FloatStorage"),
        ("collections", "OrderedDict"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("some.unknown", "Class"),
    ]:
        target = f"c{module}\n{name}\n".encode()
        for build in (state + b"b", b"N" + state + b"\x86b", state + state + b"\x86b"):
            error = outcome(target + build + b".")
            assert isinstance(error, MalformedError), (module, name, build)
    assert DType.FLOAT32.value == "float32" and "changed" not in str(OrderedDict.__doc__)


VICTIMS = (
    b"ctorch\nfloat32\n", b"ctorch\nSize\n(K\x01t\x85R", b"ccollections\ndefaultdict\n)R",
    b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n((\x89tR",
)  # fmt: skip


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("state", [b"}Vmodule\nVx\ns", b"N}Vmodule\nVx\ns\x86", b"]Vx\naVy\na"])
def test_values_without_state_refuse_one(victim, state):
    assert isinstance(outcome(victim + state + b"b."), MalformedError)


BOMBS = {
    "a huge memo index": b"Nr\xff\xff\xff\x7f.",
    "a huge memo index in text": b"Np2147483647\n.",
    "a huge string": b"X\xff\xff\xff\x7fabc.",
    "a huge string of 8 length bytes": b"\x8d" + struct.pack("<Q", 1 << 40) + b"abc.",
    "huge bytes": b"\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "a huge bytearray": b"\x96" + struct.pack("<Q", 1 << 40) + b"abc.",
    "a huge frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a huge integer": b"\x8b" + struct.pack("<I", 1 << 24) + b"\x7f" * (1 << 24) + b".",
    "a huge integer in text": b"L" + b"9" * 100_000 + b"L\n.",
    "bytearray(10 ** 12)": b"cbuiltins\nbytearray\nI1000000000000\n\x85R.",
    "bytes(10 ** 12)": b"cbuiltins\nbytes\nI1000000000000\n\x85R.",
    "range to list": b"cbuiltins\nlist\ncbuiltins\nrange\nI1000000000000\n\x85R\x85R.",
    "sets": b"(" + b"\x8f" * 150_000 + b"l.",
    "empty lists": b"(" + b"]" * 150_000 + b"l.",
    "the same encoding again": (
        b"\x80\x02X"
        + struct.pack("<I", 1 << 20)
        + b"x" * (1 << 20)
        + b"q\x000c_codecs\nencode\nq\x010(X\x06\x00\x00\x00latin1q\x02"
        + b"h\x01h\x00h\x02\x86R" * 1000
        + b"l."
    ),
    "the same set again": (
        b"\x80\x02(" + b"".join(b"M%b" % struct.pack("<H", i) for i in range(60_000)) + b"lq\x000(cbuiltins\nset\nq\x01"
        + b"h\x01h\x00\x85R" * 1000
        + b"l."
    ),
    "marks": b"(" * 150_000,
    "objects of no class": b"cm\nC\nq\x00" + b"h\x00)\x81" * 15_000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_memory_by_their_size(name):
    data = BOMBS[name]
    tracemalloc.start()
    try:
        value = outcome(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(value, MalformedError | PickleTooLongError | Opaque), name
    assert peak < 16 * 2**20 + 48 * len(data), f"{name}: {peak:,} bytes out of {len(data):,}"


DEEP = {
    "tuples as a key": b"})" + b"\x85" * 200_000 + b"Ns.",
    "tuples in a set": b"\x8f()" + b"\x85" * 200_000 + b"\x90.",
    "tuples through the memo": b"})q\x00" + b"h\x00\x86q\x00" * 30_000 + b"Ns.",
    "sizes": b"ctorch\nSize\nq\x000)" + b"\x85q\x010h\x00h\x01\x85R" * 20_000 + b".",
    "objects": b"cm\nC\nq\x00)" + b"\x85q\x010h\x00h\x01\x81" * 20_000 + b".",
    "states": b"cm\nC\nq\x00)\x81" + b"q\x010h\x00)\x81h\x01b" * 20_000 + b".",
    "shared tuples as a key": b"})q\x00" + b"h\x00\x86q\x00" * 50 + b"Ns.",
    "shared tuples in a set": b"cbuiltins\nset\n])q\x00" + b"h\x00\x86q\x00" * 50 + b"a\x85R.",
    "shared tuples as a name": (
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nq\x010)q\x00"
        + b"h\x00\x86q\x00" * 50
        + b"0}h\x01)\x81}(Vfqn\nh\x00Vindex\nNubNs."
    ),
    "just too deep": b"]" * (MAX_DEPTH + 1) + b"a" * MAX_DEPTH + b".",
}


DEEP_BY_KIND = ("tuples as a key", "objects", "shared tuples as a key", "shared tuples in a set",
                "shared tuples as a name", "just too deep")  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", tiered(DEEP, test=DEEP_BY_KIND, extended=DEEP))
def test_deep_nesting_is_refused_without_a_crash(name):
    """Hashing a deep tuple recurses in C without a check, and a shared one is hashed again wherever it occurs: on a
    usual stack 200,000 levels end the process, and 50 levels of ``(x, x)`` take 2 ** 50 steps."""
    error = outcome(DEEP[name])
    assert isinstance(error, MalformedError), name


def test_nesting_to_the_bound_is_read():
    value = loads(b"]" * MAX_DEPTH + b"a" * (MAX_DEPTH - 1) + b".", path="x")
    for _ in range(MAX_DEPTH - 1):
        (value,) = value
    assert value == []


def test_the_longest_path_counts_not_the_first_found():
    """Every list is an item of the root too, one level deep; the chain through them is what a walk recurses on."""
    chain = b"(" + b"".join(b"]q%c" % i for i in range(200)) + b"lq\xff"
    links = b"".join(b"0h%ch%ca" % (i, i + 1) for i in range(199))
    assert isinstance(outcome(chain + links + b"0h\xff."), MalformedError)


def test_an_object_inside_itself_is_kept_and_a_container_is_refused():
    value = loads(b"\x80\x02cm\nC\n)\x81q\x00}Vself\nh\x00sb.", path="x")
    assert value.attributes["self"] is value
    for data in (b"]q\x00h\x00a.", b"}q\x00Nh\x00s.", b"]q\x00(h\x00tq\x010h\x00h\x01a."):
        with pytest.raises(MalformedError, match=r"contains itself|leaves more behind"):
            loads(data, path="x")


def _colliding(number: int) -> list[bytes]:
    """Pairs of integers whose tuples have one hash: the second is solved for, given the first (CPython's tuplehash)."""
    p1, p2, p5, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) & mask

    pairs, first, wanted = [], 1, None
    while len(pairs) < number:
        acc = rotate((p5 + first * p2) & mask, 31) * p1 & mask
        if wanted is None:
            wanted = (acc + 7 * p2) & mask
        second = (wanted - acc) * pow(p2, -1, 1 << 64) & mask
        if second < (1 << 61) - 1:
            pairs.append(b"\x8a\x08%b\x8a\x08%b\x86" % (struct.pack("<q", first), struct.pack("<q", second)))
        first += 1
    return pairs


def test_keys_made_to_collide_or_absurd_are_refused():
    pairs = _colliding(300)
    first, second = (pickle.loads(pair + b".") for pair in pairs[:2])
    assert first != second and hash(first) == hash(second)
    for data in (
        b"}(" + b"N".join(pairs) + b"Nu.",
        b"}" + b"Ns".join(pairs) + b"Ns.",
        b"(" + b"".join(pairs) + b"\x91.",
    ):
        with pytest.raises(MalformedError, match="collide"):
            loads(data, path="x")
    for key in (
        b"X" + struct.pack("<I", 100_000) + b"x" * 100_000,
        b"\x8a\x10" + b"\x01" * 16,
        b"(" + b"N" * 2000 + b"t",
    ):
        with pytest.raises(MalformedError, match="key"):
            loads(b"}" + key + b"Ns.", path="x")


def test_many_tuples_are_keys():
    wanted = {(row, str(column)): None for row in range(100) for column in range(100)}
    assert loads(pickle.dumps(wanted), path="x") == wanted
