"""A file that passes as something else is not clean if its bytes could also be a pickle that imports something."""

from __future__ import annotations

import pytest

from ckpt_tools.verification.scan.piece import Piece
from ckpt_tools.verification.scan.tokens import imports_as_a_pickle
from tests.verification.scan.generator import CARRIERS, INDIRECT, TRICKS
from tests.verification.scan.scanner import is_clean


def piece(data: bytes) -> Piece:
    return Piece("x", "", len(data), lambda start, stop: data[start:stop])


@pytest.mark.parametrize("name", INDIRECT)
def test_whatever_a_pickle_imports_is_seen(name):
    assert imports_as_a_pickle(piece(INDIRECT[name]))
    assert imports_as_a_pickle(piece(b"V" + b"a" * (1 << 17) + b"\n0" + INDIRECT[name]))
    assert imports_as_a_pickle(piece(b"B" + (1 << 17).to_bytes(4, "little") + b"\0" * (1 << 17) + INDIRECT[name]))


def test_so_is_every_trick():
    assert [name for name, data in TRICKS if not imports_as_a_pickle(piece(data))] == []


@pytest.mark.parametrize("name", INDIRECT)
@pytest.mark.parametrize("carrier", ["safetensors to the last byte", "strict safetensors named bin"])
def test_a_strict_file_of_safetensors_that_is_a_pickle_too_is_not_clean(carrier, name):
    assert not is_clean(CARRIERS[carrier](b"N." + INDIRECT[name]))
    assert not is_clean(CARRIERS[carrier](b"\x80\x05" + INDIRECT[name]))


@pytest.mark.parametrize(
    "data", [b"", b"N.", b"a text\n", b"{}", b"c my text\nanother line\n", b"V", b"\x8c\xff", b"J"]
)
def test_what_imports_nothing_is_none(data):
    assert not imports_as_a_pickle(piece(data))
