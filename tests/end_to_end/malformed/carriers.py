"""Files that end early, at every boundary of their structure and one byte off; files that are missing or empty. Of the
other carriers, as their frameworks wrote them, also hostile files, and ones with another bit: what is read in spite of
that has to be what is read of the undamaged files."""

import json
import pickle
import pickletools
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from typing import Any

from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import FormatError, SourceNotFoundError, UnsafeError
from tests.end_to_end.fuzzing import corpus
from tests.end_to_end.fuzzing.seeds import SEEDS, torch_bytes
from tests.end_to_end.fuzzing.target import Outcome, execute
from tests.end_to_end.malformed.case import Case, family_of, seed

CARRIERS = ("megatron", "zstd", "sharded", "accelerate", "npz", "gguf")

BESIDE = {
    "sharded": ("actor/fsdp_config.json", "actor/huggingface/config.json"),
    "accelerate": ("scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"),
}
"""Files without a tensor, which a checkpoint can do without: their damage is noted."""

OPTIMIZERS = {"accelerate": "optimizer.bin"}
"""Files that nothing else mentions: without them the weights are a checkpoint of their own."""

CHECKED = ("npz", "sharded", "accelerate", "megatron")
"""Carriers that are zips of torch or numpy: all but the elements has a checksum, or is checked against something else.
A name in the index of a DCP or in the header of GGUF can become another one, and nobody can tell."""

UNCHECKED = (".metadata", "metadata.json")
"""Files of those that have no checksum."""

MAX_CUTS = 120
"""Of one file, spread evenly over its boundaries."""

NUM_FLIPS = 40
"""Of one file."""

FEW = ("npz", "gguf")
"""Carriers of a single small file, which is cut and changed in more places."""

ERRORS = (FormatError, SourceNotFoundError, UnsafeError)

Tensors = dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]


class _Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.abort, ()


def cases() -> Iterator[Case]:
    for name in CARRIERS:
        for path, data in corpus.seeds()[name].items():
            yield from _of_file(name, path, data)


def _of_file(name: str, path: str, data: bytes) -> Iterator[Case]:
    files = corpus.seeds()[name]
    is_beside = path in BESIDE.get(name, ())
    rest = {other: content for other, content in files.items() if other != path}
    is_needed = not is_beside and path != OPTIMIZERS.get(name)
    yield Case(name, "missing", path, rest, ERRORS, must_fail=is_needed)
    for cut in _cuts(data, 3 * MAX_CUTS if name in FEW else MAX_CUTS):
        cut_off = {**files, path: data[:cut]}
        yield Case(name, "truncated", f"{path} at {cut}", cut_off, ERRORS, must_fail=_loses(name, data, cut, is_beside))
    hostile = {"a pickle that aborts": pickle.dumps(_Calls()), "the same saved by torch": torch_bytes(_Calls())}
    for what, content in hostile.items():
        yield Case(name, "hostile", f"{path}: {what}", {**files, path: content}, ERRORS, must_fail=not is_beside)
    if name in CHECKED and path not in UNCHECKED:
        yield from _flipped(name, path, data)


def _cuts(data: bytes, number: int) -> list[int]:
    steps = range(0, len(data), max(1, len(data) // number * 2))
    cuts = sorted(cut for cut in {*boundaries(data), *steps} if cut < len(data))
    return cuts[:: -(-len(cuts) // number)]


def _loses(name: str, data: bytes, cut: int, is_beside: bool) -> bool:
    """Whether a cut takes away what is needed; the last tensor of a GGUF is followed by a padding."""
    return not is_beside and not (name == "gguf" and not any(data[cut:]))


def _flipped(name: str, path: str, data: bytes) -> Iterator[Case]:
    random = Random(f"{name}/{path}")
    for _ in range(4 * NUM_FLIPS if name in FEW else NUM_FLIPS):
        at, bit = random.randrange(len(data)), random.randrange(8)
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        files = {**corpus.seeds()[name], path: bytes(changed)}
        yield Case(name, "flipped", f"{path}: bit {bit} of byte {at}", files, ERRORS, must_fail=False)


def judge(case: Case, outcome: Outcome) -> str | None:
    """Why this should not have been read so."""
    found, wanted = tensors_of(outcome), undamaged(case.family)
    if case.rule == "missing" and case.name == OPTIMIZERS.get(case.family):
        wanted = {key: tensor for key, tensor in wanted.items() if key[1] == "weight"}
    if found == wanted or (case.rule == "flipped" and is_one_bit(found, wanted)):
        return None
    differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    return f"{len(differing)} tensors are not those of the undamaged files: {differing[:3]}"


@cache
def undamaged(name: str) -> Tensors:
    return tensors_of(execute(corpus.seeds()[name]))


def tensors_of(outcome: Outcome) -> Tensors:
    assert outcome.manifest is not None, "it was read"
    entries = outcome.manifest.tensors
    found = {key: (entries[StateKey(*key)], elements) for key, elements in outcome.elements.items()}
    return {key: (entry.dtype.value, entry.shape, elements) for key, (entry, elements) in found.items()}


def is_one_bit(found: Mapping[tuple[str, str], Any], wanted: Mapping[tuple[str, str], Any]) -> bool:
    """Whether nothing but one bit of one element differs, which has no checksum that reading it would look at."""
    if found.keys() != wanted.keys() or any(found[key][:2] != wanted[key][:2] for key in found):
        return False
    pairs = [(found[key][2], wanted[key][2]) for key in found if found[key] != wanted[key]]
    return sum((a ^ b).bit_count() for one, other in pairs for a, b in zip(one, other, strict=True)) == 1


# Of the seeds

MAX_CUTS_OF_SEEDS = 60
"""Of one file, spread evenly over its boundaries."""

COMPANIONS = ("scheduler.pt", "trainer_state.json")
"""Files beside a checkpoint, whose damage is noted."""


def truncated() -> Iterator[Case]:
    for name in SEEDS:
        yield from _cut_off(name)
        yield from _without_each(name)


def _cut_off(name: str) -> Iterator[Case]:
    for path, data in seed(name).items():
        fails = path not in (*COMPANIONS, "latest", "latest_universal")
        cuts = sorted({cut for at in boundaries(data) for cut in (at - 1, at, at + 1) if 0 <= cut < len(data)})
        for cut in cuts[:: -(-len(cuts) // MAX_CUTS_OF_SEEDS)]:
            files = {**seed(name), path: data[:cut]}
            yield Case(family_of(name), "truncated", f"{name} {path} at {cut}", files, must_fail=fails)


def _without_each(name: str) -> Iterator[Case]:
    for path in seed(name):
        rest = {other: data for other, data in seed(name).items() if other != path}
        yield Case(family_of(name), "missing", f"{name} {path}", rest, ERRORS[:2], must_fail=False)
    yield Case(family_of(name), "missing", f"{name}: everything", {}, ERRORS[:2])


def boundaries(data: bytes) -> set[int]:
    """Where the parts of a file begin."""
    found = {0, len(data)}
    for magic in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08"):
        at = data.find(magic)
        while at >= 0:
            found |= {at, at + 4, at + 22, at + 30, at + 46}
            at = data.find(magic, at + 1)
    if data[:1] == b"\x80":
        found |= {at for _, _, at in pickletools.genops(data) if at is not None}
    if data[:1] == b"{":
        found |= {at for at, byte in enumerate(data) if byte in b'{}[]:,"'}
    if data[8:9] == b"{":
        found |= _of_safetensors(data)
    return found


def _of_safetensors(data: bytes) -> set[int]:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {8, 9, 8 + length} | {8 + length + at for info in header.values() for at in info["data_offsets"]}
