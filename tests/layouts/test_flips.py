"""A flipped bit of metadata is refused by plain ``verify``, changes nothing, or is of a kind that docs/trust.md names.

The checkpoints are those of the fuzzer: a small one of each format, in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from random import Random
from typing import Any

import pytest

from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.verification.integrity import check_integrity
from tests.end_to_end.fuzzing import corpus
from tests.end_to_end.fuzzing.target import elements_of, opened

pytestmark = pytest.mark.extended

Files = Mapping[str, bytes]

NUM_SAMPLED = 60
"""Flips of a checkpoint in ``make test-all``; ``make soak`` flips one bit of every byte."""

METADATA = {
    "dcp": (".metadata", ()),
    "dcp_flattened": (".metadata", ("names", "values")),
    "zstd": (".metadata", ()),
    "megatron": ("*", ("names", "values")),
    "torch": ("*", ()),
    "torch_sharded": ("*.bin", ()),
    "zero1": ("*_states.pt", ()),
    "universal": ("*.pt", ()),
    "sharded": ("*.pt", ()),
    "npz": ("*", ()),
    "safetensors": ("*", ("names", "dtype", "values")),
    "safetensors_sharded": ("*", ("names", "dtype", "values")),
    "safetensors_state": ("*", ("names", "dtype", "values")),
    "gguf": ("*", ("names", "dtype", "values", "tensors")),
}
"""Files of each checkpoint that are flipped, and the changes that nothing in the format shows."""


def headers(name: str, path: str, data: bytes) -> range:
    """Bytes before the tensors, which a format without checksums does not protect."""
    if path.endswith(".safetensors"):
        return range(8 + int.from_bytes(data[:8], "little"))
    return range(300) if name == "gguf" else range(len(data))


def flips(name: str, files: Files, *, soak: bool) -> Iterator[dict[str, bytes]]:
    pattern, _ = METADATA[name]
    random = Random(name)
    places = [
        (path, at) for path, data in files.items() if fnmatchcase(path, pattern) for at in headers(name, path, data)
    ]
    for path, at in places if soak else random.sample(places, min(NUM_SAMPLED, len(places))):
        data = bytearray(files[path])
        data[at] ^= 1 << random.randrange(8)
        yield {**files, path: bytes(data)}


def verified(files: Files) -> tuple[Any, ...]:
    """What is read after plain ``verify`` has found nothing. Raises CkptError if it finds something."""
    with opened(files) as source:
        source, manifest = read_source(source, ReadOptions())
        report = check_integrity(source, manifest, num_workers=1, on_progress=lambda done, total: None)
        if not report.equal:
            raise CkptError("verify says so")
        try:
            elements = elements_of(source.store, manifest)
        except CkptError as error:
            pytest.fail(f"verify finds nothing, and reading does: {error}")
    tensors = {key: (entry.dtype.value, entry.shape, elements[tuple(key)]) for key, entry in manifest.tensors.items()}
    return tensors, (dict(manifest.aliases), repr(manifest.groups), repr(manifest.extra), manifest.step)


def changes(before: tuple[Any, ...], after: tuple[Any, ...]) -> Iterator[str]:
    ours, theirs = (list(found.values()) for found, _ in (before, after))
    if Counter(each[2] for each in ours) != Counter(each[2] for each in theirs):
        yield "tensors"
    elif Counter(each for each in ours if each[2]) != Counter(each for each in theirs if each[2]):
        yield "dtype"
    if before[0].keys() != after[0].keys():
        yield "names"
    if before[1] != after[1]:
        yield "values"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", METADATA)
def test_a_flip_of_metadata_is_found_or_named(name, pytestconfig):
    files = corpus.seeds()[name]
    before = verified(files)
    found: Counter[str] = Counter()
    for changed in flips(name, files, soak=bool(pytestconfig.getoption("--soak"))):
        try:
            found.update(changes(before, verified(changed)))
        except CkptError:
            found["refused"] += 1
    assert found.pop("refused") > 0
    assert found.keys() <= {*METADATA[name][1]}, found
