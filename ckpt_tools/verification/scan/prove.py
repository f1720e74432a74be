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
from ckpt_tools.core.wording import count
from ckpt_tools.errors import CkptError, FormatError, MalformedError, UnsafeError, UnsupportedError
from ckpt_tools.formats.safetensors.header_json import RawEntry, parse_header
from ckpt_tools.serialization.joblib_proof import prove_joblib
from ckpt_tools.serialization.legacy_proof import inner_storage, prove_legacy
from ckpt_tools.serialization.pickle.dcp_metadata import Metadata
from ckpt_tools.serialization.pickle.load import check_start
from ckpt_tools.serialization.pickle.machine import JoblibArrayError, PersistentLoad, TooLongError
from ckpt_tools.serialization.pickle.proof import Proof, UnlistedNameError, prove
from ckpt_tools.serialization.torch_archive import MAX_PICKLE_BYTES, described_storage, noted
from ckpt_tools.serialization.torch_legacy import is_legacy
from ckpt_tools.serialization.zip_archive import LOCAL_MAGIC, TORCHSCRIPT
from ckpt_tools.stores.source import checked_name
from ckpt_tools.verification.scan import kinds
from ckpt_tools.verification.scan.alike import ProvenItems
from ckpt_tools.verification.scan.arrays import check_end, inflated_array, npy_elements
from ckpt_tools.verification.scan.budget import InflationBudget, PickleBudget
from ckpt_tools.verification.scan.configuration import pickled_elements, unproved_settings
from ckpt_tools.verification.scan.findings import CouldRunError, Danger, FindingCollector, NotLookedIntoError
from ckpt_tools.verification.scan.kinds import Kind
from ckpt_tools.verification.scan.other_loaders import RunsElsewhereError, check_one_meaning
from ckpt_tools.verification.scan.pictures import prove_picture
from ckpt_tools.verification.scan.piece import Piece
from ckpt_tools.verification.scan.strict_zip import covered_zip
from ckpt_tools.verification.scan.texts import prove_text

HELD_BYTES = 1 << 16
"""Items of a DCP up to this size are read at once; of larger ones, the headers."""

MAX_WHOLE_BYTES = 1 << 26
"""Texts and pictures; a tokenizer takes 20 MB."""

MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors itself."""

_HEAD_BYTES = 512


class Prover:
    """Proves pieces, and collects findings."""

    def __init__(self, notebook: FindingCollector) -> None:
        self._notebook = notebook
        self._pickle_budget = PickleBudget()
        self._proven_items = ProvenItems()
        self.inflation = InflationBudget()
        self.metadata: dict[str, Metadata] = {}

    def prove(self, piece: Piece) -> None:
        """Prove a whole file as the one kind that its name and first bytes say. Raises FormatError or UnsafeError where
        it cannot be; refused names are noted."""
        if piece.size == 0:
            # A link to a file outside is refused when it is opened.
            piece.read(0, 0)
            return
        kind = kinds.kind_of(piece.file, piece.head(_HEAD_BYTES))
        if kind is Kind.PROGRAM:
            is_small = piece.size <= kinds.MAX_KNOWN_PROGRAM_BYTES
            if not is_small or hashlib.sha256(piece.whole()).hexdigest() not in kinds.KNOWN_PROGRAMS:
                self._notebook.add(piece.file, piece.place, Danger.COULD_RUN, "it is a program")
            return
        if kind in kinds.READ_WHOLE:
            if piece.size > MAX_WHOLE_BYTES:
                raise NotLookedIntoError(f"it is {kind} of more than {MAX_WHOLE_BYTES >> 20} MiB")
            piece = piece.held()
        self._prove_as(kind, piece)
        check_one_meaning(piece, kind)

    def _prove_as(self, kind: Kind, piece: Piece) -> None:
        match kind:
            case Kind.PICKLED:
                self._pickled(piece)
            case Kind.NPZ | Kind.ZIP:
                self._zip(piece, kind)
            case Kind.NPY:
                self._npy(piece)
            case Kind.SAFETENSORS:
                self._safetensors(piece)
            case Kind.GGUF:
                _prove_gguf(piece)
            case Kind.PICTURE:
                prove_picture(piece.whole())
            case _:
                self._notebook.add_configuration(piece.file, piece.place, prove_text(piece, kind))

    def item(self, piece: Piece, *, key: str, packed_bytes: int | None = None) -> int:
        """Prove the item ``key`` of a DCP: a file of torch, which ``packed_bytes`` were inflated to if it was
        compressed. Return the start of its directory."""
        if not piece.size:
            raise MalformedError("an item of no bytes")
        is_small = packed_bytes is None and piece.size <= HELD_BYTES
        if is_small and (known := self._proven_items.directory_of(piece.whole())) is not None:
            self._notebook.num_pickles += 1
            return known
        if piece.head(4) != b"PK\x03\x04":
            raise MalformedError("an item that is not a file of torch.save")
        directory, ranges = covered_zip(piece.read, piece.size, piece.file)
        if packed_bytes is not None:
            num_bytes = sum(stop - start for name, (start, stop) in ranges.items() if name.endswith("/data.pkl"))
            if not self._pickle_budget.spend(num_bytes, packed_bytes):
                raise NotLookedIntoError("its pickles are compressed, and much larger than the file that holds them")
        if not next(iter(ranges)).endswith("/data.pkl"):
            raise MalformedError("its first record is not its pickle, as torch writes it")
        before = self._notebook.num_findings
        value = self._torch(piece, directory, ranges, key)
        # Bytes may be a pickle by their name, which those of an equal item need not have.
        is_plain = isinstance(value, StoredTensor) and value.dtype is not DType.UINT8
        if is_small and is_plain and self._notebook.num_findings == before:
            self._proven_items.add(piece.whole(), directory, ranges)
        return directory.start

    # Pickles

    def _pickled(self, piece: Piece) -> None:
        """A file of torch.save, or one pickle."""
        head = piece.head(_HEAD_BYTES)
        if head.startswith(LOCAL_MAGIC):
            self._zip(piece, Kind.PICKLED)
        elif is_legacy(head):
            start = 0
            for proof in prove_legacy(piece.read, piece.size, piece.file, allowed=self._notebook.allowed).pickles:
                self._note(piece, "", proof, start)
                start += proof.stop
        else:
            self._pickle_file(piece)

    def _pickle_file(self, piece: Piece) -> None:
        try:
            check_start(piece.read, piece.size, path=piece.file)
            if piece.size > MAX_PICKLE_BYTES:
                raise NotLookedIntoError("a pickle of more than 4 GB")
            proof = self._pickle(piece, piece.whole(), "")
        except JoblibArrayError:
            proof = prove_joblib(
                piece.read,
                piece.size,
                piece.file,
                allowed=self._notebook.allowed,
                inner=lambda inner: inner_storage(inner, piece.file),
            )
            self._note(piece, "", proof)
        if piece.file.endswith(".metadata"):
            if not isinstance(proof.value, Metadata):
                raise MalformedError("it is not the metadata of a DCP")
            self.metadata[piece.file] = proof.value

    def _pickle(
        self,
        piece: Piece,
        data: bytes,
        place: str,
        resolve: PersistentLoad | None = None,
        start: int = 0,
        key: str = "",
    ) -> Proof:
        """Prove the pickle ``data``, which begins at byte ``start`` of the piece and has the value of ``key``."""
        proof = prove(
            data,
            path=piece.file,
            persistent_load=resolve,
            allowed=self._notebook.allowed,
            inner=lambda inner: inner_storage(inner, piece.file),
        )
        self._note(piece, place, proof, start, key)
        return proof

    def _note(self, piece: Piece, place: str, proof: Proof, start: int = 0, key: str = "") -> None:
        self._notebook.note(proof)
        self._notebook.add_configuration(piece.file, piece.within(place), unproved_settings(proof.value, key))
        for refusal in proof.refusals:
            where = piece.within(", ".join(filter(None, (place, f"byte {refusal.at:,}"))))
            danger = Danger.RUNS if refusal.name else Danger.COULD_RUN
            # The opcode that makes the object; there is none for a name that is only mentioned, or in compressed data.
            region = None if piece.start is None or not refusal.at else (piece.start + start + refusal.at, 1)
            self._notebook.add(piece.file, where, danger, refusal.what, region=region)
        if left := proof.num_refusals - len(proof.refusals):
            self._notebook.add(piece.file, piece.within(place), Danger.COULD_RUN, f"{left:,} more", count=left)

    # Archives

    def _zip(self, piece: Piece, kind: Kind) -> None:
        directory, ranges = covered_zip(piece.read, piece.size, piece.file, deflated_suffix=".npy")
        if kind is not Kind.PICKLED and all(name.endswith(".npy") for name in ranges):
            for name, (start, stop) in ranges.items():
                member, record = piece.part(start, stop, name), directory.records[name]
                is_stored = record.deflated_size is None
                array = member if is_stored else inflated_array(member, record, self.inflation, self._pickle_budget)
                if array is not None:
                    self._npy(array)
            return
        if kind is Kind.NPZ:
            raise MalformedError("it is a zip archive, and not all of its records are arrays")
        if kind is Kind.ZIP and not any(name.endswith("/data.pkl") for name in ranges):
            for name, (start, stop) in ranges.items():
                member = replace(piece.part(start, stop, ""), file=f"{piece.file}/{checked_name(name)}")
                if member.head(len(LOCAL_MAGIC)) == LOCAL_MAGIC:
                    raise NotLookedIntoError("it is an archive in an archive")
                self.prove(member)
            return
        self._torch(piece, directory, ranges)

    def _torch(self, piece: Piece, directory: Any, ranges: Mapping[str, tuple[int, int]], key: str = "") -> Value:
        """Prove a file of torch, and give its value."""
        root = next(iter(ranges)).partition("/")[0]
        records = {name.removeprefix(f"{root}/"): span for name, span in ranges.items() if name.startswith(f"{root}/")}
        if len(records) < len(ranges) or "data.pkl" not in records:
            raise MalformedError("it is a zip archive, and not of torch.save")
        if "constants.pkl" in records or any(name.startswith("code/") for name in records):
            raise UnsupportedError(TORCHSCRIPT)
        storages: dict[str, StorageRef] = {}

        def resolve(pid: Value) -> StorageRef:
            return noted(storages, described_storage(pid))

        start, stop = ranges[f"{root}/data.pkl"]
        inner = piece.part(start, stop, "")
        check_start(inner.read, inner.size, path=piece.file, persistent_load=described_storage)
        data = directory.read_record(piece.read, f"{root}/data.pkl")
        proof = self._pickle(piece, data, f"{root}/data.pkl", resolve, start, key)
        _check_records(piece, records, storages)
        return proof.value

    # Others

    def _npy(self, piece: Piece) -> None:
        """An array without objects, or one of objects, which is a pickle to the last byte behind the same header."""
        elements = npy_elements(piece)
        if elements.are_objects:
            objects = piece.part(elements.start, piece.size, f"objects at byte {elements.start:,}")
            self._pickle(objects, objects.whole(), "")
        else:
            check_end(elements, piece.size - elements.start)

    def _safetensors(self, piece: Piece) -> None:
        length = int.from_bytes(piece.head(8), "little")
        if piece.size < 8 or length > min(piece.size - 8, MAX_HEADER_BYTES):
            raise MalformedError("its header is longer than the file, or than safetensors allows")
        header = parse_header(piece.read(8, 8 + length), piece.file)
        if not isinstance(header, dict):
            raise MalformedError("its header is not a JSON object")
        # MLX writes a metadata of null.
        texts = header.pop("__metadata__", None)
        texts = {} if texts is None else texts
        if not isinstance(texts, dict) or not all(type(text) is str for text in texts.values()):
            raise MalformedError("its metadata is not a JSON object of texts")
        spans = sorted(_span(name, entry) for name, entry in header.items())
        sizes = {name: (entry.dtype, entry.data_offsets[1] - entry.data_offsets[0]) for name, entry in header.items()}
        self._notebook.add_configuration(piece.file, piece.place, pickled_elements(sizes))
        at = 0
        for start, stop in spans:
            if start != at:
                raise MalformedError("its tensors overlap, or leave bytes that belong to nothing")
            at = stop
        if at != piece.size - 8 - length:
            raise MalformedError("bytes behind its tensors belong to nothing")


_SMALL = {
    "version": rb"\d{1,4}\n?",
    "byteorder": rb"little",
    ".format_version": rb"\d{1,4}\n?",
    ".storage_alignment": rb"\d{1,8}\n?",
    ".data/serialization_id": rb"\d{1,64}",
}
"""Records of a torch file beside the pickle and the storages, and what they hold."""


def _check_records(piece: Piece, records: Mapping[str, tuple[int, int]], storages: Mapping[str, StorageRef]) -> None:
    """Every record is the pickle, a storage that a tensor declares, of its size, or one of a few small ones."""
    for name, (start, stop) in records.items():
        storage = storages.get(name.removeprefix("data/")) if re.fullmatch(r"data/\d+", name) else None
        if storage is not None:
            if stop - start != storage.num_bytes:
                raise MalformedError(f"the record {name!r} does not have the size that its tensors state")
        elif name in _SMALL:
            if stop - start > 64 or not re.fullmatch(_SMALL[name], piece.read(start, stop)):
                raise MalformedError(f"the record {name!r} holds something unknown")
        elif name != "data.pkl":
            raise MalformedError(f"the record {name!r} belongs to no tensor")
    missing = [key for key, storage in storages.items() if f"data/{key}" not in records and storage.location != "meta"]
    if missing:
        raise MalformedError(f"storage {missing[0]!r} has no record")


def _span(name: str, entry: Any) -> tuple[int, int]:
    if not isinstance(entry, RawEntry):
        raise MalformedError(f"the tensor {name!r} of its header is not described in the way of safetensors")
    offsets, shape, dtype = entry.data_offsets, entry.shape, from_safetensors(entry.dtype)
    if not are_naturals(shape) or not are_naturals(offsets) or len(offsets) != 2 or dtype is None:
        raise MalformedError(f"the tensor {name!r} of its header is not described in the way of safetensors")
    start, stop = offsets
    if (stop - start) * dtype.num_values != prod(shape) * dtype.item_bytes:
        raise MalformedError(f"the tensor {name!r} has another size than its header states")
    return start, stop


def _prove_gguf(piece: Piece) -> None:
    """The header as ``inspect`` reads it: tensors follow one another to the end, with zeros between them."""
    from ckpt_tools.formats.gguf.header import read_header

    header = read_header(_Alone(piece), piece.file)
    at = header.num_bytes
    for info in header.tensors.values():
        _check_zeros(piece, at, info.at.start)
        at = info.at.stop
    _check_zeros(piece, at, piece.size)


@dataclass(frozen=True, slots=True)
class _Alone:
    piece: Piece

    def size(self, path: str) -> int:
        return self.piece.size

    def read(self, path: str, start: int, stop: int) -> bytes:
        return self.piece.read(start, stop)


def _check_zeros(piece: Piece, start: int, stop: int) -> None:
    """An alignment, which the header chooses, may ask for much padding."""
    if stop - start > _MAX_PADDING_BYTES:
        raise MalformedError(f"it has {count(stop - start, 'byte')} between its tensors, of none of them")
    for at in range(start, stop, _ZEROS_BYTES):
        if piece.read(at, min(at + _ZEROS_BYTES, stop)).strip(b"\0"):
            raise MalformedError("its padding is not zeros")


_ZEROS_BYTES = 1 << 20

_MAX_PADDING_BYTES = 1 << 24
"""Most padding after one tensor; GGUF aligns to 32 bytes unless its header says otherwise."""


def reason_of(error: Exception) -> str:
    """The words of a finding that is one of ``REASONS``."""
    return error.message if isinstance(error, CkptError) else "values are nested too deep"


def danger_of(error: Exception) -> Danger:
    """The kind of a finding that is one of ``REASONS``."""
    if isinstance(error, UnlistedNameError | RunsElsewhereError) or reason_of(error) == TORCHSCRIPT:
        return Danger.RUNS
    if isinstance(error, NotLookedIntoError | TooLongError):
        return Danger.NOT_LOOKED_INTO
    if isinstance(error, CouldRunError):
        return Danger.COULD_RUN
    if isinstance(error, UnsafeError):
        return Danger.OUTSIDE
    if isinstance(error, UnsupportedError) and re.search("compressed|encrypted", error.message):
        return Danger.NOT_LOOKED_INTO
    return Danger.NOT_UNDERSTOOD


REASONS = (FormatError, UnsafeError, RecursionError)
"""Exceptions of a file that cannot be proved."""
