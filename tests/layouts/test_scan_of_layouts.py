"""A genuine checkpoint of any layout is proved, but for what it truly holds; each such thing is named here."""

from __future__ import annotations

import random

import pytest

import ckpt_tools
from fixtures.corpus import layouts, make

pytestmark = pytest.mark.extended

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]

OCDBT, ZSTD = ("data of Orbax (OCDBT)",), ("compressed with zstd",)

FINDINGS = {
    "orbax": OCDBT,
    "orbax-manager": OCDBT,
    "orbax-pytree": OCDBT,
    "orbax-sharded": OCDBT,
    "orbax-train-state": OCDBT,
    "orbax-items": OCDBT + ZSTD,
    "orbax-v1": OCDBT,
    "orbax-v1-items": OCDBT,
    "orbax-zarr": ZSTD,
    "orbax-zarr3": OCDBT,
}
"""Layouts that are opened and that a scan does not prove, with parts of the reasons; all else is clean."""

TRANSFORMER_ENGINE = {
    "megatron",
    "megatron-experts",
    "megatron-chained",
    "megatron-weights",
    "megatron-buckets",
    "megatron-flattened",
    "megatron-common-item",
}
"""Layouts that hold a state of fp8, which TransformerEngine unpickles."""

CONFIGURATION = {"automodel", "nanotron", "nanotron-replicated", "nemo-2", *FINDINGS, *TRANSFORMER_ENGINE}
"""Layouts with settings in YAML or in JSON of unknown keys, as all of Orbax have, or with pickled bytes."""

SAMPLE = [*sorted(CONFIGURATION), *random.Random("layouts").sample(sorted({*OPENED} - CONFIGURATION), 20)]


def test_the_findings_are_of_layouts():
    assert set(OPENED) >= CONFIGURATION


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every layout in ``make soak``; in ``make test-all`` those that are not proved, and a sample."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", OPENED if metafunc.config.getoption("--soak") else SAMPLE)


def test_a_genuine_one_is_clean(name):
    report = ckpt_tools.scan(make(name).source)
    texts = {finding.what for finding in report.findings if finding.danger == "configuration"}
    told = sorted({finding.what for finding in report.findings} - texts)
    assert all(any(part in each for part in FINDINGS.get(name, ())) for each in told), told
    assert bool(told) == (name in FINDINGS)
    assert bool(texts) == (name in CONFIGURATION)
    assert not report.names
    assert report.num_files > 0
