"""Harmless files of numpy, joblib, scipy and torch are clean; no mutant of them is that a real loader runs."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.serialization import joblib_proof
from ckpt_tools.serialization.pickle.closed_list import is_listed
from ckpt_tools.serialization.pickle.machine import in_python_3
from tests.verification.scan.generator import OWN
from tests.verification.scan.mutants import HIDDEN, VALUES, crafted, dumped, genuine, mutant, piped, repacked
from tests.verification.scan.scanner import is_clean

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[3]
NUM_SAMPLED, NUM_SOAKED = 25, 2000


@pytest.mark.parametrize("rule", VALUES)
def test_what_libraries_write_is_clean(rule):
    assert [label for label, files in genuine(rule) if not is_clean(files)] == []


def is_known(module: str, name: str) -> bool:
    """On the list, also by its name in Python 2; or the one function whose argument the scan reads as a file."""
    is_inner = (module, name) == ("torch.storage", "_load_from_bytes")
    return is_inner or is_listed(module, name) or is_listed(*in_python_3(module, name))


def told(plan: list[tuple[str, list[int] | None]]) -> Any:
    command = [sys.executable, "-m", "tests.verification.scan.mutant_judge"]
    done = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_no_mutant_that_runs_is_clean(request):
    """Also none for which a loader looks up a name that is not on the list."""
    numbers = list(range(NUM_SOAKED if request.config.getoption("--soak") else NUM_SAMPLED))
    samples = [*crafted(), *(mutant(rule, number) for rule in VALUES for number in numbers)]
    found = told([("", None), *((rule, numbers) for rule in VALUES)])
    assert sum(bool(each and each[0]) for each in found) > len(found) // 10
    wrong, num_clean = [], 0
    for (label, files), each in zip(samples, found, strict=True):
        ran, names = each or (True, [])
        unlisted = [name for name in names if not is_known(*name)]
        clean = is_clean(files)
        num_clean += clean
        wrong += [(label, ran, unlisted)] if clean and (ran or unlisted) else []
    assert wrong == []
    assert num_clean > len(found) // 50


def test_a_stream_without_a_position_is_aligned_to_nothing():
    """Otherwise the crafted files through a pipe would say nothing of joblib before 1.2."""
    assert b"b" + OWN in piped(2)(HIDDEN)
    assert b"b" + OWN not in dumped(2)(HIDDEN)


def test_hooks_that_are_filled_later_are_refused():
    """torch calls the items of the dict in the next backward pass, whenever they came into it."""
    stream = io.BytesIO()
    torch.save({"w": torch.ones(2), "hooks": "h"}, stream)
    with zipfile.ZipFile(stream) as archive:
        data = archive.read("archive/data.pkl")
    hooks = re.search(rb"ccollections\nOrderedDict\nq.\)Rq(.)", data, re.DOTALL)
    assert hooks
    late = data.removesuffix(b".") + b"h" + hooks[1] + b"K\x00cbuiltins\nlist\ns0."
    assert is_clean({"a.pt": repacked(stream.getvalue(), "archive/data.pkl", data)})
    assert not is_clean({"a.pt": repacked(stream.getvalue(), "archive/data.pkl", late)})


@pytest.mark.parametrize("num_bytes", [1, 50, 300, 700])
def test_a_file_of_joblib_is_read_in_parts(num_bytes, monkeypatch):
    monkeypatch.setattr(joblib_proof, "FIRST_READ_BYTES", num_bytes)
    assert [label for label, files in genuine("arrays of joblib") if not is_clean(files)] == []
    for name, files in crafted():
        monkeypatch.setattr(joblib_proof, "FIRST_READ_BYTES", num_bytes)
        in_parts = is_clean(files)
        monkeypatch.setattr(joblib_proof, "FIRST_READ_BYTES", 1 << 20)
        assert in_parts == is_clean(files), name


def test_elements_of_joblib_are_not_read(tmp_path):
    size = 2_000_000_000
    head, _, _ = piped(2)(HIDDEN).partition(OWN)
    with (tmp_path / "a.joblib").open("wb") as stream:
        stream.write(head.replace(b"K@\x85", b"J" + struct.pack("<i", size) + b"\x85"))
        stream.seek(size, os.SEEK_CUR)
        stream.write(b".")
    tracemalloc.start()
    report = ckpt_tools.scan(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.findings == ()
    assert peak < 64 << 20
