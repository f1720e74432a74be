"""Nothing is clean that is valid of one kind, and that another loader runs."""

from __future__ import annotations

import json
import pickle

import pytest

from tests.verification.scan.genuine import KINDS
from tests.verification.scan.polyglots import DOCUMENTED, FAMILIES, controls, num_samples, sample
from tests.verification.scan.scanner import is_clean
from tests.verification.scan.test_generator import told

pytestmark = pytest.mark.extended

MIN_VARIANTS, MIN_LOADERS = 20, 3

Ran = dict[int, list[str]]

CONFIGURATION = {"pickle of a text", "settings", "yaml"}
"""Controls that hold texts of which a program may import names."""


@pytest.fixture(scope="module")
def judged():
    return told("judge", "polyglots", list(range(num_samples())))


@pytest.fixture(scope="module")
def ran(judged):
    return {int(number): loaders for number, loaders in judged["ran"].items()}


def test_every_sample_is_valid_of_its_kind_and_run_by_another_loader(judged, ran):
    assert [sample(number).label for number in judged["invalid"]] == []
    assert [sample(number).label for number, loaders in ran.items() if not loaders] == []


def test_none_is_clean(ran):
    found = told("scanner", "polyglots", list(range(num_samples())))
    assert [(sample(number).label, ran[number]) for number in found["clean"]] == []
    assert found["events"] == []


@pytest.mark.parametrize("kind", [*KINDS, *FAMILIES])
def test_each_kind_and_family_has_twenty_variants_under_three_loaders(kind, ran):
    mine = [loaders for number, loaders in ran.items() if kind in (sample(number).kind, sample(number).family)]
    assert len(mine) >= MIN_VARIANTS
    assert len({name for loaders in mine for name in loaders}) >= MIN_LOADERS


@pytest.mark.parametrize("name", controls())
def test_a_file_of_the_same_form_that_runs_nothing_is_clean(name):
    """But for settings, which have to be allowed."""
    assert is_clean(controls()[name], allow_configuration=True)
    assert is_clean(controls()[name]) == (name not in CONFIGURATION)


@pytest.mark.parametrize("name", DOCUMENTED)
@pytest.mark.parametrize("file", ["config.json", "log.jsonl", "config.yaml"])
def test_no_documented_name_of_code_is_clean(name, file):
    assert not is_clean({file: json.dumps(DOCUMENTED[name]).encode()})
    assert not is_clean({file: json.dumps({"a": [{"b": DOCUMENTED[name]}]}).encode()})


def test_an_instantiator_of_lightning_is_not_clean():
    """Lightning before 2.6.6 imports and calls it."""
    state = {"state_dict": {}, "hyper_parameters": {"_instantiator": "os.system"}}
    assert not is_clean({"last.ckpt": pickle.dumps(state)})
