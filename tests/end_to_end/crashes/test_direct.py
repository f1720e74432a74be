"""Every format, read and written past the page cache, has the bits that it has through it."""

import pytest

from ckpt_tools.cli.main import group
from ckpt_tools.stores.local import direct
from tests.end_to_end.crashes.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_direct_output_has_the_bits_of_buffered_output(name, made_case, monkeypatch):
    case, written, read = made_case(name), [], []
    real_write, real_read = direct.write_direct, direct.read_direct
    monkeypatch.setattr(direct, "write_direct", lambda *args: written.append(real_write(*args)) or written[-1])
    monkeypatch.setattr(direct, "read_direct", lambda *args: read.append(real_read(*args)) or read[-1])
    monkeypatch.setattr(direct, "is_in_page_cache", lambda *_: False)
    monkeypatch.setattr(direct, "MIN_READ_BYTES", 512)
    monkeypatch.setattr(direct, "MIN_WRITE_BYTES", direct.BLOCK_BYTES)
    case.put({})
    group.main([*map(str, case.words), "--io", "direct"], standalone_mode=False)
    assert case.visible() == case.expected
    assert sum(written) > 0.5 * case.num_bytes, "most bytes lie in whole blocks"
    assert sum(read) > 0.5 * case.num_bytes
    assert [path.name for path in case.folder.iterdir()] == [case.name]
