"""Our reader refuses a pickle, or means by it what both of CPython's unpicklers mean, and itself without macros."""

from __future__ import annotations

import codecs
import io
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata

from ckpt_tools.core.values import GlobalRef, Opaque
from ckpt_tools.errors import CkptError, MalformedError
from ckpt_tools.serialization.pickle.allowed_calls import ALLOWED_CALLS
from ckpt_tools.serialization.pickle.load import interpret_checked, loads
from ckpt_tools.serialization.pickle.machine import InstructionSet, Machine, map_python2_name
from ckpt_tools.serialization.pickle.opcodes import OPCODE_STEPS
from tests.serialization.test_pickles import sample_metadata

NUM_SAMPLED = 10_000
NUM_SOAKED = 1_000_000


class StandIn:
    """What every name is for CPython: a class whose objects only remember how they were made."""

    module = name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        made = super().__new__(cls)
        object.__setattr__(made, "parts", {"args": args, "state": None, "items": [], "pairs": []})
        return made

    def __setstate__(self, state: Any) -> None:
        self.parts["state"] = dict(state) if type(state) is dict else state  # type: ignore[attr-defined]

    def append(self, item: Any) -> None:
        self.parts["items"].append(item)  # type: ignore[attr-defined]

    def extend(self, items: Any) -> None:
        self.parts["items"].extend(items)  # type: ignore[attr-defined]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts["pairs"].append((key, value))  # type: ignore[attr-defined]


def _reconstructor(kind: Any, base: Any, state: Any) -> Any:
    """``copyreg._reconstructor`` as our reader interprets it."""
    if state is not None or (base.module, base.name) != ("builtins", "object"):
        raise ValueError("recorded as a call")
    return kind.__new__(kind)


REAL: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): codecs.encode,
    ("copyreg", "_reconstructor"): _reconstructor,
    **{("builtins", each.__name__): each for each in (set, frozenset, bytearray, bytes, complex)},
}
"""What our reader interprets too."""


class Names:
    """Whether names are Python 2's: CPython maps them in protocols 0 to 2, where nobody overrides ``find_class``."""

    are_mapped = False


def _stand_in(module: str, name: str) -> Any:
    if Names.are_mapped:
        module, name = map_python2_name(module, name)
    if (module, name) in REAL:
        return REAL[module, name]
    return type("Named", (StandIn,), {"module": module, "name": name})


class CUnpickler(pickle.Unpickler):
    find_class = staticmethod(_stand_in)


class PythonUnpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]
    find_class = staticmethod(_stand_in)


def meaning(value: Any, depth: int = 0) -> str:
    """A text that says the types and the parts, alike for our values and for the stand-ins'."""
    if depth > 60:
        return "deep"
    if isinstance(value, GlobalRef):
        return f"name {value.module}.{value.name}"
    if value in _REAL_NAMES if callable(value) and not isinstance(value, StandIn) else False:
        return _REAL_NAMES[value]
    if isinstance(value, type) and issubclass(value, StandIn):
        return f"name {value.module}.{value.name}"
    if isinstance(value, Opaque):
        parts = {"args": value.args, "state": value.state, "items": value.items, "pairs": value.pairs}
        return f"made of {meaning(value.ref, depth + 1)}: {_parts(parts, depth)}"
    if isinstance(value, StandIn):
        return f"made of {meaning(type(value), depth + 1)}: {_parts(value.parts, depth)}"  # type: ignore[attr-defined]
    if type(value) is dict:
        return "{" + ", ".join(f"{meaning(k, depth + 1)}: {meaning(v, depth + 1)}" for k, v in value.items()) + "}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(meaning(each, depth + 1) for each in value)})"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}({', '.join(sorted(meaning(each, depth + 1) for each in value))})"
    return f"{type(value).__name__} {value!r}"


_REAL_NAMES = {each: f"name {'.'.join(name)}" for name, each in REAL.items()}


def _parts(parts: dict[str, Any], depth: int) -> str:
    return ", ".join(f"{name}={meaning(part, depth + 1)}" for name, part in parts.items())


def theirs(unpickler: Any, data: bytes) -> str:
    stream = io.BytesIO(data)
    Names.are_mapped = data[:1] != b"\x80" or data[1:2] < b"\x03"
    try:
        found = meaning(unpickler(stream).load())
        return found if stream.tell() == len(data) else "more data"
    except Exception as error:
        return f"refused: {error}"


class Plain:
    """Pickled by name; read as a stand-in."""

    def __init__(self) -> None:
        self.number, self.text = 3, "x"


VALUES: list[Any] = [
    {"a": [1, -1, 300, 1 << 40, 2.5, None, True, False], "b": (b"x", "y", (), (1,), (1, 2, 3, 4)), 3: {4, "f"}},
    [Plain(), Plain(), frozenset({1, (2, 3)}), bytearray(b"xy"), "é\n\\", 1e300, float("inf")],
    {"shared": (shared := [1, 2]), "again": shared, "large": "z" * 300, "bytes": bytes(300), "n": list(range(30))},
]
GENUINE = [pickle.dumps(value, protocol) for value in VALUES for protocol in range(6)]
LARGE = pickle.dumps(["a" * 70_000, b"b" * 70_000, [str(n) for n in range(9_000)]], 4)

_NO_OPERANDS = b"N\x88\x89)]}\x8f(012aedlsutbR\x81\x85\x86\x87\x90\x91\x94."
_LINES = [
    b"I1\n", b"I-5\n", b"I01\n", b"I010\n", b"I+1\n", b"I1_0\n", b"I 1\n", b"L3L\n", b"L3\n", b"L0x1L\n", b"F1.5\n",
    b"F1\n", b"Finf\n", b"F1_0.5\n", b"Vab\n", b"V\\u0041\n", b"V\xe9\n", b"S'a'\n", b'S"a"\n', b"S'\\x61'\n",
    b"S 'a'\n", b"p0\n", b"p1\n", b"p01\n", b"g0\n", b"g 0\n", b"cm\nC\n", b"c__builtin__\nlist\n", b"im\nC\n", b"o",
]  # fmt: skip


def stream(generator: random.Random) -> bytes:
    """Random opcodes, most of which fit each other."""
    parts = [generator.choice([b"", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"])]
    for _ in range(generator.randrange(1, 14)):
        kind = generator.randrange(10)
        if kind < 3:
            parts.append(generator.choice(_LINES))
        elif kind < 6:
            parts.append(generator.choice(_NO_OPERANDS[:-1]).to_bytes(1, "little"))
        else:
            parts.append(_with_operand(generator))
    body = b"".join(parts[1:]) + generator.choice([b".", b"l.", b"t.", b"\x85."])
    return parts[0] + (_framed(generator, body) if parts[0][1:] >= b"\x04" and generator.random() < 0.5 else body)


def _framed(generator: random.Random, body: bytes) -> bytes:
    wrong = generator.choice([0, 0, 0, 0, -1, 1, -3])
    return b"\x95" + struct.pack("<Q", max(0, len(body) + wrong)) + body


def _with_operand(generator: random.Random) -> bytes:
    data = bytes(generator.choice(b"abc\xc3\xa9\x00") for _ in range(generator.randrange(4)))
    short = bytes([len(data)]) + data
    return generator.choice([
        b"K%c" % generator.randrange(256), b"M\x01\x02", b"J" + generator.randbytes(4), b"G" + generator.randbytes(8),
        b"\x8a" + short, b"\x8c" + short, b"U" + short, b"C" + short, b"X" + struct.pack("<I", len(data)) + data,
        b"B" + struct.pack("<I", len(data)) + data, b"\x96" + struct.pack("<Q", len(data)) + data, b"q\x00", b"q\x01",
        b"q\x02", b"h\x00", b"h\x01", b"r\x00\x00\x00\x00", b"j\x00\x00\x00\x00",
        b"\x8b" + struct.pack("<i", len(data)) + data,
    ])  # fmt: skip


def mutant(generator: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(generator.randrange(1, 3)):
        at = generator.randrange(len(found))
        kind = generator.randrange(5)
        if kind == 0:
            found[at] = generator.randrange(256)
        elif kind == 1 and len(found) > 5:
            del found[at : at + generator.randrange(1, 4)]
        elif kind == 2:
            found[at:at] = found[at : at + generator.randrange(1, 30)]
        elif kind == 3:
            found[at:at] = generator.choice(_LINES)
        else:
            found[at:at] = bytes([generator.choice(_NO_OPERANDS)])
    return bytes(found)


def samples(number: int, seed: int) -> Iterator[bytes]:
    generator = random.Random(seed)
    for each in range(number):
        yield stream(generator) if each % 2 else mutant(generator, generator.choice(GENUINE))


def test_what_picklers_write_is_read_alike():
    for data in [*GENUINE, LARGE]:
        assert _ours(data) == theirs(CUnpickler, data) == theirs(PythonUnpickler, data)


def _ours(data: bytes) -> str | None:
    try:
        return meaning(loads(data, path="x"))
    except CkptError:
        return None


@pytest.mark.extended
def test_every_pickle_is_refused_or_read_as_both_unpicklers_read_it(request):
    number = NUM_SOAKED if request.config.getoption("--soak") else NUM_SAMPLED
    num_read = 0
    for data in samples(number, seed=11):
        found = _ours(data)
        if (
            found is None
            or "made of made of" in found
            or any(f"made of name {'.'.join(name)}" in found for name in REAL)
        ):
            continue
        num_read += 1
        assert found == theirs(CUnpickler, data), data
        assert found == theirs(PythonUnpickler, data), data
    assert num_read > number // 40


# Macros: the reader takes the opcodes of a usual record of DCP at once

WITHOUT_MACROS = InstructionSet(OPCODE_STEPS, ALLOWED_CALLS, {})
NUM_DAMAGED, NUM_DAMAGED_SOAKED = 3_000, 10_000


def refused_or(read: Callable[[], Any]) -> str:
    try:
        return repr(read())
    except Exception:
        return "refused"


def by_macros(data: bytes) -> str:
    return refused_or(lambda: loads(data, path="x"))


def without_macros(data: bytes) -> str:
    def read() -> Any:
        machine = Machine(data, WITHOUT_MACROS, None)
        interpret_checked(machine, is_prefix=False)
        return machine.stack[-1]

    return refused_or(read)


def metadata_of_many(shared: bool) -> metadata.Metadata:
    """Tensors of two shapes, in one piece and in two; with ``shared`` the size of a piece is that of its tensor."""
    made = metadata.Metadata({}, {}, {})
    for number in range(12):
        rows = 3 + number % 2
        size, origin = torch.Size([rows]), torch.Size([0])
        pieces = [metadata.ChunkStorageMetadata(origin, size if shared else torch.Size([rows]))]
        if number % 3 == 0:
            pieces = [metadata.ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(rows)]
        facts = metadata.TensorProperties(torch.float32 if number % 4 else torch.int64)
        made.state_dict_metadata[f"w{number}"] = metadata.TensorStorageMetadata(facts, size, pieces)
    return made


@pytest.mark.extended
def test_damaged_metadata_means_the_same_with_and_without_macros(request):
    """Also where it refers to the parts that serve to build a record, which no pickler does."""
    generator = random.Random(7)
    number = NUM_DAMAGED_SOAKED if request.config.getoption("--soak") else NUM_DAMAGED
    plain = [pickle.dumps(sample_metadata(chunks), 4) for chunks in (3, 12)]
    plain += [pickle.dumps(metadata_of_many(shared), 4) for shared in (False, True)]
    num_read = 0
    for _ in range(number):
        data = mutant(generator, generator.choice(plain))
        found = by_macros(data)
        num_read += found != "refused"
        assert found == without_macros(data), data
    assert num_read > number // 100


def test_equal_tensors_of_a_metadata_are_one_record_that_is_filled_once():
    """Nothing in the pickle can reach it, so nothing can change it; another state would change all that share it."""
    data = pickle.dumps(metadata_of_many(False), 4)
    found = loads(data, path="x").state_dict_metadata
    assert len({id(each) for each in found.values()}) < len(found) - 3
    with pytest.raises(MalformedError, match="twice"):
        loads(b"\x80\x04" + data[2 + 9 :].replace(b"ub", b"ub}b", 1), path="x")


def test_what_a_macro_left_out_can_be_fetched():
    """A pickle that refers to part of a record is read again without macros."""
    data = pickle.dumps(metadata_of_many(True), 4)
    inner = data[data.index(b"\x95") + 9 : -1]
    for index in range(20, 200):
        fetching = b"\x80\x04" + inner + b"h%c\x86." % index
        assert by_macros(fetching) == without_macros(fetching) != "refused", index
