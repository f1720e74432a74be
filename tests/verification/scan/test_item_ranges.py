"""An index may place a pickle in any file: what ``dcp.load`` would run is a finding, wherever it lies."""

import contextlib
import json
import os
import posix
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_tools
from ckpt_tools.serialization.pickle.dcp_metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageInfo
from ckpt_tools.serialization.pickle.dump import dumps
from tests.serialization.archives import npy, safetensors, saved, saved_legacy, zipped

pytestmark = pytest.mark.quick

CALL = b"cos\nsystem\n(Vx\ntR."
"""A pickle of protocol 0: text, which runs as soon as it is loaded."""

ELEMENTS = np.frombuffer(CALL.ljust(32, b" "), np.uint8)


def _png() -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">2I5B", 1, 1, 8, 0, 0, 0, 0))
    text = chunk(b"tEXt", b"Comment\0" + CALL)
    return b"\x89PNG\r\n\x1a\n" + header + text + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


TEXT = b"notes\n" + CALL + b"\n"
STATE = {"w": torch.from_numpy(ELEMENTS.copy())}
TEXTS = ("notes.txt", "README", "README.md", "LICENSE", "vocab.txt", "data.csv", "train.log", "chat_template.jinja",
         "SHA256SUMS", ".gitattributes", "sub/notes.txt")  # fmt: skip
HOSTS: dict[str, bytes] = {
    **dict.fromkeys(TEXTS, TEXT),
    "model.safetensors": safetensors(ELEMENTS.tobytes()),
    "array.npy": npy(ELEMENTS),
    "arrays.npz": zipped({"w.npy": npy(ELEMENTS)}),
    "model.pt": saved(STATE),
    "legacy.pt": saved_legacy(STATE),
    "pytorch_model.bin": saved(STATE),
    "logo.png": _png(),
    "data": zipped({"w.npy": npy(ELEMENTS)}),
    "metrics.jsonl": json.dumps({"note": CALL.decode()}).replace("\\n", "\n").encode(),
}
"""Files that hold the pickle among their own data; all but the last are proved by themselves."""


def indexed(folder: Path, name: str, offset: int, length: int = len(CALL)) -> None:
    """Write the metadata of a DCP whose one item is ``length`` bytes of the file ``name``."""
    item = StorageInfo(name, offset, length)
    metadata = Metadata({"x": BytesStorageMetadata()}, None, {MetadataIndex("x"): item})
    (folder / ".metadata").write_bytes(dumps(metadata))


@pytest.fixture
def calls(monkeypatch):
    """What was given to ``os.system``."""
    found: list[str] = []
    monkeypatch.setattr(os, "system", found.append)
    monkeypatch.setattr(posix, "system", found.append)
    return found


def load(folder: Path) -> None:
    """Load the item as a program does; what becomes of the value is of no account."""
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(CheckpointException):
        dcp.load({"x": 0}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


@pytest.mark.parametrize("name", HOSTS)
def test_a_range_of_another_file_is_a_finding(name, tmp_path, calls):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(HOSTS[name])
    if not name.endswith(".jsonl"):
        assert ckpt_tools.scan(tmp_path).clean
    indexed(tmp_path, name, HOSTS[name].index(CALL))
    load(tmp_path)
    assert calls == ["x"]
    found = [each for each in ckpt_tools.scan(tmp_path).findings if each.file == ".metadata"]
    assert [(each.danger, name in each.what) for each in found] == [("runs", True)]


def test_so_is_a_text_of_the_metadata_itself(tmp_path, calls):
    offset = 0
    for _ in range(4):  # the offset is a number in the file that it counts
        item = StorageInfo(".metadata", offset, len(CALL))
        names = {CALL.decode(): BytesStorageMetadata(), "x": BytesStorageMetadata()}
        (tmp_path / ".metadata").write_bytes(dumps(Metadata(names, None, {MetadataIndex("x"): item})))
        offset = (tmp_path / ".metadata").read_bytes().index(CALL)
    load(tmp_path)
    assert calls == ["x"]
    assert "runs" in {each.danger for each in ckpt_tools.scan(tmp_path).findings}


HIDDEN = {"behind the item": saved(STATE) + CALL, "before the item": CALL + saved(STATE), "alone": CALL}


@pytest.mark.parametrize("where", HIDDEN)
def test_so_are_bytes_of_a_file_of_items(where, tmp_path, calls):
    data = HIDDEN[where]
    (tmp_path / "__0_0.distcp").write_bytes(data)
    indexed(tmp_path, "__0_0.distcp", 0 if data.startswith(CALL) else data.rindex(CALL))
    load(tmp_path)
    assert calls == ["x"]
    assert not ckpt_tools.scan(tmp_path).clean


def test_a_file_that_is_excluded_is_still_no_place_for_items(tmp_path):
    (tmp_path / "notes.txt").write_bytes(TEXT)
    indexed(tmp_path, "notes.txt", TEXT.index(CALL))
    report = ckpt_tools.scan(tmp_path, exclude=["*.txt"])
    assert [(each.file, each.danger) for each in report.findings] == [(".metadata", "runs")]
    assert report.excluded == ("notes.txt",)
