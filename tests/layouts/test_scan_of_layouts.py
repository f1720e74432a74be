"""A genuine checkpoint of any layout is clean, but for what it truly holds; each such thing is named here."""

from __future__ import annotations

import pytest

import ckpt_tools
from fixtures.corpus import layouts, make

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]

OCDBT = "data of Orbax (OCDBT)"

FINDINGS = {
    "orbax": OCDBT,
    "orbax-manager": OCDBT,
    "orbax-pytree": OCDBT,
    "orbax-sharded": OCDBT,
    "orbax-train-state": OCDBT,
    "orbax-v1": OCDBT,
    "orbax-zarr": "compressed with zstd",
    "orbax-zarr3": OCDBT,
}
"""Layouts that are opened and that a scan does not prove, with a part of the reason; all else is clean."""


def test_the_findings_are_of_layouts() -> None:
    assert set(FINDINGS) <= set(OPENED)


@pytest.mark.parametrize("name", OPENED)
def test_a_genuine_one_is_clean(name: str) -> None:
    report = ckpt_tools.scan(make(name).source)
    told = sorted({finding.what for finding in report.findings})
    assert all(FINDINGS.get(name, "nothing") in each for each in told), told
    assert bool(told) == (name in FINDINGS)
    assert not report.names
    assert report.num_files > 0
