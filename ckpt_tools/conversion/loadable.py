"""Rewriting of a file of ``torch.save``, so that ``torch.load(weights_only=True)`` takes it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.conversion.target import estimate_client_bytes, find_replaced_files
from ckpt_tools.conversion.write import write_output
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, Layout, Payload, Segment
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.option_names import DEFAULT_MEMORY, format_option
from ckpt_tools.core.options import ConvertRequest, ReadOptions, parse_size
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.values import StorageRef, Value
from ckpt_tools.errors import LossError, MalformedError, SourceNotFoundError, UnsupportedError, UsageError
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.messages.wording import join_names
from ckpt_tools.planning.plan import make_plan
from ckpt_tools.serialization.loadable import LeftOut, LoadableValue, Replaced, make_loadable_value
from ckpt_tools.serialization.pickle.dump import dumps_with_storages
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import make_archive_segments, open_torch_file
from ckpt_tools.stores.local.direct import exceeds_free_memory
from ckpt_tools.stores.publishing import OutputLocation
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import (
    check_not_nested,
    find_format_by_suffix,
    open_output_location,
    open_source,
)
from ckpt_tools.transfer.workers import WorkerPool

TORCH_FORMAT = "torch"


@dataclass(frozen=True, slots=True, repr=False)
class LoadableReport(DisplayableResult):
    """Result of ``make_loadable``. ``num_storages`` is the number of storages that the tensors of the output view."""

    source: str
    destination: str
    num_storages: int
    bytes_written: int
    seconds: float
    left_out: tuple[LeftOut, ...]
    replaced: tuple[Replaced, ...]


def rewrite_as_loadable(request: ConvertRequest) -> LoadableReport:
    """Write ``request.src`` to ``request.dst``: whole, or not at all.

    Raises:
        CkptError: as the stores and the pickle say; nothing is written then.
    """
    src, dst, storage_options = request.src, request.dst, request.storage_options
    place = open_output_location(dst, storage_options)
    if find_format_by_suffix(place.name) != TORCH_FORMAT:
        raise UsageError(f"{place.name}: name a file that ends in .pt, .pth or .bin")
    source = open_source(src, storage_options)
    archive = _open_only_file(source, src)
    check_not_nested(src, dst, storage_options)
    loadable_file = _replace_disallowed_objects(archive, strict=request.strict)
    manifest, layout = _build_manifest_and_layout(loadable_file.value, archive, place)
    pool = WorkerPool.choose_for_urls("threads", None, None, src, dst)
    plan = make_plan(
        manifest,
        layout,
        memory_bytes=parse_size(DEFAULT_MEMORY),
        num_workers=pool.workers_per_process,
        is_limit=False,
        remote_bytes=estimate_client_bytes(src, dst),
        required_task_bytes=place.part_rules.required_task_bytes(layout.size_bytes),
    )
    replaced_sizes = find_replaced_files(place, layout, request)
    num_bytes = plan.compute_figures().bytes_written
    start_seconds = time.perf_counter()
    written = write_output(
        plan,
        source.store,
        place,
        request,
        pool,
        target_format=TORCH_FORMAT,
        num_bytes=num_bytes,
        is_direct=exceeds_free_memory(2 * num_bytes),
        replaced_sizes=replaced_sizes,
        read_back_options=ReadOptions(),
    )
    return LoadableReport(
        str(src),
        place.url,
        len(manifest.tensors),
        written.bytes_written,
        time.perf_counter() - start_seconds,
        loadable_file.left_out,
        loadable_file.replaced,
    )


def _open_only_file(source: Source, src: str | Path) -> TorchArchive:
    if not source.files:
        raise SourceNotFoundError(f"{source.store.url} is an empty folder")
    if len(source.files) != 1:
        raise UsageError(f"{src} is a folder; name one file of torch.save in it")
    return open_torch_file(source, next(iter(source.files)))


def _replace_disallowed_objects(archive: TorchArchive, *, strict: bool) -> LoadableValue:
    try:
        loadable_file = make_loadable_value(archive.value, archive.path)
    except RecursionError as error:
        raise MalformedError("it contains values that are nested too deeply", path=archive.path) from error
    if strict and loadable_file.left_out:
        omitted_objects = join_names([f"{each.place} ({each.kind})" for each in loadable_file.left_out])
        raise LossError(
            f"with {format_option('strict', True)} nothing may be left out, and this would leave out {omitted_objects}"
        )
    return loadable_file


def _build_manifest_and_layout(value: Value, archive: TorchArchive, place: OutputLocation) -> tuple[Manifest, Layout]:
    """The storages that ``value`` uses, as tensors of one dim, and the file that holds them with ``value``."""
    storages = dumps_with_storages(value)[1]
    if not storages and archive.storages:
        raise UnsupportedError("all its tensors are in objects, and none would be left", path=archive.path)
    tensors = {StateKey(key, "storage"): _build_storage_entry(storage, archive) for key, storage in storages.items()}
    segments: dict[str, list[Segment]] = {
        key.fqn: [Payload(key, Box.whole(entry.shape), entry.shape, entry.dtype)] for key, entry in tensors.items()
    }
    file = FileLayout(place.form.file_name or place.name, tuple(make_archive_segments(value, segments)))
    return Manifest(TORCH_FORMAT, tensors), Layout((file,))


def _build_storage_entry(storage: StorageRef, archive: TorchArchive) -> TensorEntry:
    dtype = storage.dtype or DType.UINT8
    start, stop = archive.locate_storage(storage.key)
    shape = (storage.numel,)
    table = ShardTable.build(shape, dtype, [Shard(Box.whole(shape), ByteRange(archive.path, start, stop))])
    return TensorEntry(shape, dtype, Kind.EXTRA, table)
