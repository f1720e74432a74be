"""A file that is valid as one kind and that another loader runs is a finding. Each is run by that loader here."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import runpy
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import joblib
import numpy as np
import pytest
import safetensors.numpy
import torch

import ckpt_tools

pytestmark = pytest.mark.extended

Loader = Callable[[Path], object]


class Call:
    """A call that leaves a folder behind."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.place),)

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(self, 0)


def safetensors_of(payload: bytes, head: bytes) -> bytes:
    """A strict file of safetensors, the length of whose header begins with ``head``."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}}).encode()
    low = int.from_bytes(head, "little")
    length = next(n for n in range(low, 100_000_000, 256 ** len(head)) if n >= len(header))
    return struct.pack("<Q", length) + header.ljust(length) + payload


def zipapp(place: Path) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("__main__.py", f"import os; os.mkdir({str(place)!r})")
    return stream.getvalue()


def npy(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def unpickled(path: Path) -> object:
    with path.open("rb") as stream:
        return pickle.load(stream)


def unpickled_in_python(path: Path) -> object:
    with path.open("rb") as stream:
        return pickle._load(stream)  # type: ignore[attr-defined]


def every_array(path: Path) -> object:
    with np.load(path, allow_pickle=True) as archive:
        return [archive[name] for name in archive.files]


def array_in_a_record(call: Call) -> bytes:
    payload = npy(np.array([call], dtype=object))
    stream = io.BytesIO()
    torch.save({"w": torch.frombuffer(bytearray(payload), dtype=torch.uint8)}, stream)
    return stream.getvalue()


def legacy(payload: bytes) -> bytes:
    stream = io.BytesIO()
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    torch.save({"w": tensor}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


MADE: dict[str, tuple[str, Callable[[Path], bytes], Loader]] = {
    **{
        f"safetensors that begins with {head!r}": (
            name, lambda place, head=head, end=end: safetensors_of(end + b"0" + Call(place).pickled, head), loader,
        )
        for head, end, name, loader in [
            (b"I1", b"\n", "a.safetensors", unpickled), (b"I\0", b"\n", "a.safetensors", unpickled),
            (b"L5", b"\n", "a.SAFETENSORS", unpickled), (b"F1", b"\n", "a.SafeTensors", unpickled),
            (b'S"', b'"\n', "a.safetensors", unpickled), (b"S'", b"'\n", "a.safetensors", unpickled_in_python),
            (b"V", b"\n", "a.safetensors", joblib.load), (b"Vx", b"\n", "a.safetensors", unpickled),
        ]
    },
    "safetensors before a zip": ("a.safetensors", lambda place: safetensors_of(zipapp(place), b"\0"), runpy.run_path),
    "an array before a zip": ("a.npy", lambda place: npy(np.frombuffer(zipapp(place), np.uint8)), runpy.run_path),
    "a legacy file before a zip": ("a.pt", lambda place: legacy(zipapp(place)), runpy.run_path),
    "a pickle before a zip": ("a.pkl", lambda place: pickle.dumps(zipapp(place)), runpy.run_path),
    "a torch file whose record is an array": ("a.pt", lambda place: array_in_a_record(Call(place)), every_array),
    "text before a gzip": ("a.txt", lambda place: gzip.compress(Call(place).pickled), joblib.load),
}  # fmt: skip


@pytest.mark.parametrize("label", MADE)
def test_a_file_that_another_loader_runs_is_a_finding(label, tmp_path):
    name, make, load = MADE[label]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(make(tmp_path / "ran"))
    if name.lower().endswith(".safetensors"):
        assert safetensors.numpy.load((folder / name).read_bytes())["w"].size
    with contextlib.suppress(Exception):
        load(str(folder / name) if load is runpy.run_path else folder / name)  # type: ignore[arg-type]
    assert (tmp_path / "ran").is_dir()
    assert ckpt_tools.scan(folder).num_findings == 1


def test_headers_of_any_length_are_clean(tmp_path):
    """Random elements behind lengths of headers, padded to eight bytes or not; 93 begins as LZMA does."""
    payload = np.random.default_rng(5).bytes(4000)
    alarms = []
    for length in [*range(72, 1100), *range(0x4000, 0x4400), *range(0x5D00, 0x5F00)]:
        header = json.dumps({"w": {"dtype": "U8", "shape": [4000], "data_offsets": [0, 4000]}}).encode()
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", length) + header.ljust(length) + payload)
        alarms += [] if ckpt_tools.scan(tmp_path).clean else [length]
    assert alarms == [93]


NAMES = {
    "a.safetensors": "safetensors",
    "a.npy": "an array of numpy",
    "a.npz": "an archive of arrays",
    "a.pt": "a pickle",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_one_kind_and_bytes_of_another_are_a_finding(name, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "torch")
    np.savez(tmp_path / "arrays.npz", a=np.ones(2))
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "s")
    files = {"torch": "a.pt", "arrays.npz": "a.npz", "s": "a.safetensors"}
    for file, own in files.items():
        folder = tmp_path / f"as-{file}"
        folder.mkdir()
        (folder / name).write_bytes((tmp_path / file).read_bytes())
        assert ckpt_tools.scan(folder).clean == (name == own), (file, name)


@pytest.mark.parametrize("name", ["model.h5", "model.keras", "model.nemo", "model.tar", "model.onnx", "x.pkl.gz"])
def test_a_name_of_a_format_that_is_not_proved_is_a_finding_whatever_it_holds(name, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    assert [each.danger for each in ckpt_tools.scan(tmp_path).findings] == ["not looked into"]


def test_special_files_are_findings(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "to-a.txt").symlink_to("a.txt")
    (tmp_path / "nothing.pt").symlink_to("absent.pt")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "device.bin").symlink_to("/dev/zero")
    (tmp_path / "outside.txt").symlink_to("/proc/self/environ")
    os.mkfifo(tmp_path / ".pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.pt"))
    findings = {each.file: each.what for each in ckpt_tools.scan(tmp_path).findings}
    assert {file: what.partition(":")[0] for file, what in findings.items() if file != "outside.txt"} == {
        "nothing.pt": "a link to nothing",
        "circle": "a link to nothing",
        "device.bin": "a device",
        ".pipe": "a named pipe",
        "socket.pt": "a socket",
    }
    assert "outside of the checkpoint" in findings["outside.txt"]
