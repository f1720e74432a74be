"""Keys of dicts and items of sets in a pickle: only those that are cheap to hash and to compare are inserted.

Hashing is the one thing that values of a pickle make Python do in C without bounds: a tuple is hashed through all its
parts each time, and equal hashes are compared pairwise.
"""

from __future__ import annotations

from ckpt_tools.core.values import (
    GlobalRef,
    Opaque,
    OrderedDict,
    Size,
    StorageRef,
    Value,
    describe_kind,
)
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


def insert_items(machine: Machine, target: Value, items: list[Value]) -> None:
    """Set ``items``, keys and values in turn."""
    if len(items) % 2:
        machine.fail("a key without a value")
    if isinstance(target, dict):
        if type(target) is OrderedDict and target.is_sealed:
            machine.fail("a tensor gets hooks, which torch never saves")
        num_keys = len(target) + len(items) // 2
        target.update(zip(check_keys(machine, target, items[::2]), items[1::2], strict=True))
        if len(target) != num_keys:
            machine.fail("a key is set twice, which no pickler does")
    elif type(target) is Opaque:
        if target.state is not None:
            machine.fail(f"it sets items of a {describe_kind(target)} that has its state already")
        target.pairs.extend(zip(items[::2], items[1::2], strict=True))
    else:
        machine.fail(f"it sets items of a {describe_kind(target)}")


_PLAIN_KEY_TYPES = frozenset({str, bytes, float, bool, type(None), GlobalRef, Opaque, MetadataIndex, StorageRef})
"""Keys whose hashes cannot be made to collide at will: secret, or of a fixed width, or by identity."""


def check_keys(machine: Machine, target: Value, keys: list[Value]) -> list[Value]:
    """``keys``, which are cheap to hash and do not collide in ``target``. Raises MalformedError."""
    kinds = set(map(type, keys))
    if str in kinds or bytes in kinds:
        _check_key_lengths(machine, keys)
    if int in kinds and any(type(key) is int and key.bit_length() > MAX_KEY_BITS for key in keys):
        machine.fail("a huge integer as a key")
    if kinds - _PLAIN_KEY_TYPES - {int}:
        _check_compound_keys(machine, target, [key for key in keys if type(key) not in _PLAIN_KEY_TYPES])
    return keys


def _check_key_lengths(machine: Machine, keys: list[Value]) -> None:
    if any(len(key) > MAX_KEY_CHARS for key in keys if type(key) is str or type(key) is bytes):
        machine.fail("a string of absurd length as a key")


def _check_compound_keys(machine: Machine, target: Value, keys: list[Value]) -> None:
    for key in keys:
        if _count_key_parts(machine, key, 0) > MAX_KEY_PARTS:
            machine.fail("a key of too many parts")
    # Only tuples and integers can be made to collide: their hashes are counted over all insertions into one dict.
    # The target stays alive with its entry, so that its id stays its own. A new one gets all its keys at once.
    counted: tuple[Value, list[int], set[int]] = (target, [0], set())
    if target is not None:
        counted = machine.key_hashes.setdefault(id(target), counted)
    _, num_collisions, seen_hashes = counted
    for key_hash in map(hash, keys):
        num_collisions[0] += key_hash in seen_hashes
        seen_hashes.add(key_hash)
    if num_collisions[0] > MAX_EQUAL_HASHES:
        machine.fail("keys whose hashes collide")


def _count_key_parts(machine: Machine, key: Value, num_parts: int) -> int:
    """``num_parts`` plus the number of hashes that hashing ``key`` takes; counting stops soon after the bound."""
    num_parts += 1
    if type(key) is int and key.bit_length() > MAX_KEY_BITS:
        machine.fail("a huge integer as a key")
    if type(key) in (tuple, Size):
        for part in key:
            if num_parts > MAX_KEY_PARTS:
                break
            num_parts = _count_key_parts(machine, part, num_parts)
    elif type(key) is str or type(key) is bytes:
        _check_key_lengths(machine, [key])
    elif type(key) not in _PLAIN_KEY_TYPES and type(key) not in (int, complex, frozenset):
        machine.fail(f"a {describe_kind(key)} as a key")
    return num_parts
