"""Entries of a folder that are no regular files, and files whose names promise something else: each is a finding."""

import gzip
import io
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import joblib
import numpy as np
import pytest

import ckpt_tools
from tests.serialization.archives import npy, safetensors, saved, zipped
from tests.verification.scan.generator import OWN
from tests.verification.scan.scanner import is_clean

NAMES = ("model.pt", "model.safetensors", ".hidden", "latest", "config.json", "sub/state.pkl")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # the path of a socket is short


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a link to nothing": _link("later"),
    "a link to nothing above": _link("../../later"),
    "a link to nothing in a folder that is not there": _link("none/later"),
    "an absolute link to nothing": _link("/nonexistent/later"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a file outside": _link("/etc/hostname"),
    "a link to a folder outside": _link("/etc"),
    "a link to a process": _link("/proc/self/environ"),
    "an endless device": _link("/dev/zero"),
    "an empty device": _link("/dev/null"),
    "a terminal": _link("/dev/tty"),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to a pipe": _link_to_a_pipe,
    "a socket": _socket,
}


SAID = {
    "a link to nothing": "a link to nothing", "a link to itself": "a link to nothing", "a pipe": "a named pipe",
    "an endless device": "a device", "a socket": "a socket", "a link to a process": "outside of the checkpoint",
}  # fmt: skip


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.timeout(60)
def test_each_is_a_finding_under_every_name(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(NAMES):
        folder = tmp_path / str(number)
        path = folder / name
        path.parent.mkdir(parents=True)
        (folder / "notes.txt").write_text("a text")
        assert ckpt_tools.scan(folder).clean
        SPECIAL[what](path)
        report = ckpt_tools.scan(folder)
        assert SAID.get(what, "") in {finding.file: finding.what for finding in report.findings}[name]


PACKAGES = ["x-1.0.dist-info", "x.egg-info", "X-1.DIST-INFO", "x.egg", "sub/x-1.0.dist-info"]


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("name", PACKAGES)
def test_a_folder_of_an_installed_package_is_a_finding(name, is_link, tmp_path):
    """Python that is started beside it runs its entry points; a link leads to a folder within the checkpoint."""
    folder = tmp_path / ("data" if is_link else name)
    folder.mkdir(parents=True)
    (folder / "entry_points.txt").write_text("[torch.backends]\nx = os:abort\n")
    if is_link:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(folder)
    found = {each.file: each.danger for each in ckpt_tools.scan(tmp_path).findings}
    assert found[name] == "could run"


@pytest.mark.parametrize("file", ["x-1.0.dist-info/METADATA", "x.egg-info/PKG-INFO", "x.egg/a.txt", "pyvenv.cfg"])
def test_a_file_of_one_is_a_finding_in_any_store(file):
    assert not is_clean({file: b"x\n"})


NAMES_OF_KINDS = ("a.safetensors", "a.npy", "a.npz", "a.pt")


@pytest.mark.parametrize("name", NAMES_OF_KINDS)
def test_a_name_of_one_kind_and_bytes_of_another_are_a_finding(name):
    arrays = zipped({"a.npy": npy(np.ones(2))})
    for own, data in {"a.pt": saved({}), "a.npz": arrays, "a.safetensors": safetensors(b"12345678")}.items():
        assert is_clean({name: data}) == (name == own), (own, name)


@pytest.mark.parametrize("name", ["model.h5", "model.keras", "model.nemo", "model.tar", "model.onnx", "x.pkl.gz"])
def test_a_name_of_a_format_that_is_not_proved_is_a_finding_whatever_it_holds(name, tmp_path):
    (tmp_path / name).write_bytes(saved({}))
    assert [each.danger for each in ckpt_tools.scan(tmp_path).findings] == ["not looked into"]


def test_a_text_that_is_packed_is_a_finding():
    """joblib unpacks it whatever its name is."""
    assert not is_clean({"a.txt": gzip.compress(OWN)})


def test_a_pickle_of_joblib_is_read_to_its_end():
    """In parts: the pickle is longer than the first of them, and so is the array in its midst."""
    stream = io.BytesIO()
    joblib.dump(["text" * 300_000, np.zeros(300_000), "end"], stream)
    assert is_clean({"a.joblib": stream.getvalue()})
    assert not is_clean({"a.joblib": stream.getvalue() + b"N."})


@pytest.mark.extended
def test_headers_of_any_length_are_clean():
    """Random elements behind lengths of headers, padded to eight bytes or not; 93 begins as LZMA does."""
    payload = np.random.default_rng(5).bytes(4000)
    plain = safetensors(payload)
    header = plain[8:-4000]
    lengths = [*range(72, 1100, 3), *range(0x4000, 0x4400, 7), *range(0x5D00, 0x5F00, 7)]
    files = {length: struct.pack("<Q", length) + header.ljust(length) + payload for length in lengths}
    assert [length for length, data in files.items() if not is_clean({"a.safetensors": data})] == [93]
