"""The other carriers, as their frameworks wrote them: each file is cut at its boundaries, missing, or hostile."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from ckpt_tools.errors import FormatError, SourceNotFoundError, UnsafeError
from tests.end_to_end.fuzzing import corpus
from tests.end_to_end.fuzzing.seeds import torch_bytes
from tests.end_to_end.malformed.case import Case
from tests.end_to_end.malformed.truncated import boundaries

CARRIERS = ("megatron", "zstd", "sharded", "accelerate", "npz", "gguf")

MAX_CUTS = 120
"""Of one file, spread evenly over its boundaries."""

ERRORS = (FormatError, SourceNotFoundError, UnsafeError)


class _Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.abort, ()


def cases() -> Iterator[Case]:
    for name in CARRIERS:
        for path, data in corpus.seeds()[name].items():
            yield from _of_file(name, path, data)


def _of_file(name: str, path: str, data: bytes) -> Iterator[Case]:
    """Files beside the tensors may be lost, which is noted; the layouts' tests judge what is read without them."""
    files = corpus.seeds()[name]
    rest = {other: content for other, content in files.items() if other != path}
    yield Case(name, "missing", path, rest, ERRORS, must_fail=False)
    cuts = sorted({*boundaries(data), *range(0, len(data), max(1, len(data) // 60))} - {len(data)})
    for cut in cuts[:: -(-len(cuts) // MAX_CUTS)]:
        yield Case(name, "truncated", f"{path} at {cut}", {**files, path: data[:cut]}, ERRORS, must_fail=False)
    hostile = {"a pickle that aborts": pickle.dumps(_Calls()), "the same saved by torch": torch_bytes(_Calls())}
    for what, content in hostile.items():
        yield Case(name, "hostile", f"{path}: {what}", {**files, path: content}, ERRORS, must_fail=False)
