"""The destination of a conversion: its place, its format, and the files that are replaced there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.arguments import is_remote
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.option_names import WRITTEN_FORMATS, format_option, format_with_aliases
from ckpt_tools.core.options import ConvertOptions, ConvertRequest
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.errors import DestinationExistsError, UnsupportedError, UsageError
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import get_writable_format
from ckpt_tools.planning.plan import REMOTE_BYTES
from ckpt_tools.reading.model_files import is_pretrained_folder
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.stores.output_names import DIGESTS_SUFFIX
from ckpt_tools.stores.publishing import NO_FILES, OutputLocation, already_exists_error
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, check_destination_suffix, find_format_by_suffix, open_output_location


@dataclass(frozen=True, slots=True)
class ConversionTarget:
    """The destination, its format, and how much of the state is written there: all of it, or the model alone; a weight
    beside its fp32 master, or one of the two."""

    place: OutputLocation
    writer: Format
    writes_whole_state: bool
    writes_weights_and_masters: bool

    @classmethod
    def of(cls, request: ConvertRequest, place: OutputLocation, writer: Format, manifest: Manifest) -> ConversionTarget:
        """The target for ``manifest``, with how much of its state is written. Raises UnsupportedError if the run that
        resumes from the output would start with an empty optimizer."""
        is_whole = is_whole_state_written(request, writer)
        is_optimizer_lost = manifest.unnamed_optimizer and writer.holds_optimizer and writer.name != manifest.format
        if is_whole and is_optimizer_lost:
            model_alone = format_option("state", "model")
            # The reason may already give this advice.
            alternative = "" if model_alone in manifest.unnamed_optimizer else f", or convert with {model_alone}"
            raise UnsupportedError(
                f"{writer.name} keeps an optimizer by the names of its parameters; "
                f"{manifest.unnamed_optimizer}{alternative}"
            )
        keeps_masters = writer.holds_masters or manifest.keeps_masters
        return cls(
            place=place,
            writer=writer,
            writes_whole_state=is_whole,
            writes_weights_and_masters=is_whole and keeps_masters,
        )

    @property
    def takes_model_files(self) -> bool:
        """Whether the output is a folder for ``from_pretrained``, with ``config.json`` and a tokenizer."""
        return is_pretrained_folder(self.writer, self.place.form)

    def compute_required_task_bytes(self, layout: Layout) -> int:
        """The size of tasks that the place requires, 0 if none. Files of a layout may be made lazily, so their sizes
        are asked for only if the number of parts is limited."""
        if self.place.part_rules.max_parts is None:
            return self.place.part_rules.required_task_bytes(0)
        return self.place.part_rules.required_task_bytes(max((file.size_bytes for file in layout.files), default=0))

    def find_copy_rules(self, source: Source) -> PartRules | None:
        """The destination's rules if its service can copy ranges of the source's files; the output is then cut into
        parts that can be copied. Else None. The first file stands for all."""
        part_rules = self.place.part_rules
        if part_rules.service is None:
            return None
        copy_source = next((source.store.find_copy_source(path) for path in source.files), None)
        return part_rules if copy_source is not None and copy_source.service == part_rules.service else None


def estimate_client_bytes(*urls: str | Path) -> int:
    """Memory of the clients of stores that are not local, once for any number of URLs."""
    return REMOTE_BYTES if any(map(is_remote, urls)) else 0


def choose_direct_io(request: ConvertRequest, opened: OpenedCheckpoint, layout: Layout) -> bool:
    """Whether bytes are moved past the page cache: as the user says, else if they are too many for memory, or other
    processes write the same output. Raises UsageError where no byte is on a local disk."""
    if all(map(is_remote, (request.src, request.dst))):
        if request.io == "direct":
            raise UsageError.of(
                "io", f"{format_option('io', 'direct')} is for local disks, and source and destination are on others"
            )
        return False
    if request.io != "auto":
        return request.io == "direct"
    from ckpt_tools.stores.local.direct import exceeds_free_memory

    num_bytes = sum(file.size_bytes for file in layout.files) + opened.manifest.stored_bytes
    return request.part is not None or exceeds_free_memory(num_bytes)


def is_whole_state_written(options: ConvertOptions, writer: Format) -> bool:
    """Whether all state is written: what the user says, else what the format is for."""
    return writer.holds_optimizer if options.state is None else options.state == "all"


def choose_requested_writer(request: ConvertRequest, destination_name: str) -> Format | None:
    """The writer of the format that the user names, or that ``destination_name`` implies; with ``like`` that of
    folders for ``from_pretrained``. None if it depends on the source, which is not read yet."""
    is_format_given = request.to is not None or find_format_by_suffix(destination_name) is not None
    if request.keeps_format or (request.other_sources and not is_format_given):
        return None
    return _find_writer(
        "safetensors" if request.like is not None and not is_format_given else request.to, destination_name
    )


def _find_writer(to: str | None, destination_name: str) -> Format:
    check_destination_suffix(destination_name, to)
    implied = find_format_by_suffix(destination_name)
    if to is None and implied is None:
        raise UsageError(f"choose a format with {format_option('to')}: {format_with_aliases('to', WRITTEN_FORMATS)}")
    if to is not None and implied is not None and to != implied:
        raise UsageError(
            f"{destination_name} is a {implied} file, which {format_option('to', to)} contradicts; name a folder or "
            f"drop {format_option('to')}"
        )
    return get_writable_format(to or implied or "")


def choose_writer_by_source(request: ConvertRequest, manifest: Manifest, destination_name: str) -> Format:
    """The writer of the source's own format for another world size; for a merged model or an average that of
    safetensors, if the source is in it. Raises UsageError if it is not, or has no world size that could be another."""
    if not request.keeps_format:
        return _find_writer("safetensors" if manifest.format == "safetensors" else None, destination_name)
    if manifest.world_size is None or manifest.format in ("universal", "zero0"):
        raise UsageError(f"a {manifest.format} checkpoint has no world size to change")
    return _find_writer(manifest.format, destination_name)


def find_replaced_files(place: OutputLocation, layout: Layout, request: ConvertRequest) -> Mapping[str, int]:
    """The files at the destination that the output replaces: one checkpoint, and the digests beside it.

    Raises:
        DestinationExistsError: something is there that may not be replaced, or a list of digests is beside a
            destination that is one file, and this run writes none.
    """
    digests_url = _find_sibling_digests(place, request.storage_options)
    if not request.overwrite:
        place.check_free(overwrite=False)
        if digests_url is not None:
            raise already_exists_error(digests_url) if request.checksum else _stale_digests_error(digests_url)
        return NO_FILES
    from ckpt_tools.verification.digest_files import check_replaceable_list
    from ckpt_tools.verification.replacing import list_replaced_files

    replaced_sizes = list_replaced_files(place, [file.path for file in layout.files])
    if digests_url is None:
        return replaced_sizes
    if not request.checksum:
        raise _stale_digests_error(digests_url)
    return {**replaced_sizes, **check_replaceable_list(open_output_location(digests_url, request.storage_options))}


def _find_sibling_digests(place: OutputLocation, storage_options: StorageOptions) -> str | None:
    """URL of the list of digests beside a destination that is one file, if there is one: it describes the old file."""
    url = place.url + DIGESTS_SUFFIX
    exists = (
        place.form.file_name is not None
        and open_output_location(url, storage_options).as_single_file().list_contents() is not None
    )
    return url if exists else None


def _stale_digests_error(url: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{url} describes the file being replaced; remove it, or replace it with {format_option('checksum', True)}"
    )
