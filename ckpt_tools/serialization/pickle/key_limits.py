"""Keys of dicts and elements of sets: only those that are cheap to hash and to tell apart.

Hashing is the one thing that values out of a pickle make Python do in C, without bounds: a tuple is hashed through all
its parts each time, and equal hashes are compared pairwise.
"""

from __future__ import annotations

from ckpt_tools.core.values import GlobalRef, Opaque, Size, StorageRef, Value, kind_of
from ckpt_tools.serialization.pickle.dcp_metadata import MetadataIndex
from ckpt_tools.serialization.pickle.machine import Machine

MAX_KEY_PARTS = 1000
"""Elements of a tuple as a key, those of tuples in it included: they are hashed again each time it is used."""

MAX_EQUAL_HASHES = 100
"""Keys of one dict with the hash of another: none by chance. The hashes of tuples of integers can be made to collide,
and n such keys cost n * n steps."""

MAX_KEY_CHARS = 1 << 16
"""Length of a string as a key: equal ones are compared again and again."""

MAX_KEY_BITS = 64
"""Width of an integer as a key; wider ones can be made to collide without end (their hash is modulo 2 ** 61 - 1)."""


def insert(machine: Machine, target: Value, items: list[Value]) -> None:
    """Set ``items``, keys and values in turn."""
    if len(items) % 2:
        machine.fail("a key without a value")
    if isinstance(target, dict):
        num_keys = len(target) + len(items) // 2
        target.update(zip(checked_keys(machine, target, items[::2]), items[1::2], strict=True))
        if len(target) != num_keys:
            machine.fail("a key is set twice, which no pickler does")
    elif type(target) is Opaque:
        if target.state is not None:
            machine.fail(f"it sets items of a {kind_of(target)} that has its state already")
        target.pairs.extend(zip(items[::2], items[1::2], strict=True))
    else:
        machine.fail(f"it sets items of a {kind_of(target)}")


_PLAIN_KEYS = frozenset({str, bytes, float, bool, type(None), GlobalRef, Opaque, MetadataIndex, StorageRef})
"""Keys whose hashes cannot be made to collide at will: secret, or of a fixed width, or by identity."""


def checked_keys(machine: Machine, target: Value, keys: list[Value]) -> list[Value]:
    """``keys``, which are cheap to hash and do not collide in ``target``. Raises MalformedError."""
    kinds = set(map(type, keys))
    if str in kinds or bytes in kinds:
        _check_lengths(machine, keys)
    if int in kinds and any(type(key) is int and key.bit_length() > MAX_KEY_BITS for key in keys):
        machine.fail("a huge integer as a key")
    if kinds - _PLAIN_KEYS - {int}:
        _check_compound_keys(machine, target, [key for key in keys if type(key) not in _PLAIN_KEYS])
    return keys


def _check_lengths(machine: Machine, keys: list[Value]) -> None:
    if any(len(key) > MAX_KEY_CHARS for key in keys if type(key) is str or type(key) is bytes):
        machine.fail("a string of absurd length as a key")


def _check_compound_keys(machine: Machine, target: Value, keys: list[Value]) -> None:
    for key in keys:
        if _num_parts(machine, key, 0) > MAX_KEY_PARTS:
            machine.fail("a key of too many parts")
    # The target stays alive with its entry, so that its id stays its own. A new one gets all its keys at once.
    fresh: tuple[Value, list[int], set[int]] = (target, [0], set())
    _, num_equal, seen = fresh if target is None else machine.key_hashes.setdefault(id(target), fresh)
    for found in map(hash, keys):
        num_equal[0] += found in seen
        seen.add(found)
    if num_equal[0] > MAX_EQUAL_HASHES:
        machine.fail("keys whose hashes collide")


def _num_parts(machine: Machine, key: Value, parts: int) -> int:
    """``parts`` and the number of hashes that hashing ``key`` takes; stops soon after the bound."""
    parts += 1
    if type(key) is int and key.bit_length() > MAX_KEY_BITS:
        machine.fail("a huge integer as a key")
    if type(key) in (tuple, Size):
        for part in key:
            if parts > MAX_KEY_PARTS:
                break
            parts = _num_parts(machine, part, parts)
    elif type(key) is str or type(key) is bytes:
        _check_lengths(machine, [key])
    elif type(key) not in _PLAIN_KEYS and type(key) not in (int, complex, frozenset):
        machine.fail(f"a {kind_of(key)} as a key")
    return parts
