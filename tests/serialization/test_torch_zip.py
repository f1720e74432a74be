"""Torch's own files give the bytes of torch's own storages, and ours load everywhere torch's do."""

import io
import os
import shutil
import subprocess
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from isal import isal_zlib

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Crc32, Literal, Padding, Payload, Segment
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.values import GlobalRef, OrderedDict, StorageRef, StoredTensor
from ckpt_tools.errors import CkptError, IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.serialization import torch_zip
from ckpt_tools.serialization.pickle.machine import EndsEarlyError
from ckpt_tools.serialization.torch_zip import locate_item, make_archive_segments, open_archive
from tests.serialization.archives import (
    materialised,
    opened,
    patched,
    reader,
    records_of,
    rewritten,
    saved,
    saved_legacy,
    zipped,
)
from tests.support.refusals import refusal_test

DTYPES = [getattr(torch, dtype.value) for dtype in DType if dtype.num_values == 1 and dtype is not DType.COMPLEX32]


def _elements(dtype: torch.dtype, number: int) -> torch.Tensor:
    data = torch.arange(number * 16, dtype=torch.int64).to(torch.uint8)
    return data[: number * dtype.itemsize].contiguous().view(dtype) if dtype is not torch.bool else data[:number] > 3


def _state() -> dict[str, Any]:
    """Everything that a storage can be: shared, viewed, strided, empty, 0-d, untyped, not used at all."""
    base = torch.arange(1000, dtype=torch.float64)
    return {
        "model": {str(dtype): _elements(dtype, 33) for dtype in DTYPES},
        "base": base,
        "view": base[100:200],
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.ones(3, 3)),
        "meta": torch.empty(3, device="meta"),
        "other": {"step": 3, "name": "x"},
    }


def _leaves(value: Any, kind: type) -> list[Any]:
    """The tensors of a value, in order."""
    if isinstance(value, kind):
        return [value]
    return [leaf for item in value.values() for leaf in _leaves(item, kind)] if isinstance(value, dict) else []


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage()) if tensor.device.type != "meta" else b""


@pytest.fixture(scope="module")
def data():
    return saved(_state())


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_every_storage_lies_where_its_range_says(protocol):
    """In a zip, and in the format before torch 1.6 in each protocol."""
    data = saved(_state()) if protocol is None else saved_legacy(_state(), pickle_protocol=protocol)
    archive = opened(data)
    for theirs, ours in zip(_leaves(_state(), torch.Tensor), _leaves(archive.value, StoredTensor), strict=True):
        assert (f"torch.{ours.dtype.value}", ours.storage_offset) == (str(theirs.dtype), theirs.storage_offset())
        assert (ours.shape, ours.strides) == (tuple(theirs.shape), theirs.stride())
        if ours.storage is None:
            assert theirs.device.type == "meta"
            continue
        start, stop = archive.locate_storage(ours.storage.key)
        assert data[start:stop] == _bits(theirs)
        assert protocol or start % 64 == 0


@pytest.mark.parametrize("alignment", [64, 4096])
def test_other_alignments_are_read(alignment):
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        data = saved([torch.ones(3), torch.arange(5)])
    finally:
        config.save.storage_alignment = before
    archive = opened(data)
    start, stop = archive.locate_storage("1")
    assert data[start:stop] == _bits(torch.arange(5)) and start % alignment == 0


def test_headers_are_read_and_elements_are_not():
    large = torch.zeros(3 << 20, dtype=torch.uint8)
    data = saved({"a": large, "b": torch.ones(3), "c": large.clone(), "d": torch.ones(2)})
    reads: list[tuple[int, int]] = []
    archive = opened(data, reads)
    ranges = [archive.locate_storage(key) for key in archive.storages]
    assert sum(stop - start for start, stop in reads) < 100_000 and len(reads) <= 8
    inner = [(start + 5000, stop - 70_000) for start, stop in ranges if stop - start > 100_000]
    assert not any(start < high and low < stop for start, stop in reads for low, high in inner)


def test_a_file_of_many_storages_needs_few_reads():
    data = saved([torch.tensor(i) for i in range(3000)])
    reads: list[tuple[int, int]] = []
    archive = opened(data, reads)
    for number in (0, 1499, 2999):
        start, stop = archive.locate_storage(str(number))
        assert data[start:stop] == number.to_bytes(8, "little")
    assert len(reads) < 12


def test_a_file_zipped_again_by_another_tool_and_one_with_a_comment_are_read(data):
    again = zipped({name.replace("archive/", "model/"): record for name, record in records_of(data).items()})
    theirs, ours = opened(data), opened(again)
    for key in theirs.storages:
        (start, stop), (first, last) = theirs.locate_storage(key), ours.locate_storage(key)
        assert data[start:stop] == again[first:last]
    commented = patched(data, len(data) - 2, "<H", 6) + b"PK\x05\x06ab"
    assert list(opened(commented).storages) == list(theirs.storages)


# Writing


def test_what_was_read_is_written_again_for_torch(data, tmp_path):
    path = tmp_path / "again.pt"
    path.write_bytes(rewritten(data, root="again"))
    for options in ({}, {"mmap": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loaded = torch.load(path, weights_only=True, **options)
        for theirs, ours in zip(_leaves(_state(), torch.Tensor), _leaves(loaded, torch.Tensor), strict=True):
            assert (theirs.dtype, theirs.shape, theirs.stride()) == (ours.dtype, ours.shape, ours.stride())
            assert _bits(theirs) == _bits(ours) and type(theirs) is type(ours)
        assert loaded["view"].untyped_storage().data_ptr() == loaded["base"].untyped_storage().data_ptr()


def test_records_lie_as_torch_lays_them_for_any_zip_tool(data, tmp_path):
    """Names, order, flags, padding: all but the pickle's length, and with it what follows, is torch's."""
    path = tmp_path / "ours.pt"
    path.write_bytes(rewritten(data))
    with zipfile.ZipFile(io.BytesIO(data)) as theirs, zipfile.ZipFile(path) as ours:
        assert ours.testzip() is None
        assert ours.namelist() == theirs.namelist()
        for mine, wanted in zip(ours.infolist(), theirs.infolist(), strict=True):
            assert (mine.flag_bits, mine.extra, mine.date_time) == (wanted.flag_bits, wanted.extra, wanted.date_time)
            if mine.filename.rsplit("/")[-1] not in ("data.pkl", "serialization_id"):
                assert (mine.CRC, mine.file_size) == (wanted.CRC, wanted.file_size)
    unzip = shutil.which("unzip")
    if unzip is not None:
        done = subprocess.run([unzip, "-t", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_our_bytes_are_torchs_where_the_pickles_agree():
    """Plain values are pickled alike, so the whole file is the same but for its id and the checksum of that."""
    theirs = saved({"a": [1, 2], "b": "text"})
    ours = rewritten(theirs)
    assert len(ours) == len(theirs)
    at = theirs.index(b".data/serialization_id")
    assert ours[:at] == theirs[:at]
    assert sum(mine != other for mine, other in zip(ours[at:], theirs[at:], strict=True)) <= 40 + 4 + 4


def test_an_archive_in_the_middle_of_a_file_covers_its_own_bytes():
    data = saved(torch.arange(100.0))
    assert rewritten(data, base=0) == rewritten(data, base=777)
    assert torch.equal(torch.load(io.BytesIO(rewritten(data, base=12_345))), torch.arange(100.0))


def test_a_storage_of_several_segments_has_one_checksum():
    key, tensor = StateKey("w"), StoredTensor(StorageRef("0", DType.UINT8, 24), DType.UINT8, 0, (24,), (1,))
    storages: dict[str, list[Segment]] = {
        "0": [Literal(b"head"), Payload(key, Box((2,), (10,)), (16,), DType.UINT8), Padding(12)]
    }
    segments = make_archive_segments(OrderedDict({"w": tensor}), storages)
    assert sum(isinstance(segment, Crc32) for segment in segments) == 2
    loaded = torch.load(io.BytesIO(materialised(segments, {key: b"elements"})), weights_only=True)
    assert bytes(loaded["w"].untyped_storage()) == b"head" + b"elements" + bytes(12)


def test_literals_are_summed_at_once_and_storages_are_those_of_the_value():
    tensor = StoredTensor(StorageRef.of_elements("0", DType.FLOAT32, 1), DType.FLOAT32, 0, (), ())
    segments = make_archive_segments(tensor, {"0": [Literal(b"\x00\x00"), Literal(b"\x80\x3f")]})
    assert [type(segment) for segment in segments] == [Literal]
    assert torch.load(io.BytesIO(materialised(segments, {}))) == 1.0
    with pytest.raises(AssertionError, match="storages"):
        make_archive_segments(tensor, {"0": [Padding(8)]})


# zip64


def _sparse(path: Path, segments: list[Segment]) -> None:
    """Write zeros as a hole; their checksum is taken over a buffer of zeros."""
    zeros, sums = bytes(1 << 24), {}
    with path.open("wb") as file:
        for segment in segments:
            at = file.tell()
            match segment:
                case Literal(data):
                    file.write(data)
                case Padding(num_bytes):
                    file.seek(num_bytes, os.SEEK_CUR)
                    crc32 = 0
                    for start in range(0, num_bytes, len(zeros)):
                        crc32 = isal_zlib.crc32(zeros[: num_bytes - start], crc32)
                    sums[at, at + num_bytes] = crc32
                case Crc32(start, stop):
                    file.write(sums[start, stop].to_bytes(4, "little"))
                case _:
                    raise AssertionError


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """5 GiB of zeros and a small tensor after them."""
    large = StoredTensor(StorageRef("0", DType.UINT8, 5 << 30), DType.UINT8, 0, (5 << 30,), (1,))
    small = StoredTensor(StorageRef("1", DType.INT64, 1), DType.INT64, 0, (), ())
    path = tmp_path_factory.mktemp("huge") / "huge.pt"
    value = OrderedDict({"large": large, "small": small})
    _sparse(path, make_archive_segments(value, {"0": [Padding(5 << 30)], "1": [Literal((77).to_bytes(8, "little"))]}))
    return path


def _open(path: Path) -> torch_zip.TorchArchive:
    return open_archive(partial(_read, path), path.stat().st_size, str(path))


def _read(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def test_beyond_4_gib_torch_zip_tools_and_we_read_it(huge):
    loaded, small = torch.load(huge, weights_only=True, mmap=True), (77).to_bytes(8, "little")
    assert (loaded["large"].shape, loaded["large"][-1].item(), loaded["small"].item()) == ((5 << 30,), 0, 77)
    with zipfile.ZipFile(huge) as archive:
        assert archive.getinfo("archive/data/0").file_size == 5 << 30
        assert (archive.read("archive/data/1"), archive.read("archive/version")) == (small, b"3\n")
    archive = _open(huge)
    start, stop = archive.locate_storage("0")
    assert stop - start == 5 << 30
    assert _read(huge, *archive.locate_storage("1")) == small


# DCP items


@pytest.fixture(autouse=True)
def forget_items():
    torch_zip._known_items.clear()


@pytest.mark.parametrize("number", [0, 1, 100, 5000])
@pytest.mark.parametrize("before", [0, 777])
def test_an_item_is_located_in_its_file(number, before):
    tensor = torch.arange(float(number)).reshape(-1, 1)
    item = saved(tensor)
    data = b"x" * before + item + b"y" * 5
    found = locate_item(reader(data), before, before + len(item), "__0_0.distcp")
    assert data[found.start : found.stop] == _bits(tensor)
    assert (found.dtype, found.shape, found.strides) == (DType.FLOAT32, (number, 1), (1, 1))


def test_items_alike_take_one_small_read():
    items = [saved(torch.full((5000,), float(number))) for number in range(4)]
    data, reads = b"".join(items), []
    size = len(items[0])
    for number in range(4):
        reads = []
        found = locate_item(reader(data, reads), number * size, (number + 1) * size, "f")
        assert data[found.start : found.stop] == _bits(torch.full((5000,), float(number)))
        assert len(reads) == (2 if number == 0 else 1) and sum(stop - start for start, stop in reads) < 8192


def test_items_of_one_size_are_not_taken_for_each_other():
    """Same bytes in all, other dtype, shape or strides."""
    base = torch.arange(64.0)
    tensors = [base, base.reshape(8, 8), base.reshape(8, 8).t(), base.view(torch.int32), base.view(torch.bfloat16)]
    for tensor in tensors * 2:
        data = saved(tensor.clone() if tensor.is_contiguous() else tensor)
        found = locate_item(reader(data), 0, len(data), "f")
        assert (found.shape, found.strides) == (tuple(tensor.shape), tuple(tensor.stride()))
        assert f"torch.{found.dtype.value}" == str(tensor.dtype) and data[found.start : found.stop] == _bits(tensor)


def test_our_own_items_are_located():
    data = b"z" * 99 + rewritten(saved(torch.arange(10)), base=99)
    found = locate_item(reader(data), 99, len(data), "f")
    assert data[found.start : found.stop] == _bits(torch.arange(10))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(2, device="meta"), "on the meta device"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "the flags conj"),
        (lambda: torch._neg_view(torch.ones(2)), "the flags neg"),
        (lambda: torch.ones(2).to_sparse(), "a sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantized tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_an_item_whose_tensor_is_not_plain_is_refused_by_its_class(make, reason):
    data = saved(make())
    with pytest.raises(UnsupportedError, match=rf"does not contain a plain tensor: .*{reason}"):
        locate_item(reader(data), 0, len(data), "f")


def located(data: bytes, stop: int | None = None) -> object:
    return locate_item(reader(data), 0, len(data) if stop is None else stop, "f")


PLAIN_ITEM = saved(torch.ones(100))
test_items_that_are_no_tensor_or_cut_are_refused = refusal_test(
    ("a dict", lambda _: located(saved({"a": 1})), MalformedError, "does not contain a tensor"),
    ("a list", lambda _: located(saved([torch.ones(1)])), MalformedError, "does not contain a tensor"),
    ("nothing", lambda _: located(PLAIN_ITEM, 0), MalformedError, "."),
    ("a byte", lambda _: located(PLAIN_ITEM, 1), MalformedError, "."),
    ("a header", lambda _: located(PLAIN_ITEM, 100), MalformedError, "."),
    ("half", lambda _: located(PLAIN_ITEM, 1000), MalformedError, "."),
    ("all but a byte", lambda _: located(PLAIN_ITEM, len(PLAIN_ITEM) - 1), MalformedError, "."),
)


# What is refused


def _scripted() -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), stream)  # type: ignore[no-untyped-call]
    return stream.getvalue()


PICKLE = b"\x80\x02N."
PLACEHOLDER = b"ctorch._utils\n_rebuild_tensor_v2\n(cos\nsystem\n(Vid\ntRK\x00))\x89NtR."


def _records(**records: bytes) -> bytes:
    return zipped({f"a/{name.replace('_', '.')}": data for name, data in records.items()})


OTHERS: list[tuple[str, bytes, type[CkptError], str]] = [
    ("nothing", b"", MalformedError, "not a file of torch"),
    ("a text", b"not a checkpoint", MalformedError, "not a file of torch"),
    ("a zip of nothing", zipped({}), MalformedError, "truncated|not a file"),
    ("another zip", zipped({"a/b": b""}), MalformedError, r"no data\.pkl"),
    ("big-endian", _records(data_pkl=PICKLE, byteorder=b"big"), UnsupportedError, "big-endian"),
    ("an odd byte order", _records(data_pkl=PICKLE, byteorder=b"odd"), MalformedError, "byte order"),
    ("a long byte order", _records(data_pkl=PICKLE, byteorder=b"x" * 99), MalformedError, "byte order"),
    ("compressed", zipped({"a/data.pkl": PICKLE * 9}, compress=True), UnsupportedError, "compressed.*zip -0"),
    ("no pickle", _records(data_pkl=b"garbage"), EndsEarlyError, "pickle"),
    ("a tar", b"x" * 257 + b"ustar" + b"x" * 300, UnsupportedError, "tar"),
    ("TorchScript", _scripted(), UnsupportedError, r"TorchScript.*torch\.jit\.load"),
    ("a call as a storage", _records(data_pkl=PLACEHOLDER), MalformedError, "not a storage"),
]
STORAGE = b"\x80\x02((Vstorage\n%b%b\nVcpu\nI%d\ntQ"
FLOAT = b"ctorch\nFloatStorage\n"


def _with_storage(kind: bytes, key: bytes, numel: int, more: bytes = b"") -> bytes:
    """A storage that is described so, whose record has eight bytes."""
    pickle = STORAGE % (kind, b"V" + key, numel) + more + b"t."
    return zipped({"a/data.pkl": pickle, "a/data/0": b"12345678"})


OTHERS += [
    ("a short record", _with_storage(FLOAT, b"0", 3), MalformedError, "8 bytes instead of 12"),
    ("a long record", _with_storage(FLOAT, b"0", 1), MalformedError, "8 bytes instead of 4"),
    ("a negative storage", _with_storage(FLOAT, b"0", -2), MalformedError, "storage of -2"),
    ("a huge storage", _with_storage(FLOAT, b"0", 1 << 62), MalformedError, "storage of"),
    ("no record", _with_storage(FLOAT, b"1", 2), IncompleteError, "no record"),
    ("a record elsewhere", _with_storage(FLOAT, b"../data/0", 2), IncompleteError, "no record"),
    ("a quantized storage", _with_storage(b"ctorch\nQInt32Storage\n", b"0", 3), MalformedError, "8 bytes instead"),
    ("a storage of os", _with_storage(b"cos\nFloatStorage\n", b"0", 2), UnsupportedError, r"os\.FloatStorage"),
    ("a storage without a class", _with_storage(b"VFloatStorage\n", b"0", 2), MalformedError, "not described"),
    (
        "a storage described in two ways",
        _with_storage(FLOAT, b"0", 2, b"(Vstorage\nctorch\nDoubleStorage\nV0\nVcpu\nI1\ntQ"),
        MalformedError, "two ways",
    ),
]  # fmt: skip
"""Storages are checked before a byte is read."""
test_other_files_are_refused = refusal_test(
    *(
        (name, partial(lambda data, _: opened(data), data), error, rf"some\.pt.*({words})")
        for name, data, error, words in OTHERS
    )
)


def test_a_storage_alone_and_an_unknown_class_are_kept():
    assert opened(_with_storage(FLOAT, b"0", 2)).value == (StorageRef("0", DType.FLOAT32, 2),)
    assert opened(zipped({"a/data.pkl": b"cm\nC\n)\x81."})).value.ref == GlobalRef("m", "C")


def test_a_pickle_of_many_megabytes_is_looked_at_from_its_start():
    """A beginning that no checkpoint has is refused before the rest is read."""
    text = "x" * (33 << 20)
    assert opened(saved({"text": text})).value == {"text": text}
    with pytest.raises(MalformedError):
        opened(zipped({"archive/data.pkl": b"\x00" * (33 << 20)}))
