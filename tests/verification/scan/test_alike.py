"""An item that is compared with a proven one gets the verdict that proving it gives, for each byte that is changed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.verification.scan import ScanReport, scan_source
from ckpt_tools.verification.scan.alike import ProvenItems
from tests.verification.scan.generator import Files

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    with warnings.catch_warnings(action="ignore"):
        state = {f"w{number}": torch.full((4,), number, dtype=torch.float32) for number in range(3)}
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def scanned(files: Files) -> ScanReport:
    store = MemoryStore({name: bytearray(data) for name, data in files.items()})
    return scan_source(Source.open(store), "memory://")


def test_items_alike_are_proved_once(files, monkeypatch):
    added: list[int] = []
    add = ProvenItems.add
    monkeypatch.setattr(ProvenItems, "add", lambda self, *args: (added.append(1), add(self, *args)))
    report = scanned(files)
    assert (report.clean, report.num_pickles, len(added)) == (True, 4, 1)


def test_a_changed_byte_gets_the_verdict_of_a_proof(files, monkeypatch):
    data = files["__0_0.distcp"]
    size = len(data) // 3
    assert data[size : size + 4] == b"PK\x03\x04"
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(size, 2 * size)]
    elements = data.index(torch.full((4,), 1.0).numpy().tobytes())
    changed.append(data[:elements] + b"\x93NUMPY" + data[elements + 6 :])
    compared = [scanned({**files, "__0_0.distcp": each}).to_json() for each in changed]
    monkeypatch.setattr(ProvenItems, "directory_of", lambda self, data: None)
    proved = [scanned({**files, "__0_0.distcp": each}).to_json() for each in changed]
    assert compared == proved
    assert 0 < sum(bool(each["clean"]) for each in compared) < len(compared) // 2
    assert not compared[-1]["clean"]
