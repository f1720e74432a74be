"""Figures in sentences."""

import pytest

from ckpt_tools.messages.wording import format_size

pytestmark = pytest.mark.quick


def test_bytes_as_people_read_them():
    assert [format_size(number) for number in (999, 1000, 4_494_999_999)] == ["999 B", "1.00 kB", "4.49 GB"]
    assert format_size(4_490_000_001, at_least=True) == "4.50 GB"
