"""The machine means by every pickle what others mean by it: the C unpickler, and itself without macros."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata

from ckpt_tools.errors import CkptError, MalformedError
from ckpt_tools.serialization.pickle.allowed_calls import CALLS
from ckpt_tools.serialization.pickle.load import loads, run_checked
from ckpt_tools.serialization.pickle.machine import Language, Machine
from ckpt_tools.serialization.pickle.opcodes import STEPS
from tests.serialization.test_pickles import sample_metadata

pytestmark = pytest.mark.extended

NUM_MUTANTS = 40_000

WITHOUT_MACROS = Language(STEPS, CALLS, {})

PLAIN = b"NIKMJLFGSTUVXBC\x8c\x88\x89\x8a()]}\x8f012laedsutq\x94hpgp\x85\x86\x87\x90\x91."
"""Opcodes of builtin data: nothing that ``pickle.loads`` could run."""


def mutant(generator: random.Random, data: bytes, alphabet: bytes) -> bytes:
    """``data`` with a few bytes replaced, dropped, doubled or put in."""
    found = bytearray(data)
    for _ in range(generator.randrange(1, 3)):
        at = generator.randrange(len(found))
        kind = generator.randrange(4)
        if kind == 0:
            found[at] = generator.choice(alphabet)
        elif kind == 1 and len(found) > 5:
            del found[at : at + generator.randrange(1, 5)]
        elif kind == 2:
            found[at:at] = found[at : at + generator.randrange(1, 60)]
        else:
            found[at:at] = bytes([generator.choice(alphabet)])
    return bytes(found)


def ours(data: bytes) -> str:
    try:
        return repr(loads(data, path="x"))
    except CkptError:
        return "refused"


def without_macros(data: bytes) -> str:
    try:
        machine = Machine(data, WITHOUT_MACROS, None)
        run_checked(machine, is_prefix=False)
        return repr(machine.stack[-1])
    except Exception:
        return "refused"


def theirs(data: bytes) -> str:
    try:
        return repr(pickle.loads(data))
    except Exception:
        return "refused"


def test_damaged_builtin_data_means_what_the_c_unpickler_says():
    """Where both read it. We refuse more: bounds, trailing data, containers inside themselves."""
    generator = random.Random(5)
    value: Any = {"a": [1, -1, 300, 1 << 40, 2.5, None, True], "b": (b"x", "y", (), (1,), (1, 2, 3, 4)), 3: {4, "f"}}
    samples = [pickle.dumps(value, protocol) for protocol in (3, 4, 5)] + [pickle.dumps([1, 2.5, "t", (3,)], 0)]
    num_read = 0
    for _ in range(NUM_MUTANTS):
        data = mutant(generator, generator.choice(samples), PLAIN)
        # Names would be imported; a huge memo index would be allocated.
        if any(opcode in data for opcode in b"ci\x93r\x82\x83\x84"):
            continue
        found = ours(data)
        if found != "refused":
            num_read += 1
            assert found == theirs(data), data
    assert num_read > NUM_MUTANTS // 40


def test_damaged_metadata_means_the_same_with_and_without_macros():
    """Also where it refers to the parts that serve to build a record, which no pickler does."""
    generator = random.Random(7)
    samples = [pickle.dumps(sample_metadata(chunks), 4) for chunks in (3, 12)]
    samples += [pickle.dumps(metadata_of_many(shared), 4) for shared in (False, True)]
    alphabet = bytes(range(256))
    num_read = 0
    for _ in range(NUM_MUTANTS // 4):
        data = mutant(generator, generator.choice(samples), alphabet)
        found = ours(data)
        num_read += found != "refused"
        assert found == without_macros(data), data
    assert num_read > NUM_MUTANTS // 400


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


def test_equal_tensors_of_a_metadata_are_one_record():
    """Nothing in the pickle can reach it, so nothing can change it."""
    found = loads(pickle.dumps(metadata_of_many(False), 4), path="x").state_dict_metadata
    assert len({id(each) for each in found.values()}) < len(found) - 3


@pytest.mark.parametrize("index", range(20, 200))
def test_what_a_macro_left_out_can_be_fetched(index):
    """A pickle that refers to part of a record is read again without macros."""
    data = pickle.dumps(metadata_of_many(True), 4)
    inner = data[data.index(b"\x95") + 9 : -1]
    fetching = b"\x80\x04" + inner + b"h%c\x86." % index
    assert ours(fetching) == without_macros(fetching) != "refused"


def test_a_record_is_filled_once():
    """Another state would change all that share it."""
    data = pickle.dumps(metadata_of_many(False), 4)
    built = data[2 + 9 :].replace(b"ub", b"ub}b", 1)
    with pytest.raises(MalformedError, match="twice"):
        loads(b"\x80\x04" + built, path="x")
