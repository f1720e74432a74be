"""Is what lies at a destination the output of this conversion?

Its files, their sizes and a sample of their elements are compared with what the conversion would write now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from ckpt_tools.conversion.convert import choose_worker_pool, prepare_conversion
from ckpt_tools.core.layout import FileSpec, Payload
from ckpt_tools.core.options import ConvertRequest
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.publishing import DestinationContents
from ckpt_tools.stores.urls import open_output_location
from ckpt_tools.transfer.tensor_reader import TensorReader

MAX_FILES = 8
MAX_PIECES = 16
"""Pieces of tensors that are compared in each of these files, evenly apart, and the first and the last."""

SAMPLE_ELEMENTS = 1 << 12
"""Elements of each piece, from its middle: the first rows of an embedding may be of words that never occur."""

SCRATCH_BYTES = 1 << 18

Item = TypeVar("Item")


def is_published(request: ConvertRequest) -> bool:
    """Whether the output of ``request`` is at its destination. False if nothing is there.

    Raises:
        DestinationExistsError: something else is there. CkptError: as ``prepare_conversion`` raises.
    """
    location = open_output_location(request.dst, request.storage_options)
    if location.list_contents() is None:
        return False
    prepared = prepare_conversion(request, choose_worker_pool(request), checks_destination=False)
    contents = prepared.target.place.list_contents()
    difference = "it is of another kind" if contents is None else _find_different_size(prepared.report.files, contents)
    if difference is None and contents is not None:
        reader = TensorReader(prepared.laid_out.source.store, SCRATCH_BYTES, compares_records=False)
        for path, offset, payload in _sample_payloads(prepared.plan.layout.files):
            entry = prepared.plan.manifest.tensors[payload.key].cast_to(payload.dtype)
            num_elements = min(payload.box.numel, SAMPLE_ELEMENTS)
            start = (payload.box.numel - num_elements) // 2
            expected, found = (bytearray(num_elements * payload.dtype.item_bytes) for _ in range(2))
            reader.read(entry, payload.box, payload.shape, start, start + num_elements, memoryview(expected))
            contents.store.read_into(path, offset + start * payload.dtype.item_bytes, memoryview(found))
            if expected != found:
                difference = f"{payload.key.fqn} has other elements in {path}"
                break
    if difference is not None:
        raise DestinationExistsError(
            f"{request.dst} exists, and is not what {request.src} becomes with these options: {difference}; choose "
            f"another destination, or remove it"
        )
    return True


def _find_different_size(expected_sizes: Mapping[str, int], contents: DestinationContents) -> str | None:
    for path, size in expected_sizes.items():
        if path not in contents.files:
            return f"{path} is not there"
        if contents.files[path] != size:
            return f"{path} has {contents.files[path]:,} bytes, and would have {size:,}"
    return None


def _sample_payloads(files: Sequence[FileSpec]) -> Iterator[tuple[str, int, Payload]]:
    """Pieces of tensors with the file of each, and where it starts there."""
    for file in _choose_evenly(files, MAX_FILES):
        layout = file.load_layout()
        located = zip(layout.offsets, layout.segments, strict=False)
        payloads = [(offset, each) for offset, each in located if isinstance(each, Payload) and each.box.numel]
        for offset, payload in _choose_evenly(payloads, MAX_PIECES):
            yield file.path, offset, payload


def _choose_evenly(items: Sequence[Item], limit: int) -> list[Item]:
    if len(items) <= limit:
        return list(items)
    return [items[number * (len(items) - 1) // (limit - 1)] for number in range(limit)]
