"""The machine means by every pickle what others mean by it: the C unpickler, and itself without macros."""

from __future__ import annotations

import pickle
import random
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.serialization.pickle.allowed_calls import CALLS
from ckpt_tools.serialization.pickle.load import loads, run_checked
from ckpt_tools.serialization.pickle.machine import Language, Machine
from ckpt_tools.serialization.pickle.opcodes import STEPS
from tests.serialization.test_pickles import sample_metadata

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
    except CkptError as error:
        return "part of a record" if "never put" in str(error) else "refused"


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


def test_damaged_builtin_data_means_what_the_c_unpickler_says() -> None:
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
        if found not in ("refused", "part of a record"):
            num_read += 1
            assert found == theirs(data), data
    assert num_read > NUM_MUTANTS // 40


def test_damaged_metadata_means_the_same_with_and_without_macros() -> None:
    """But that a macro gives no way to refer to the parts that serve to build a record, which no pickler does."""
    generator = random.Random(7)
    samples = [pickle.dumps(sample_metadata(chunks), 4) for chunks in (3, 12)]
    alphabet = bytes(range(256))
    num_read = 0
    for _ in range(NUM_MUTANTS // 4):
        data = mutant(generator, generator.choice(samples), alphabet)
        found = ours(data)
        if found != "part of a record":
            num_read += found != "refused"
            assert found == without_macros(data), data
    assert num_read > NUM_MUTANTS // 400
