"""Nothing that a real loader runs is clean, and nothing is run to say so. Files that run nothing are clean.

The hostile files: ``generator`` composes them, ``polyglots`` are valid of one kind and run by another loader,
``mutations`` are made of all of these and of ``genuine`` ones, by changes.
"""

import io
import os
import re
import struct
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from math import gcd

import pytest
import torch

import ckpt_tools
from ckpt_tools.serialization import joblib_proof
from ckpt_tools.serialization.pickle.closed_list import is_listed
from ckpt_tools.serialization.pickle.machine import map_python2_name
from tests.serialization.archives import records_of
from tests.verification.scan import generator, polyglots
from tests.verification.scan.generator import BENIGN, CARRIERS, NUM_SAMPLES, OWN
from tests.verification.scan.genuine import HIDDEN, VALUES, crafted, genuine, piped, repacked
from tests.verification.scan.loaders import KINDS
from tests.verification.scan.polyglots import FAMILIES, controls, num_samples
from tests.verification.scan.scanner import is_clean, told

CRAFTED = list(crafted())
CLEAN_CARRIERS = {
    "pickle", "pickle named pt", "pickle of another ending", "pickle without an ending", "torch",
    "DCP item", "joblib", "transformers", "transformers, a bare pickle",
}  # fmt: skip
"""Those that are clean with a value that runs nothing: without them the tests would prove nothing."""


def numbers_of_generator(wanted: int) -> list[int]:
    """With a stride that shares no factor with any dimension of the samples."""
    step = next(n for n in range(max(1, NUM_SAMPLES // wanted), NUM_SAMPLES) if gcd(n, NUM_SAMPLES) == 1)
    return list(range(0, NUM_SAMPLES, step))[:wanted]


def test_values_that_run_nothing_are_clean_in_the_same_carriers():
    found = {name for name, put in CARRIERS.items() if any(is_clean(put(data)) for data in BENIGN)}
    assert found >= CLEAN_CARRIERS


# Samples of all kinds

NUM_COMPOSED = {"few": 40, "many": 400, "most": 20_000}
SIZES = ["few", pytest.param("many", marks=pytest.mark.extended), pytest.param("most", marks=pytest.mark.soak)]


@pytest.mark.parametrize("size", SIZES)
def test_what_a_real_loader_runs_is_a_finding(size):
    """Of a few files none is of JSON: those loaders import Ray."""
    num, step = NUM_COMPOSED[size], 29 if size == "few" else 1
    valid = [n for n in range(num_samples())[::step] if size != "few" or "JSON" not in polyglots.sample(n).kind]
    # The generator's last: what thousands of its files ran may change what torch takes in the same process.
    plan = {"polyglots": valid, "crafted": list(range(0, len(CRAFTED), step)), "generator": numbers_of_generator(num)}
    found = told("judge", plan)
    composed = [generator.sample(int(number)) for number, loaders in found["generator"].items() if loaders]
    both = [(polyglots.sample(int(number)), *each) for number, each in found["polyglots"].items()]
    made = [CRAFTED[int(number)] for number, each in found["crafted"].items() if is_run(*(each or (True, [])))]
    assert len(composed) > num // 4 and made
    assert [sample.label for sample, loaders, is_valid in both if not (loaders and is_valid)] == []
    assert [label for label, files in made if is_clean(files)] == []
    assert [each.label for each in (*composed, *(sample for sample, *_ in both)) if is_clean(each.files)] == []
    for kind in (*KINDS, *FAMILIES) if size != "few" else ():
        mine = [loaders for sample, loaders, _ in both if kind in (sample.kind, sample.family)]
        assert (len(mine) >= 20, len({name for loaders in mine for name in loaders}) >= 3) == (True, True), kind


@pytest.mark.extended
def test_nothing_is_run_to_say_so():
    """An audit hook sees what the scan does."""
    plan = {"generator": numbers_of_generator(NUM_COMPOSED["many"]), "polyglots": list(range(num_samples()))}
    assert told("scanner", plan) == []


def is_known(module: str, name: str) -> bool:
    """On the list, also by its name in Python 2; the one function whose argument the scan reads as a file; or a name
    that no module can have."""
    if not re.fullmatch(r"[\w.-]+", module):
        return True
    if not name:  # Python's unpickler imports the module alone, and fails
        return module.partition(".")[0] not in sys.stdlib_module_names
    is_inner = (module, name) == ("torch.storage", "_load_from_bytes")
    return is_inner or is_listed(module, name) or is_listed(*map_python2_name(module, name))


def is_run(ran: bool, names: list[tuple[str, str]]) -> bool:
    return ran or not all(is_known(*name) for name in names)


NUM_MUTATED, NUM_SOAKED, BATCH = 5_000, 1_000_000, 50_000


@pytest.mark.extended
@pytest.mark.timeout(6000)
def test_no_loader_runs_a_mutated_file_that_is_clean(request):
    is_soak = request.config.getoption("--soak")
    count, size = (NUM_SOAKED, BATCH) if is_soak else (NUM_MUTATED, NUM_MUTATED)
    with ThreadPoolExecutor(os.cpu_count() if is_soak else 1) as pool:
        plans = [{"mutated": list(range(first, first + size))} for first in range(0, count, size)]
        parts = list(pool.map(lambda plan: told("judge", plan)["mutated"], plans))
    found = {number: each for part in parts for number, each in part.items()}
    clean = {number: (ran, names) for number, (is_safe, ran, names) in found.items() if is_safe}
    assert {number: each for number, each in clean.items() if is_run(*each)} == {}
    assert len(clean) > count // 25
    assert sum(ran for number, (_, ran, _) in found.items() if number not in clean) > count // 1000


# Files that run nothing

CONFIGURATION = {"pickle of a text", "settings", "yaml"}
"""Controls that hold texts of which a program may import names."""


@pytest.mark.parametrize("name", controls())
def test_a_file_of_the_same_form_that_runs_nothing_is_clean(name):
    """But for settings, which have to be allowed."""
    assert is_clean(controls()[name], allow_configuration=True)
    assert is_clean(controls()[name]) == (name not in CONFIGURATION)


@pytest.mark.parametrize("rule", VALUES)
def test_what_libraries_write_is_clean(rule):
    assert [label for label, files in genuine(rule) if not is_clean(files)] == []


def test_hooks_that_are_filled_later_are_refused():
    """torch calls the items of the dict in the next backward pass, whenever they came into it."""
    stream = io.BytesIO()
    torch.save({"w": torch.ones(2), "hooks": "h"}, stream)
    data = records_of(stream.getvalue())["archive/data.pkl"]
    hooks = re.search(rb"ccollections\nOrderedDict\nq.\)Rq(.)", data, re.DOTALL)
    assert hooks
    late = data.removesuffix(b".") + b"h" + hooks[1] + b"K\x00cbuiltins\nlist\ns0."
    assert is_clean({"a.pt": repacked(stream.getvalue(), "archive/data.pkl", data)})
    assert not is_clean({"a.pt": repacked(stream.getvalue(), "archive/data.pkl", late)})


@pytest.mark.parametrize("num_bytes", [50, *(pytest.param(size, marks=pytest.mark.extended) for size in (1, 300, 700))])
def test_a_file_of_joblib_is_read_in_parts(num_bytes, monkeypatch):
    whole = {name: is_clean(files) for name, files in crafted()}
    monkeypatch.setattr(joblib_proof, "FIRST_READ_BYTES", num_bytes)
    assert [label for label, files in genuine("arrays of joblib") if not is_clean(files)] == []
    assert {name: is_clean(files) for name, files in crafted()} == whole


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
