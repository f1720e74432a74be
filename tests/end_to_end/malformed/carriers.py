"""The other carriers, as their frameworks wrote them: each file is cut at its boundaries, missing, hostile, or a bit of
it is another. What is read in spite of that has to be what is read of the undamaged files."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from typing import Any

from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import FormatError, SourceNotFoundError, UnsafeError
from tests.end_to_end.fuzzing import corpus
from tests.end_to_end.fuzzing.seeds import torch_bytes
from tests.end_to_end.fuzzing.target import Outcome, execute
from tests.end_to_end.malformed.case import Case
from tests.end_to_end.malformed.truncated import boundaries

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
