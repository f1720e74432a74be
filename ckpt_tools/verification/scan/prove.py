"""Proves files: each is of a kind that is recognised and parsed strictly, and every byte of it is accounted for.

What raises here is a finding for ``source``. Nothing is dropped: a file, a record or an item is proved whole, or not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpt_tools.core.dtypes import DType, from_safetensors
from ckpt_tools.core.values import StorageRef, StoredTensor, Value, are_naturals
from ckpt_tools.errors import CkptError, FormatError, MalformedError, UnsafeError, UnsupportedError
from ckpt_tools.formats.safetensors.header_json import RawEntry, parse_header_json
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.joblib_proof import prove_joblib
from ckpt_tools.serialization.legacy_proof import prove_inner_storage, prove_legacy
from ckpt_tools.serialization.pickle.dcp_metadata import Metadata
from ckpt_tools.serialization.pickle.load import check_pickle_start
from ckpt_tools.serialization.pickle.machine import JoblibArrayError, PersistentLoad, PickleTooLongError
from ckpt_tools.serialization.pickle.proof import Proof, UnlistedNameError, prove_pickle
from ckpt_tools.serialization.torch_archive import MAX_PICKLE_BYTES, parse_storage_id, register_storage
from ckpt_tools.serialization.torch_legacy import is_legacy
from ckpt_tools.serialization.zip_archive import LOCAL_MAGIC, TORCHSCRIPT
from ckpt_tools.stores.source import check_file_name
from ckpt_tools.verification.scan import kinds
from ckpt_tools.verification.scan.alike import ProvenItems
from ckpt_tools.verification.scan.arrays import check_array_end, inflate_array, parse_npy_elements
from ckpt_tools.verification.scan.budget import InflationBudget, PickleBudget
from ckpt_tools.verification.scan.configuration import explain_pickled_elements, explain_unproved_settings
from ckpt_tools.verification.scan.findings import CouldRunError, Danger, FindingCollector, NotLookedIntoError
from ckpt_tools.verification.scan.kinds import FileKind
from ckpt_tools.verification.scan.other_loaders import RunnableElsewhereError, check_no_polyglot
from ckpt_tools.verification.scan.pictures import prove_picture
from ckpt_tools.verification.scan.piece import FileView
from ckpt_tools.verification.scan.strict_zip import read_strict_zip
from ckpt_tools.verification.scan.texts import prove_text

IN_MEMORY_ITEM_BYTES = 1 << 16
"""Items of a DCP up to this size are read at once; of larger ones, the headers."""

MAX_WHOLE_BYTES = 1 << 26
"""Texts and pictures; a tokenizer takes 20 MB."""

MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors itself."""

_HEAD_BYTES = 512


class Prover:
    """Proves pieces, and collects findings."""

    def __init__(self, collector: FindingCollector) -> None:
        self._collector = collector
        self._pickle_budget = PickleBudget()
        self._proven_items = ProvenItems()
        self.inflation_budget = InflationBudget()
        self.metadata_by_file: dict[str, Metadata] = {}

    def prove_file(self, view: FileView) -> None:
        """Prove a whole file as the one kind that its name and first bytes say; refused names are findings. Raises
        FormatError or UnsafeError if it cannot be proved."""
        if view.size == 0:
            # A link to a file outside is refused when it is opened.
            view.read(0, 0)
            return
        kind = kinds.detect_kind(view.file, view.read_head(_HEAD_BYTES))
        if kind is FileKind.PROGRAM:
            is_small = view.size <= kinds.MAX_KNOWN_PROGRAM_BYTES
            if not is_small or hashlib.sha256(view.read_all()).hexdigest() not in kinds.KNOWN_PROGRAM_HASHES:
                self._collector.add_finding(view.file, view.place, Danger.COULD_RUN, "it is a program")
            return
        if kind in kinds.IN_MEMORY_KINDS:
            if view.size > MAX_WHOLE_BYTES:
                raise NotLookedIntoError(f"it is {kind} of more than {MAX_WHOLE_BYTES >> 20} MiB")
            view = view.load_into_memory()
        self._prove_as(kind, view)
        check_no_polyglot(view, kind)

    def _prove_as(self, kind: FileKind, view: FileView) -> None:
        match kind:
            case FileKind.PICKLED:
                self._prove_pickle_or_archive(view)
            case FileKind.NPZ | FileKind.ZIP:
                self._prove_zip(view, kind)
            case FileKind.NPY:
                self._prove_npy(view)
            case FileKind.SAFETENSORS:
                self._prove_safetensors(view)
            case FileKind.GGUF:
                _prove_gguf(view)
            case FileKind.PICTURE:
                prove_picture(view.read_all())
            case _:
                self._collector.add_configuration(view.file, view.place, prove_text(view, kind))

    def prove_item(self, view: FileView, *, key: str, packed_bytes: int | None = None) -> int:
        """Prove the item ``key`` of a DCP: a file of torch, which ``packed_bytes`` were inflated to if it was
        compressed. Return the start of its directory."""
        if not view.size:
            raise MalformedError("an item of no bytes")
        # A checkpoint has thousands of items that differ in elements and checksums alone: one of them is proved, and
        # the others are compared with it. Not compared are compressed items, tensors of bytes, and items with a
        # finding.
        is_small = packed_bytes is None and view.size <= IN_MEMORY_ITEM_BYTES
        if is_small and (directory_start := self._proven_items.find_directory(view.read_all())) is not None:
            self._collector.num_pickles += 1
            return directory_start
        if view.read_head(4) != b"PK\x03\x04":
            raise MalformedError("an item that is not a file of torch.save")
        directory, ranges = read_strict_zip(view.read, view.size, view.file)
        if packed_bytes is not None:
            num_bytes = sum(stop - start for name, (start, stop) in ranges.items() if name.endswith("/data.pkl"))
            if not self._pickle_budget.try_spend(num_bytes, packed_bytes):
                raise NotLookedIntoError("its pickles are compressed, and much larger than the file that holds them")
        if not next(iter(ranges)).endswith("/data.pkl"):
            raise MalformedError("its first record is not its pickle, as torch writes it")
        num_findings_before = self._collector.num_findings
        item_value = self._prove_torch_archive(view, directory, ranges, key)
        # Bytes may be a pickle by their name, which those of an equal item need not have.
        is_plain = isinstance(item_value, StoredTensor) and item_value.dtype is not DType.UINT8
        if is_small and is_plain and self._collector.num_findings == num_findings_before:
            self._proven_items.add_item(view.read_all(), directory, ranges)
        return directory.start

    # Pickles

    def _prove_pickle_or_archive(self, view: FileView) -> None:
        """Prove a file of torch.save, or one pickle."""
        head = view.read_head(_HEAD_BYTES)
        if head.startswith(LOCAL_MAGIC):
            self._prove_zip(view, FileKind.PICKLED)
        elif is_legacy(head):
            start = 0
            for proof in prove_legacy(view.read, view.size, view.file, allowed=self._collector.allowed):
                self._record_proof(view, "", proof, start)
                start += proof.stop
        else:
            self._prove_bare_pickle(view)

    def _prove_bare_pickle(self, view: FileView) -> None:
        try:
            check_pickle_start(view.read, view.size, path=view.file)
            if view.size > MAX_PICKLE_BYTES:
                raise NotLookedIntoError("a pickle of more than 4 GB")
            proof = self._prove_pickle(view, view.read_all(), "")
        except JoblibArrayError:
            proof = prove_joblib(
                view.read,
                view.size,
                view.file,
                allowed=self._collector.allowed,
                read_inner_storage=lambda inner: prove_inner_storage(inner, view.file),
            )
            self._record_proof(view, "", proof)
        if view.file.endswith(".metadata"):
            if not isinstance(proof.value, Metadata):
                raise MalformedError("it is not the metadata of a DCP")
            self.metadata_by_file[view.file] = proof.value

    def _prove_pickle(
        self,
        view: FileView,
        data: bytes,
        place: str,
        persistent_load: PersistentLoad | None = None,
        start: int = 0,
        key: str = "",
    ) -> Proof:
        """Prove the pickle ``data``, which begins at byte ``start`` of the piece and has the value of ``key``."""
        proof = prove_pickle(
            data,
            path=view.file,
            persistent_load=persistent_load,
            allowed=self._collector.allowed,
            read_inner_storage=lambda inner: prove_inner_storage(inner, view.file),
        )
        self._record_proof(view, place, proof, start, key)
        return proof

    def _record_proof(self, view: FileView, place: str, proof: Proof, start: int = 0, key: str = "") -> None:
        self._collector.record_proof(proof)
        self._collector.add_configuration(
            view.file, view.join_place(place), explain_unproved_settings(proof.value, key)
        )
        for refusal in proof.refusals:
            full_place = view.join_place(", ".join(filter(None, (place, f"byte {refusal.at:,}"))))
            danger = Danger.RUNS if refusal.name else Danger.COULD_RUN
            # The opcode that makes the object; there is none for a name that is only mentioned, or in compressed data.
            region = None if view.start is None or not refusal.at else (view.start + start + refusal.at, 1)
            self._collector.add_finding(view.file, full_place, danger, refusal.reason, region=region)
        if num_unlisted := proof.num_refusals - len(proof.refusals):
            self._collector.add_finding(
                view.file, view.join_place(place), Danger.COULD_RUN, f"{num_unlisted:,} more", count=num_unlisted
            )

    # Archives

    def _prove_zip(self, view: FileView, kind: FileKind) -> None:
        directory, ranges = read_strict_zip(view.read, view.size, view.file, deflated_suffix=".npy")
        if kind is not FileKind.PICKLED and all(name.endswith(".npy") for name in ranges):
            for name, (start, stop) in ranges.items():
                member_view, record = view.slice_range(start, stop, name), directory.records[name]
                is_stored = record.deflated_size is None
                array_view = (
                    member_view
                    if is_stored
                    else inflate_array(member_view, record, self.inflation_budget, self._pickle_budget)
                )
                if array_view is not None:
                    self._prove_npy(array_view)
            return
        if kind is FileKind.NPZ:
            raise MalformedError("it is a zip archive, and not all of its records are arrays")
        if kind is FileKind.ZIP and not any(name.endswith("/data.pkl") for name in ranges):
            for name, (start, stop) in ranges.items():
                member_view = replace(view.slice_range(start, stop, ""), file=f"{view.file}/{check_file_name(name)}")
                if member_view.read_head(len(LOCAL_MAGIC)) == LOCAL_MAGIC:
                    raise NotLookedIntoError("it is an archive in an archive")
                self.prove_file(member_view)
            return
        self._prove_torch_archive(view, directory, ranges)

    def _prove_torch_archive(
        self, view: FileView, directory: Any, ranges: Mapping[str, tuple[int, int]], key: str = ""
    ) -> Value:
        """Prove a file of torch, and give its value."""
        archive_root = next(iter(ranges)).partition("/")[0]
        records = {
            name.removeprefix(f"{archive_root}/"): span
            for name, span in ranges.items()
            if name.startswith(f"{archive_root}/")
        }
        if len(records) < len(ranges) or "data.pkl" not in records:
            raise MalformedError("it is a zip archive, and not of torch.save")
        if "constants.pkl" in records or any(name.startswith("code/") for name in records):
            raise UnsupportedError(TORCHSCRIPT)
        storages: dict[str, StorageRef] = {}

        def resolve_storage(pid: Value) -> StorageRef:
            return register_storage(storages, parse_storage_id(pid))

        start, stop = ranges[f"{archive_root}/data.pkl"]
        pickle_view = view.slice_range(start, stop, "")
        check_pickle_start(pickle_view.read, pickle_view.size, path=view.file, persistent_load=parse_storage_id)
        data = directory.read_record(view.read, f"{archive_root}/data.pkl")
        proof = self._prove_pickle(view, data, f"{archive_root}/data.pkl", resolve_storage, start, key)
        _check_records(view, records, storages)
        return proof.value

    # Others

    def _prove_npy(self, view: FileView) -> None:
        """Prove an array without objects, or one of objects, which is a pickle to the last byte behind the same
        header."""
        elements = parse_npy_elements(view)
        if elements.are_objects:
            objects_view = view.slice_range(elements.start, view.size, f"objects at byte {elements.start:,}")
            self._prove_pickle(objects_view, objects_view.read_all(), "")
        else:
            check_array_end(elements, view.size - elements.start)

    def _prove_safetensors(self, view: FileView) -> None:
        header_bytes = int.from_bytes(view.read_head(8), "little")
        if view.size < 8 or header_bytes > min(view.size - 8, MAX_HEADER_BYTES):
            raise MalformedError("its header is longer than the file, or than safetensors allows")
        header = parse_header_json(view.read(8, 8 + header_bytes), view.file)
        if not isinstance(header, dict):
            raise MalformedError("its header is not a JSON object")
        # MLX writes a metadata of null.
        metadata = header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
            raise MalformedError("its metadata is not a JSON object of texts")
        spans = sorted(_parse_tensor_span(name, entry) for name, entry in header.items())
        sizes = {name: (entry.dtype, entry.data_offsets[1] - entry.data_offsets[0]) for name, entry in header.items()}
        self._collector.add_configuration(view.file, view.place, explain_pickled_elements(sizes))
        expected_start = 0
        for start, stop in spans:
            if start != expected_start:
                raise MalformedError("its tensors overlap, or leave bytes that belong to nothing")
            expected_start = stop
        if expected_start != view.size - 8 - header_bytes:
            raise MalformedError("bytes behind its tensors belong to nothing")


_SMALL_RECORDS = {
    "version": rb"\d{1,4}\n?",
    "byteorder": rb"little",
    ".format_version": rb"\d{1,4}\n?",
    ".storage_alignment": rb"\d{1,8}\n?",
    ".data/serialization_id": rb"\d{1,64}",
}
"""Records of a torch file beside the pickle and the storages, and what they hold."""


def _check_records(view: FileView, records: Mapping[str, tuple[int, int]], storages: Mapping[str, StorageRef]) -> None:
    """Raises MalformedError unless every record is the pickle, a storage of the size that its tensors state, or one of
    a few small ones."""
    for name, (start, stop) in records.items():
        storage = storages.get(name.removeprefix("data/")) if re.fullmatch(r"data/\d+", name) else None
        if storage is not None:
            if stop - start != storage.num_bytes:
                raise MalformedError(f"the record {name!r} does not have the size that its tensors state")
        elif name in _SMALL_RECORDS:
            if stop - start > 64 or not re.fullmatch(_SMALL_RECORDS[name], view.read(start, stop)):
                raise MalformedError(f"the record {name!r} holds something unknown")
        elif name != "data.pkl":
            raise MalformedError(f"the record {name!r} belongs to no tensor")
    missing = [key for key, storage in storages.items() if f"data/{key}" not in records and storage.location != "meta"]
    if missing:
        raise MalformedError(f"storage {missing[0]!r} has no record")


def _parse_tensor_span(name: str, entry: Any) -> tuple[int, int]:
    if not isinstance(entry, RawEntry):
        raise MalformedError(f"the tensor {name!r} of its header is not described in the way of safetensors")
    offsets, shape, dtype = entry.data_offsets, entry.shape, from_safetensors(entry.dtype)
    if not are_naturals(shape) or not are_naturals(offsets) or len(offsets) != 2 or dtype is None:
        raise MalformedError(f"the tensor {name!r} of its header is not described in the way of safetensors")
    start, stop = offsets
    if (stop - start) * dtype.num_values != prod(shape) * dtype.item_bytes:
        raise MalformedError(f"the tensor {name!r} has another size than its header states")
    return start, stop


def _prove_gguf(view: FileView) -> None:
    """Prove a GGUF file by its header: tensors must follow one another to the end, with zeros between them."""
    from ckpt_tools.formats.gguf.header import read_gguf_header

    header = read_gguf_header(_SingleFileSource(view), view.file)
    expected_start = header.num_bytes
    for info in header.tensors.values():
        _check_zeros(view, expected_start, info.byte_range.start)
        expected_start = info.byte_range.stop
    _check_zeros(view, expected_start, view.size)


@dataclass(frozen=True, slots=True)
class _SingleFileSource:
    view: FileView

    def size(self, path: str) -> int:
        return self.view.size

    def read(self, path: str, start: int, stop: int) -> bytes:
        return self.view.read(start, stop)


def _check_zeros(view: FileView, start: int, stop: int) -> None:
    """Raises MalformedError unless the bytes between two tensors are zeros, and not too many: the header chooses the
    alignment, which may ask for much padding."""
    if stop - start > _MAX_PADDING_BYTES:
        raise MalformedError(f"it has {format_count(stop - start, 'byte')} between its tensors, of none of them")
    for position in range(start, stop, _ZEROS_BYTES):
        if view.read(position, min(position + _ZEROS_BYTES, stop)).strip(b"\0"):
            raise MalformedError("its padding is not zeros")


_ZEROS_BYTES = 1 << 20

_MAX_PADDING_BYTES = 1 << 24
"""Most padding after one tensor; GGUF aligns to 32 bytes unless its header says otherwise."""


def describe_error(error: Exception) -> str:
    """The words of a finding that is one of ``PROOF_ERRORS``."""
    return error.message if isinstance(error, CkptError) else "values are nested too deep"


def classify_error(error: Exception) -> Danger:
    """The kind of a finding that is one of ``PROOF_ERRORS``."""
    if isinstance(error, UnlistedNameError | RunnableElsewhereError) or describe_error(error) == TORCHSCRIPT:
        return Danger.RUNS
    if isinstance(error, NotLookedIntoError | PickleTooLongError):
        return Danger.NOT_LOOKED_INTO
    if isinstance(error, CouldRunError):
        return Danger.COULD_RUN
    if isinstance(error, UnsafeError):
        return Danger.OUTSIDE
    if isinstance(error, UnsupportedError) and re.search("compressed|encrypted", error.message):
        return Danger.NOT_LOOKED_INTO
    return Danger.NOT_UNDERSTOOD


PROOF_ERRORS = (FormatError, UnsafeError, RecursionError)
"""Exceptions of a file that cannot be proved."""
