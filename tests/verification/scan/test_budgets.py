"""A small file costs a scan little, whatever it unfolds to; and so does a large one that holds nothing but tensors.

Each runs in a process of its own, whose processor time and peak memory the kernel counts. Time is compared with that of
making small objects, which takes longer while others use the machine.
"""

import json
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

import ckpt_tools
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.serialization.pickle import opcodes
from ckpt_tools.serialization.pickle.dcp_metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageInfo
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.verification.scan.findings import Danger
from tests.serialization.archives import npy, records_of, zipped
from tests.support.cost import cost, slowness
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

MEGABYTE = 1_000_000
Files = dict[str, bytes]


def repeated(first: bytes, again: bytes, last: bytes = b"N.") -> bytes:
    return first + again * ((MEGABYTE - len(first) - len(last)) // len(again)) + last


def dcp(item: bytes) -> Files:
    """As many items as a megabyte holds."""
    count = MEGABYTE // (len(item) + 100)
    places = {
        MetadataIndex(str(n)): StorageInfo("__0_0.distcp", n * len(item), len(item), ("stream.zstd/1",))
        for n in range(count)
    }
    metadata = Metadata({index.fqn: BytesStorageMetadata() for index in places}, None, places)
    return {".metadata": dumps(metadata), "__0_0.distcp": item * count}


def inflating_pickle() -> bytes:
    data = zipped({"archive/data.pkl": b"\x80\x02" + b"N0" * (7 << 20) + b"N.", "archive/version": b"3\n"})
    return zstandard.ZstdCompressor(level=19).compress(data)


def shared(value: bytes, use: bytes) -> bytes:
    """A pickle that makes ``value`` once, as entry 0 of the memo, and uses it as often as a megabyte holds."""
    return repeated(b"\x80\x02" + value + b"q\x000", use)


CRC32_OF_TEXT = struct.pack(">I", zlib.crc32(b"tEXt"))


def packed_objects(content: bytes) -> bytes:
    body = zlib.compress(content, 9)
    return b"<</Type/ObjStm/Filter/FlateDecode/Length %d>>stream\n" % len(body) + body + b"\nendstream\n"


LINES = b"".join(b"V%05d\nN" % number for number in range(25_000))

WORST: dict[str, Callable[[], Files]] = {
    "one dict as the state of many objects": lambda: {
        "a.pkl": shared(b"}(" + LINES + b"u", b"cargparse\nNamespace\n)\x81h\x00b0")
    },
    "lists of JSON deep within one another": lambda: {
        "a.json": b"[" * 900 + b"0," * (MEGABYTE // 2) + b"0" + b"]" * 900
    },
    "texts of settings": lambda: {"a.pkl": pickle.dumps({str(n): f"{n}.a" for n in range(MEGABYTE // 24)})},
    "chunks of a PNG": lambda: {"a.png": b"\x89PNG\r\n\x1a\n" + (b"\0\0\0\0tEXt" + CRC32_OF_TEXT) * (MEGABYTE // 12)},
    "segments of a JPEG": lambda: {"a.jpg": b"\xff\xd8\xff\xe0\0\2" + b"\xff\xda\0\2\xff\0" * (MEGABYTE // 6)},
    "blocks of a GIF": lambda: {"a.gif": b"GIF89a" + bytes(7) + b"!\xfe\1a\0" * (MEGABYTE // 5)},
    "chunks of a WebP": lambda: {
        "a.webp": b"RIFF" + struct.pack("<I", 4 + 8 * (MEGABYTE // 8)) + b"WEBP" + b"VP8 \0\0\0\0" * (MEGABYTE // 8)
    },
    "object streams of a PDF": lambda: {"a.pdf": b"%PDF-1.5\n" + packed_objects(b"a") * 11_000 + b"%%EOF"},
    "an object stream of a PDF that unfolds": lambda: {
        "a.pdf": b"%PDF-1.5\n" + packed_objects(bytes(MEGABYTE * 1000)) + b"%%EOF"
    },
    "a zip bomb of names": lambda: {
        "a.pt": zipped(
            {"archive/data.pkl": b"".join(b"c%x\nb\n0" % number for number in range(420_000))}, compress=True
        )
    },
    "zstd bombs that are files of torch": lambda: dcp(inflating_pickle()),
}


def headers_of_a_thousand_fields() -> bytes:
    array = npy(np.zeros(1, [(f"f{number}", "<f8") for number in range(1000)]))
    return zipped({f"{number:x}.npy": array for number in range(250)}, compress=True)


def dtypes_of_the_same_fields() -> bytes:
    """256 fields, which thousands of dtypes have."""
    fields = "".join(f"S'{number}'\nh\x01K\x00\x86" for number in range(256)).encode("latin-1")
    names = b"(" + b"".join(b"S'%d'\n" % number for number in range(256)) + b"t"
    first = (
        b"\x80\x02cnumpy\ndtype\nq\x00(S'u1'\nI00\nI01\ntRq\x01}(" + fields + b"uq\x02" + names + b"q\x03"
        b"(S'V1'\nI00\nI01\ntq\x04(K\x03S'|'\nNh\x03h\x02K\x01K\x01K\x10tq\x050"
    )
    return repeated(first, b"h\x00h\x04Rh\x05b0", b"0000N.")


def elements_that_are_opcodes(num_bytes: int) -> bytes:
    """Arrays of joblib before 1.2, whose elements do nothing for as long as another loader reads them."""
    first = (
        b"\x80\x02cjoblib.numpy_pickle\nNumpyArrayWrapper\nq\x00cnumpy\ndtype\n(S'u1'\nI00\nI01\ntRq\x01"
        b"(cnumpy\nndarray\nM" + struct.pack("<H", num_bytes) + b"\x85tq\x020"
    )
    state = b"}(S'subclass'\ncnumpy\nndarray\nS'shape'\nM" + struct.pack("<H", num_bytes) + b"\x85S'order'\nS'C'\n"
    state += b"S'dtype'\nh\x01S'allow_mmap'\nI01\nub"
    return repeated(first, b"h\x00)\x81" + state + b"N" * (num_bytes - 1) + b"\xff0", b"00N.")


WORST |= {
    "compressed arrays of zeros": lambda: {
        "a.npz": zipped({f"{number}.npy": npy(np.zeros(100_000_000, np.uint8)) for number in range(10)}, compress=True)
    },
    "compressed headers": lambda: {"a.npz": headers_of_a_thousand_fields()},
    "dtypes of the same fields": lambda: {"a.pkl": dtypes_of_the_same_fields()},
    "elements of joblib that are opcodes": lambda: {"a.joblib": elements_that_are_opcodes(400)},
}
SAMPLED = (
    "one dict as the state of many objects", "lists of JSON deep within one another", "object streams of a PDF",
    "a zip bomb of names", "zstd bombs that are files of torch", "compressed arrays of zeros",
)  # fmt: skip


@pytest.mark.parametrize("name", tiered(WORST, test=(), extended=SAMPLED))
def test_a_megabyte_takes_two_seconds_and_200_mb(name, tmp_path):
    for file, data in WORST[name]().items():
        assert len(data) < 1.1 * MEGABYTE
        (tmp_path / file).write_bytes(data)
    seconds, megabytes, code = cost("scan", tmp_path, "--json")
    assert code in (0, 7)
    assert seconds < 2 * slowness()
    assert megabytes < 200


def hole(path: Path, head: bytes, num_bytes: int) -> None:
    with path.open("wb") as stream:
        stream.write(head)
        stream.truncate(len(head) + num_bytes)


def test_a_hole_of_gigabytes_is_not_read(tmp_path):
    """Behind a pickle, and as the elements of tensors, which are accounted for by their header."""
    size = 3 << 30
    hole(tmp_path / "a.pkl", b"\x80\x02N.", size)
    hole(tmp_path / "b.pkl", b"\x80\x02", size)
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    hole(tmp_path / "c.safetensors", struct.pack("<Q", len(header)) + header, size)
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }" % size
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    hole(tmp_path / "d.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text, size)
    seconds, megabytes, code = cost("scan", tmp_path, "--json")
    assert (code, seconds < 2 * slowness(), megabytes < 200) == (7, True, True)


ANNOUNCED = [b"\x80\x04\x8d", b"\x80\x04\x8e", b"\x80\x05\x96"]
"""The opcodes of strings, bytes and bytearrays, before their length of eight bytes."""


@pytest.mark.parametrize(
    "head", [ANNOUNCED[0], *(pytest.param(each, marks=pytest.mark.soak) for each in ANNOUNCED[1:])]
)
@pytest.mark.parametrize("command", ["scan", "inspect"])
def test_a_string_of_gigabytes_is_not_held(command, head, tmp_path):
    size = 3 << 30
    name = "a.pkl" if command == "scan" else ".metadata"
    hole(tmp_path / name, head + struct.pack("<Q", size), size + 1)
    seconds, megabytes, code = cost(command, tmp_path)
    assert (code, seconds < 2 * slowness(), megabytes < 200) == (7 if command == "scan" else 4, True, True)


@pytest.mark.parametrize("head", [*ANNOUNCED, b"\x80\x02X", b"\x80\x03B", b"V", b"c"])
def test_a_long_string_is_refused_by_name(head, tmp_path, monkeypatch):
    """Announced, or a line; also in a file of torch."""
    monkeypatch.setattr(opcodes, "MAX_VALUE_BYTES", 5000)
    width = 8 if head in ANNOUNCED else 4 if len(head) > 1 else 0
    data = head + (6000).to_bytes(8, "little")[:width] + b"a" * 6000
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    records = records_of((tmp_path / "model.pt").read_bytes())
    (name,) = (name for name in records if name.endswith("data.pkl"))
    (tmp_path / "model.pt").write_bytes(zipped({**records, name: data + b"\n."}))
    (tmp_path / "a.pkl").write_bytes(data + b"\n.")
    found = ckpt_tools.scan(tmp_path).findings
    assert {each.file for each in found} == {"a.pkl", "model.pt"}
    assert all(each.danger is Danger.NOT_LOOKED_INTO for each in found)
    assert all("at most 5,000 are read" in each.what for each in found)
    with pytest.raises(UnsupportedError, match="at most 5,000 are read"):
        ckpt_tools.inspect(tmp_path / "model.pt")


def test_tensors_cost_a_scan_less_than_reading_them(tmp_path):
    torch.save({str(number): torch.zeros(1 << 20) for number in range(16)}, tmp_path / "model.pt")
    seconds, _, code = cost("scan", tmp_path)
    assert code == 0
    assert seconds < (0.5 + 3 * 0.067) * slowness()


def test_a_header_of_many_tensors_is_inspected_in_three_seconds_and_200_mb(tmp_path):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"layers.{number:06d}": entry for number in range(200_000)}, separators=(",", ":")).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    seconds, megabytes, code = cost("inspect", tmp_path)
    assert (code, seconds < 3 * slowness(), megabytes < 200) == (0, True, True)
