"""Runs docs/quantized.md: each command does what is printed under it."""

from __future__ import annotations

import pytest

from tests.support.pages import ROOT, check_commands
from tests.support.quantized import fp8_model

pytestmark = pytest.mark.extended


def test_every_command_prints_what_the_page_says(tmp_path):
    fp8_model(tmp_path / "fp8")
    check_commands(ROOT / "docs" / "quantized.md", tmp_path)
